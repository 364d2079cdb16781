"""Options of a pipeline: written once, in `pipeline.core.options.options`, and shown everywhere."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
from typing import get_args

import pytest

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.base.arguments import described
from pipeline.core.options.options import Arguments, ModelParts, Options
from pipeline.core.options.plan import Plan
from pipeline.core.options.resolve import with_microbatches
from pipeline.training.config import PipelineOptions
from tests.support import models
from tests.support.close import assert_close

FIELDS = [*dataclasses.fields(ModelParts), *dataclasses.fields(Options)]


def make(**options) -> Pipeline:
    return Pipeline(models.build(models.Block, 2), 2, mesh=make_mesh(stage=2), **options)


def test_the_signature_is_that_of_the_dataclass() -> None:
    wanted = inspect.signature(Arguments)
    assert inspect.signature(Pipeline) == wanted
    own, *others = inspect.signature(Pipeline.__init__).parameters.values()
    assert own.name == "self"
    assert others == list(wanted.parameters.values())
    assert {name: p.default for name, p in wanted.parameters.items()} == {
        one.name: inspect.Parameter.empty if one.default is dataclasses.MISSING else one.default
        for one in FIELDS
    }
    positional = [n for n, p in wanted.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["stages", "num_microbatches"]


def test_a_subclass_and_an_instance_have_signatures_of_their_own() -> None:
    class Two(Pipeline):
        def __init__(self, width: int) -> None:
            super().__init__(models.build(models.Block, 2), 2, mesh=make_mesh(stage=2))
            self.width = width

    assert list(inspect.signature(Two).parameters) == ["width"]
    assert list(inspect.signature(Two(3)).parameters) == ["inputs", "extras", "num_microbatches"]


def test_help_describes_every_option_once() -> None:
    texts = described(ModelParts, Options)
    assert list(texts) == [one.name for one in FIELDS]
    shown = pydoc.plain(pydoc.render_doc(Pipeline))
    flat = " ".join(shown.replace("|", " ").split())
    for one in FIELDS:
        assert flat.count(" ".join(texts[one.name].replace("|", " ").split())) == 1, one.name
        if one.default in (None, False, ()):
            assert f"= {one.default!r}" in flat
    assert flat.index("Args: stages: K modules") < flat.index("Attributes: chunks:")


def test_an_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(TypeError) as caught:
        make(shedule="1f1b", quiet=True)
    first, second = str(caught.value).split("\n")
    assert first == "Pipeline() has no option 'shedule'; did you mean 'schedule'?"
    names = ", ".join(inspect.signature(Pipeline).parameters)
    assert second == f"Pipeline() has no option 'quiet'; its options are {names}"
    with pytest.raises(TypeError) as caught:
        Pipeline([])
    assert str(caught.value) == "Pipeline(): missing a required argument: 'num_microbatches'"


def test_the_plan_has_every_option_and_remembers_what_was_given() -> None:
    options = dataclasses.fields(Options)
    assert {one.name for one in options} < {one.name for one in dataclasses.fields(Plan)}
    plan = make(schedule="zb_h1", remat=None).plan
    assert (plan.options.schedule, plan.options.remat, plan.options.pattern) == (
        "zb_h1",
        None,
        None,
    )
    assert (plan.schedule.name, plan.remat) == ("zb_h1", None)
    assert plan.options.to_dict() == {one.name: getattr(plan.options, one.name) for one in options}


def test_a_file_can_set_each_option_that_has_a_spelling_in_toml() -> None:
    """The other options are Python objects, or come from another table."""
    found = {one.name: one for one in dataclasses.fields(PipelineOptions)}
    others = {one.name for one in dataclasses.fields(Options)} - set(found)
    parallel = {"num_microbatches", "mesh", "param_dtype", "compute_dtype", "grad_dtype"}
    assert others == parallel | {"sharding", "wrt", "state", "after_step"}
    assert "none" in str(get_args(found["remat"].type))
    given = PipelineOptions(remat="none", auto_axes=("tensor",))
    defaults = {name: one.default for name, one in found.items() if name not in ("batch", "costs")}
    assert given.options() == defaults | {"remat": None, "auto_axes": ("tensor",)}


def test_another_number_of_microbatches_needs_no_second_pipeline(monkeypatch) -> None:
    pipe = make(schedule="1f1b", loss_fn=models.squares)
    x = models.rows(8)
    wanted = pipe.loss(x, x)
    monkeypatch.setattr(Pipeline, "__init__", None)
    found = pipe.loss(x, x, num_microbatches=4)
    assert_close(found, wanted)
    plan = with_microbatches(pipe.plan, 4)
    assert plan.schedule.num_microbatches == plan.num_microbatches == 4
