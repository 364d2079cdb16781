"""Attributes of modules beside arrays: configurations without a hash, functions, layer numbers."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.model.objects import alike
from tests.support import models
from tests.support.models import WIDTH, Block, Readout, Words, normal

X, T = models.rows(8), models.rows(8, seed=3)


def make(stages, **options) -> Pipeline:
    options.setdefault("loss_fn", models.squares)
    options.setdefault("mesh", make_mesh(stage=2))
    return Pipeline(stages, 4, **options)


@dataclasses.dataclass
class Config:
    """Compared by value and without a hash, as configurations of published models are."""

    sizes: list[int]
    scales: dict[str, object] = dataclasses.field(default_factory=lambda: {"out": 0.5})


class Plain:
    """A configuration that is compared by identity."""

    def __init__(self, **values):
        self.__dict__ |= values


class Configured(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config=None):
        self.config = config or Config([1, 2])
        self.block = Block(rngs)

    def __call__(self, x):
        return x + self.block(x) * self.config.scales["out"]


def uneven(rngs):
    return Configured(rngs, Config([1], {"out": 0.25}))


def test_a_plan_is_data():
    """Results of traces lie in an object of their own, all else cannot be written."""
    plan = make(models.build(Block, 2), wrt=nnx.Param).plan
    values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    assert [name for name, v in values.items() if isinstance(v, (list, dict, set))] == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.remat = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.options.remat = None


@pytest.mark.slow
@pytest.mark.parametrize("second", [Configured, uneven], ids=["alike", "not alike"])
def test_a_configuration_without_a_hash(second):
    stages = [Configured(nnx.Rngs(0)), second(nnx.Rngs(1))]
    words, ends = models.words(8), {"embed": Words(nnx.Rngs(7)), "head": Readout(nnx.Rngs(8))}
    for end in ends.values():
        end.config = Config([3])
    pipe = make(stages, loss_fn=models.cross_entropy, **ends)
    labels = words % models.CLASSES
    wanted = models.reference(stages, words, labels, models.cross_entropy, **ends)
    models.assert_matches(pipe, pipe.value_and_grad(words, labels), wanted)
    found = "stages[1] differs from stages[0] in attribute config: " in pipe.describe()
    assert found == (second is uneven)


def test_a_configuration_without_a_hash_is_traced_once():
    count = []

    class Counting(Configured):
        def __call__(self, x):
            count.append(None)
            return Configured.__call__(self, x)

    pipe = make(models.build(Counting, 2))
    pipe.value_and_grad(X, T)
    traces = len(count)
    losses = [pipe.value_and_grad(X, T)[0] for _ in range(2)]
    assert len(count) == traces
    step = nnx.jit(lambda pipe: pipe.loss(X, T))
    assert [float(step(pipe)) for _ in range(2)] == pytest.approx([float(x) for x in losses])


def test_a_loss_without_a_hash():
    @dataclasses.dataclass
    class Loss:
        scales: list[float]

        def __call__(self, y, t):
            return models.squares(y, t) * self.scales[0]

    stages = models.build(Block, 2)
    pipe, loss = make(stages, loss_fn=Loss([2.0])), Loss([2.0])
    models.assert_matches(pipe, pipe.value_and_grad(X, T), models.reference(stages, X, T, loss))


def scaled(by):
    return lambda x: x * by


@pytest.mark.few
@pytest.mark.parametrize(
    ("make_value", "other"),
    [
        (lambda: Config([1], {"table": np.arange(3)}), Config([1], {"table": np.arange(1, 4)})),
        (lambda: nnx.initializers.normal(0.02), nnx.initializers.normal(0.03)),
        (lambda: functools.partial(jnp.clip, max=[1]), functools.partial(jnp.clip, max=[2])),
        (lambda: scaled({"a": [1]}), scaled({"a": [2]})),
        (lambda: Plain(a=1, b=[Plain(c=2)]), Plain(a=1, b=[Plain(c=3)])),
        (lambda: 1, 1.0),
        (lambda: [Config([1])], [Config([1]), Config([1])]),
    ],
    ids=["arrays", "initializer", "partial", "closure", "plain", "number", "list"],
)
def test_what_is_alike(make_value, other):
    assert alike(make_value(), make_value())
    assert not alike(make_value(), other)
    stages = models.build(Block, 2)
    for stage in stages:
        stage.value = nnx.static(make_value())
    pipe = make(stages)
    assert "alike" not in pipe.describe()
    pipe.value_and_grad(X, T)
    stages[1].value = nnx.static(other)
    assert "stages[1] differs from stages[0] in attribute value" in make(stages).describe()


def test_what_holds_itself_is_compared():
    one, other = Plain(), Plain()
    one.own, other.own = one, other
    assert alike(one, other)
    other.more = 1
    assert not alike(one, other)


# --- what is ignored ---


class Numbered(Block):
    """Knows its number, as layers of published models do, in itself and within."""

    def __init__(self, rngs: nnx.Rngs, number: int = 0):
        super().__init__(rngs)
        self.layer_index, self.inner = number, nnx.List([Named(rngs, f"layer {number}")])

    def __call__(self, x):
        with jax.named_scope(f"layer{self.layer_index}"):
            return self.inner[0](super().__call__(x))


class Named(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, name: str):
        self.w, self.name = normal(rngs, WIDTH, WIDTH), name

    def __call__(self, x):
        return x + jnp.tanh(x @ self.w[...])


def numbered(K):
    return [Numbered(nnx.Rngs(k), k) for k in range(K)]


IGNORE = ("layer_index", "name")


@pytest.mark.few
@pytest.mark.parametrize(("S", "K"), [(2, 2), (2, 4), (1, 3)])
def test_numbers_that_are_ignored(S, K):
    stages = numbered(K)
    pipe = make(stages, mesh=make_mesh(stage=S), ignore=IGNORE)
    assert "like" not in pipe.describe()
    models.assert_matches(
        pipe, pipe.value_and_grad(X, T), models.reference(stages, X, T, models.squares)
    )
    assert [stage.layer_index for stage in stages] == list(range(K)), "what is given stays"
    for k, stage in enumerate(pipe.stages()):
        assert (stage.layer_index, stage.inner[0].name) == (k, f"layer {k}")
        np.testing.assert_array_equal(stage.up[...], stages[k].up[...])


def test_numbers_that_are_not_ignored_are_spoken_of_once():
    message = (
        "stages[1] differs from stages[0] only in attribute layer_index: 1 against 0 and attribute "
        "inner.0.name: 'layer 1' against 'layer 0', and so do all 4 stages from each other: each "
        "is traced and compiled by itself; if what a stage computes does not depend on it, use "
        "Pipeline(..., ignore=('layer_index', 'name'))"
    )
    stages = numbered(4)
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as caught:
        pipe = make(stages)
    assert len(caught) == 1
    text = pipe.describe()  # and no warning
    assert "stages[1] differs from stages[0] in attribute layer_index: 1 against 0;" in text
    models.assert_matches(
        pipe, pipe.value_and_grad(X, T), models.reference(stages, X, T, models.squares)
    )
    with pytest.warns(UserWarning, match="layer_index"):
        text = make(stages, mesh=make_mesh(stage=1)).describe()
    assert (
        "chunk 1 is not like chunk 0: it differs in attribute layer_index: 1 against 0\n"
    ) in text


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (
            "layer_index",
            (
                "ignore='layer_index': must be a tuple of names of attributes, such as "
                "('layer_index',)"
            ),
        ),
        (
            ("layer_idx",),
            (
                "ignore=('layer_idx',): no stage has an attribute 'layer_idx'; stages[1] differs "
                "from stages[0] in attribute layer_index: 1 against 0"
            ),
        ),
        (
            ("up",),
            (
                "ignore=('up',): stages[0].up is of type Param; only what holds no array can be "
                "ignored: leave out 'up'"
            ),
        ),
    ],
)
def test_what_cannot_be_ignored(ignore, message):
    with pytest.raises(ValueError) as caught:
        make(numbered(2), ignore=ignore)
    assert str(caught.value) == message


class Scaled(Block):
    """A stage that reads an attribute, in an array of constants."""

    def __init__(self, rngs: nnx.Rngs, scale, *, nested=False, **more):
        super().__init__(rngs)
        self.scale, self.nested, self.more = scale, nested, more

    def __call__(self, x):
        if self.nested == "assert":
            assert self.scale == 0.5
        scale = np.full((1, WIDTH), self.scale, np.float32)
        y = super().__call__(x)
        return jax.jit(lambda y: y * scale)(y) if self.nested else y * scale


READ = (
    "ignore= names 'scale', and the program of stages[2] depends on it: with its own value, 1.5, "
    "the program is another one than with 0.5, which the first stage with this attribute gives to "
    "all; if the stage computes with it, results are not those of the plain model: leave it out of "
    "ignore="
)


@pytest.mark.few
@pytest.mark.parametrize("engine", ["scan", "programs"])
@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("nested", [False, True, "assert"])
def test_an_ignored_attribute_that_a_stage_reads_is_warned_of_once(engine, unlike, nested):
    stages = [
        Scaled(nnx.Rngs(k), 0.5 + k // 2, nested=nested, **({"last": k == 3} if unlike else {}))
        for k in range(4)
    ]
    for k, stage in enumerate(stages):
        stage.index = k  # not read
    pipe = make(stages, ignore=("scale", "index"), engine=engine)
    with pytest.warns(UserWarning, match=f"^{re.escape(READ)}$") as caught:
        pipe.value_and_grad(X, T)
    assert len(caught) == 1
    pipe.value_and_grad(X, T)
