"""Plain attributes of modules: written in a call, or set after the pipeline was made (issue 67)."""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, split
from pipeline.training.step import Step

X = np.ones((8, 4), np.float32)
REMEDY = (
    "when it is called: a call is traced once and then runs compiled, so no later call would see "
    "the change; keep the value in an nnx.Variable of a kind of its own, which Pipeline(..., "
    "state=kind) declares, or set the attribute before Pipeline(...)"
)


def mean_square(y, t):
    return jnp.mean((y - t) ** 2)


class Layer(nnx.Module):
    def __init__(self, k=0):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(k))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(k))
        self._calls, self.log, self.scale = 0, [], 1.0

    @functools.cached_property
    def width(self):
        return 4

    def note(self):
        """Change nothing."""

    def __call__(self, x, *targets):
        self.note()
        y = self.linear(x) * self.scale
        return mean_square(y, *targets) if targets else y


class Counts(Layer):
    def note(self):
        self._calls += 1


class Begins(Layer):
    """A layer that is initialised by its first call, as ActNorm or a codebook is."""

    def __call__(self, x, *targets):
        if not hasattr(self, "ready"):
            self.ready, x = True, x * 2.0
        return super().__call__(x, *targets)


class Appends(Layer):
    def note(self):
        self.log.append(self.width)


class ChangesItsMode(Layer):
    def note(self):
        self.drop.deterministic = not self.drop.deterministic


class Config:
    def __init__(self):
        self.names, self.inner = ["a"], types.SimpleNamespace(calls=0)


class CountsInARecord(Layer):
    def __init__(self, k=0):
        super().__init__(k)
        self.config = Config()

    def note(self):
        self.config.inner.calls += 1


class WritesWhatItHad(Layer):
    def note(self):
        self._calls, self.log = 1, [self.width]
        self._calls, self.log = 0, []


class MakesATable(Layer):
    """A layer that keeps what its first call has made."""

    def __init__(self, k=0):
        super().__init__(k)
        self.table, self.shapes, self.nothing = None, {}, float("nan")

    def __call__(self, x, *targets):
        if self.table is None:
            self.table = tuple(1.0 for _ in range(x.shape[-1]))
        self.shapes[x.shape], self.last, self.nothing = True, x.shape, float("nan")
        return super().__call__(x * jnp.asarray(self.table)[None], *targets)


def pipeline(**changed):
    parts = {"stages": [Layer(0), Layer(1)], "loss_fn": mean_square} | changed
    return Pipeline(num_microbatches=2, **parts)


@pytest.mark.parametrize(
    ("where", "kind", "change"),
    [
        ("stages", Counts, "a stage changes its attribute _calls from 0 to 1"),
        ("stages", Begins, "a stage changes its attribute ready from nothing to True"),
        ("one rank", Appends, "a stage changes its attribute log from [] to [4]"),
        ("programs", Counts, "a stage changes its attribute _calls from 0 to 1"),
        (
            "stages",
            CountsInARecord,
            (
                "a stage changes its attribute config from {'inner': {'calls': 0}, 'names': ['a']} "
                "to {'inner': {'calls': 1}, 'names': ['a']}"
            ),
        ),
        ("embed", Begins, "embed or head changes its attribute embed.ready from nothing to True"),
        (
            "head",
            ChangesItsMode,
            "embed or head changes its attribute head.drop.deterministic from False to True",
        ),
        (
            "loss_fn",
            Counts,
            "embed, head or loss_fn changes its attribute loss_fn._calls from 0 to 1",
        ),
    ],
)
def test_an_attribute_that_a_call_changes_is_refused(where, kind, change) -> None:
    options = {
        "one rank": {"mesh": make_mesh(stage=1)},
        "programs": {"engine": "programs"},
    }.get(where, {})
    part = {where: kind()} if where in ("embed", "head", "loss_fn") else {}
    pipe = pipeline(**part or {"stages": [kind(0), kind(1)]}, **options)
    with pytest.raises(ValueError, match="changes its attribute") as caught:
        pipe.loss(X, X)
    assert str(caught.value) == f"{change} {REMEDY}"


@pytest.mark.parametrize("kind", [WritesWhatItHad, MakesATable])
def test_an_attribute_that_affects_no_later_call_is_allowed(kind) -> None:
    wanted = pipeline().loss(X, X)
    pipe = pipeline(stages=[kind(0), kind(1)])
    assert [pipe.loss(X, X) for _ in range(2)] == [wanted] * 2


