"""`Pipeline.replace`, the same weights under another plan; and how options show and are kept."""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.base.tree import as_numbers
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close, distance

K, M = 8, 8  # stages and microbatches
OPTIONS = {"loss_fn": models.squares, "ignore": ("number",)}


class Numbered(models.Block):
    """A block that knows its number, with a plain array and a stream of its own."""

    def __init__(self, rngs: nnx.Rngs, number: int):
        super().__init__(rngs)
        self.number, self.scale = number, jnp.ones(models.WIDTH) * number
        self.rngs = rngs

    def __call__(self, x):
        return super().__call__(x) * self.scale


def numbered() -> list[nnx.Module]:
    return [Numbered(nnx.Rngs(k), k) for k in range(K)]


def uneven() -> list[nnx.Module]:
    return [models.Layered(nnx.Rngs(k), layers=1 + k % 2) for k in range(K)]


def leaves(pipe: Pipeline) -> dict:
    """Type, place and metadata of every leaf of a pipeline's state."""
    return {
        (path, index): (leaf.shape, leaf.dtype, leaf.sharding, said(variable))
        for path, variable in nnx.to_flat_state(nnx.state(pipe))
        for index, leaf in enumerate(jax.tree.leaves(variable))
    }


def said(variable) -> dict:
    return variable.get_metadata() if isinstance(variable, nnx.Variable) else {}


def assert_same(found: Pipeline, wanted: Pipeline) -> None:
    """As if it had been made so."""
    assert leaves(found) == leaves(wanted)
    for one, other in zip(*(jax.tree.leaves(nnx.state(p)) for p in (found, wanted)), strict=True):
        if not isinstance(one, jax.ShapeDtypeStruct):
            np.testing.assert_array_equal(*map(as_numbers, (one, other)))
    assert nnx.graphdef(found.chunks) == nnx.graphdef(wanted.chunks)
    assert found.schedule.orders == wanted.schedule.orders
    for stage, other in zip(found.stages(), wanted.stages(), strict=True):
        assert getattr(stage, "number", None) == getattr(other, "number", None)


CHANGES = {
    "microbatches": {"num_microbatches": 16},
    "family": {"schedule": "gpipe", "remat": None},
    "placement": {"schedule": "zb_v"},
    "data": {"mesh": make_mesh(stage=4, data=2), "data_parallel": "fsdp"},
    "other devices": {"mesh": make_mesh(stage=2)},
    "other ranks, the same devices": {"mesh": make_mesh(stage=2, data=2)},
    "dtype": {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16},
    "ends": {"head": models.Readout(nnx.Rngs(5)), "embed": models.Words(nnx.Rngs(6))},
}


def as_types(module):
    """The module with types for its arrays."""
    graphdef, state = nnx.split(module)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return nnx.merge(graphdef, types)


def cases():
    """Every change of arrays, and of types those that lay stages out anew; the rest is slow."""
    for change, model, types in itertools.product(CHANGES, (numbered, uneven), (False, True)):
        rare = types and (model is uneven or change not in ("placement", "other devices"))
        marks = [pytest.mark.slow, pytest.mark.exhaustive] if rare else []
        name = f"{change}-{model.__name__}-{'types' if types else 'arrays'}"
        yield pytest.param(change, model, types, marks=marks, id=name)


@pytest.mark.few
@pytest.mark.parametrize(("change", "model", "types"), list(cases()))
def test_it_is_as_if_it_had_been_made_so(change: str, model, types: bool) -> None:
    changes, options = dict(CHANGES[change]), dict(OPTIONS, mesh=make_mesh(stage=4))
    stages = model()
    if model is uneven:
        del options["ignore"]
    if types:
        stages = [as_types(stage) for stage in stages]
        changes |= {name: as_types(changes[name]) for name in ("embed", "head") if name in changes}
    pipe = Pipeline(stages, M, **options)
    before = nnx.state(pipe)
    found = pipe.replace(**changes)
    assert_same(found, Pipeline(stages, **({"num_microbatches": M} | options | changes)))
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, before, nnx.state(pipe)))
    if change != "dtype":  # bits that are gone do not come back
        before_it = pipe.plan.options.to_dict() | {"loss_fn": pipe.plan.loss_fn}
        assert_same(found.replace(**{name: before_it.get(name) for name in changes}), pipe)