def test_a_model_that_counts_its_calls_is_not_split() -> None:
    class Model(nnx.Module):
        def __init__(self):
            self.layers, self.calls = nnx.List([Layer(k) for k in range(4)]), 0

        def __call__(self, x):
            self.calls += 1
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(ValueError, match="changes its attribute") as caught:
        split(Model(), 2, X)
    assert str(caught.value) == f"the model changes its attribute calls from 0 to 1 {REMEDY}"


class Loss(nnx.Module):
    def __init__(self):
        self.scale = 1.0

    def __call__(self, y, t):
        return mean_square(y, t) * self.scale


@pytest.mark.parametrize(
    ("take", "trained", "text"),
    [
        (lambda pipe, given: given["stages"][1], True, "stages[1].scale from 1.0"),
        (lambda pipe, given: given["head"].drop, False, "head.drop.scale from nothing"),
        (lambda pipe, given: pipe.stages()[0], True, "pipe.stages()[0].scale from 1.0"),
        (lambda pipe, given: given["loss_fn"], False, "loss_fn.scale from 1.0"),
    ],
)
def test_an_attribute_set_outside_of_the_pipeline_is_warned_of_once(take, trained, text) -> None:
    given = {"stages": [Layer(0), Layer(1)], "head": Layer(2), "loss_fn": Loss()}
    pipe = pipeline(**given)
    first, grads = pipe.value_and_grad(X, X)
    if trained:  # factors are changed while a model trains
        make_optimizer(pipe, optax.sgd(0.0)).update(pipe, grads)
    take(pipe, given).scale = 10.0
    with pytest.warns(UserWarning, match="was set after the pipeline was made") as caught:
        assert pipe.value_and_grad(X, X)[0] == first
    (one,) = caught
    assert str(one.message) == (
        f"{text} to 10.0: this attribute was set after the pipeline was made, which runs with the "
        f"value that it had then: set it before Pipeline(...), or in the pipeline, by "
        f"pipe.set_attributes(name=value), pipe.embed or pipe.head; nothing is wrong if the module "
        f"is meant to be another model"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.value_and_grad(X, X)


def test_an_attribute_that_is_set_in_both_is_not_warned_of() -> None:
    stages = [Layer(0), Layer(1)]
    pipe = pipeline(stages=stages)
    for module in (pipe, *stages):  # to compare with the plain model
        module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.loss(X, X)
    stages[0].scale = 2.0
    with pytest.warns(UserWarning, match=r"stages\[0\].scale from 1.0 to 2.0: this attribute"):
        pipe.loss(X, X)


def test_an_attribute_set_in_the_pipeline_has_its_effect() -> None:
    pipe = pipeline(head=Layer(2))
    first = pipe.loss(X, X)
    pipe.head.scale = 0.0
    assert pipe.loss(X, X) == 1.0 != first
    pipe.head.scale = 1.0
    pipe.set_attributes(scale=0.0)
    assert pipe.loss(X, X) == 1.0


@dataclasses.dataclass
class Counter:
    calls: int = 0
    names: tuple[str, ...] = ("a", "b")


class PlainModel(nnx.Module):
    """A model without a pipeline, which counts its calls in a record."""

    def __init__(self):
        self.layer, self.config = Layer(), Counter()

    def loss(self, x, t):
        self.config.calls += 1
        return mean_square(self.layer(x), t) * self.config.calls


def test_a_step_of_a_model_that_counts_its_calls_is_refused() -> None:
    model = PlainModel()
    step = Step(model, nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param))
    with pytest.raises(ValueError, match="changes its attribute") as caught:
        step(X, X)
    change = "config from {'calls': 0, 'names': ('a', 'b')} to {'calls': 1, 'names': ('a', 'b')}"
    assert str(caught.value) == f"the model changes its attribute {change} {REMEDY}"


def test_an_attribute_set_after_the_step_was_made_is_warned_of() -> None:
    pipe = pipeline(head=Layer(2))
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.0)))
    step(X, X)
    pipe.eval()
    pipe.train()  # as it was
    step(X, X)
    pipe.head.scale = 0.0
    with pytest.warns(UserWarning, match="was set after the Step was made") as caught:
        step(X, X)
    (one,) = caught
    assert str(one.message) == (
        "the model's attribute ends.head.scale from 1.0 to 0.0 was set after the Step was made, "
        "which runs with the value that it had then: make another Step, or keep the value in an "
        "nnx.Variable, which a step reads anew"
    )
    step(X, X)  # said once