def test_tables_have_as_many_rows_as_their_ranks_share() -> None:
    """Rows of zeros behind the last word come and go."""
    embed = VocabularyEmbedding(models.WORDS, models.WIDTH, rngs=nnx.Rngs(1))
    ends = {"embed": embed, "head": VocabularyHead(models.WORDS, models.WIDTH, tied=embed)}
    options = {"loss_fn": CrossEntropy(), "mesh": make_mesh(stage=4), **ends}
    stages = models.build(models.Block, 4)
    pipe, shared = (Pipeline(stages, 4, vocabulary=way, **options) for way in ("ends", "stage"))
    assert shared.embed.table.shape == (12, models.WIDTH)
    assert_same(pipe.replace(vocabulary="stage"), shared)
    assert_same(shared.replace(vocabulary="ends"), pipe)
    assert_same(shared.replace(mesh=make_mesh(stage=1)), pipe.replace(mesh=make_mesh(stage=1)))
    assert (
        shared.replace(num_microbatches=2).head.table.get_value() is shared.head.table.get_value()
    )


def test_stages_of_a_stacked_module_have_names_for_their_own_dims_only() -> None:
    """As `nnx.vmap` names the stack's: ``("layers", None, "model")``."""
    (stage,) = models.build(models.Noisy, 1)
    graphdef, state = nnx.split(stage)
    stacked = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.stack([x] * 4), state))
    names = {"out_sharding": ("layers", None, "model"), "eager_sharding": False}
    stacked.w = nnx.Param(stacked.w.get_value(), **names)
    pipe = Pipeline(stacked, 4, mesh=make_mesh(stage=2, model=2))
    assert pipe.stages()[0].w.get_metadata()["out_sharding"] == (None, "model")
    found = pipe.replace(schedule="zb_v")
    assert found.chunks[1].w.get_metadata()["out_sharding"] == ("stage", None, "model")
    assert_same(found.replace(schedule=None), pipe)


def test_what_stays_is_not_copied_and_what_users_added_is_kept() -> None:
    class Counted(Pipeline):
        def __init__(self, stages):
            super().__init__(stages, 4, mesh=make_mesh(stage=2), head=jnp.tanh)
            self.step = nnx.Variable(jnp.array(3))

    x = models.rows(8)
    pipe = Counted(models.build(models.Block, 4))
    other = pipe.replace(num_microbatches=2, schedule="eager_1f1b")
    assert type(other) is Counted
    assert (other.num_microbatches, other.schedule.name) == (2, "eager_1f1b")
    same = jax.tree.map(lambda a, b: a is b, *(nnx.state(p.chunks) for p in (pipe, other)))
    assert jax.tree.all(same)
    other.step[...] = jnp.array(4)
    other.chunks[0].up[...] *= 2
    assert int(pipe.step[...]) == 3
    stages = pipe.stages()
    assert_close(pipe(x), models.compose(stages, None, jnp.tanh, x))
    assert_close(other(x), models.compose(other.stages(), None, jnp.tanh, x))
    assert distance(pipe(x), other(x)) > 1e-2
    with pytest.raises(ValueError, match="loss_fn=None"):
        pipe.loss(x, x)
    loss = other.replace(loss_fn=models.squares, head=None).loss(x, x)
    wanted = models.squares(models.compose(other.stages(), None, None, x), x)
    assert_close(loss, wanted)


def test_an_optimizer_is_that_of_so_many_ranks() -> None:
    def build(ranks: int) -> Pipeline:
        stages = models.build(models.Block, 2)
        return Pipeline(stages, 2, mesh=make_mesh(stage=ranks), loss_fn=models.squares)

    optimizer, other = make_optimizer(build(2), optax.sgd(0.1)), build(1)
    grads = nnx.state(other, nnx.Param)
    with pytest.raises(ValueError, match="ranks") as caught:
        optimizer.update(other, grads)
    assert str(caught.value) == (
        "the optimizer was made for a pipeline of 2 ranks, and this one has 1; make another with "
        "make_optimizer(pipe, tx), whose state a checkpoint carries over (docs/checkpoints.md)"
    )


def test_options_are_not_assigned() -> None:
    pipe = Pipeline(models.build(models.Block, 2), 2, mesh=make_mesh(stage=2))
    with pytest.raises(AttributeError) as caught:
        pipe.loss_fn = models.squares
    assert str(caught.value) == (
        "pipe.loss_fn cannot be assigned: a pipeline's options are part of its compiled steps; use "
        "pipe = pipe.replace(loss_fn=...), which keeps the weights"
    )
    for name in ("remat", "schedule", "mesh", "num_microbatches", "embed", "head", "param_dtype"):
        with pytest.raises(AttributeError, match=rf"pipe = pipe.replace\({name}=...\)"):
            setattr(pipe, name, None)
    with pytest.raises(AttributeError) as caught:
        pipe.stages = []
    assert str(caught.value) == (
        "pipe.stages is the method that gives the stages back and cannot be assigned; for other "
        "stages make another Pipeline(stages, ...)"
    )
    pipe.epoch, pipe.seen = 3, nnx.Variable(jnp.zeros(()))  # which are the user's
    assert nnx.merge(*nnx.split(pipe)).epoch == 3


def test_a_pipeline_prints_in_ten_lines() -> None:
    """Options that are as by default, and arrays, are not shown."""
    ends = {"embed": models.Words(nnx.Rngs(6)), "head": jnp.tanh}
    stages = [models.Layered(nnx.Rngs(k), layers=1 + k) for k in range(2)]
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), loss_fn=models.squares, **ends)
    pipe = pipe.replace(remat=None, grad_dtype="weights", sharding=lambda path, variable: None)
    pipe.epoch = 3
    outer = nnx.Dict(pipe=pipe)
    assert (
        repr(pipe)
        == str(pipe)
        == """\
Pipeline(  # 280 parameters
  stages=2 of Layered, embed Words, head tanh,
  mesh=data 1 x stage 2, 1 stages per rank,
  num_microbatches=2,
  schedule=eager_1f1b,
  loss_fn=squares,
  options=remat=None, grad_dtype='weights', sharding=<lambda>,
  attributes=epoch
)"""
    )
    assert len(repr(outer).splitlines()) == 2 + len(repr(pipe).splitlines())


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"batch": P(("data", "expert"))}, "(('data', 'expert'),)"),
        ({"batch": {"inputs": P("data")}}, "('data',)}"),
        ({"wrt": nnx.PathContains("up")}, "PathContains('up'"),
        ({"remat": jax.checkpoint_policies.everything_saveable}, "everything_saveable"),
    ],
)
def test_print_shows_the_value_of_an_option(option, text) -> None:
    """And not its class (issue 52, U-repr-batch)."""
    mesh = make_mesh(stage=2, expert=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an axis in no role
        pipe = Pipeline(models.build(models.Block, 2), 2, mesh=mesh, **option)
    (name,) = option
    assert text in repr(pipe).split(f"{name}=")[1].splitlines()[0]


def test_what_cannot_be_replaced_is_said() -> None:
    pipe = Pipeline(models.build(models.Block, 2), 2, mesh=make_mesh(stage=2))
    with pytest.raises(TypeError) as caught:
        pipe.replace(stages=[])
    assert str(caught.value) == (
        "replace(stages=...): replace() keeps the stages with their weights; for others make "
        "another Pipeline(stages, ...)"
    )
    with pytest.raises(TypeError) as caught:
        pipe.replace(microbatches=4, los_fn=None)
    assert str(caught.value) == (
        "replace() has no option 'microbatches'; did you mean 'num_microbatches'?\n"
        "replace() has no option 'los_fn'; did you mean 'loss_fn'?"
    )
    with pytest.raises(ValueError, match="head is made of types"):
        pipe.replace(head=as_types(models.Readout(nnx.Rngs(0))))
    with pytest.raises(ValueError, match="divides 2"):
        pipe.replace(mesh=make_mesh(stage=4))
