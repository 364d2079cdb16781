"""Differences between stages, and agreements between neighbours: the full messages."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models

X = models.rows(4)


def make(*stages, **options) -> Pipeline:
    options.setdefault("loss_fn", models.squares)
    mesh, stages = make_mesh(stage=len(stages)), map(nnx.clone, stages)  # cases share variables
    return Pipeline(list(stages), 2, mesh=mesh, **options)


class Stage(nnx.Module):
    """A stage whose arrays and attributes are given."""

    def __init__(self, function=None, **attributes):
        self.w = nnx.Param(jnp.ones((1, models.WIDTH)))
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x):
        return self.function(x, self.w[...]) if self.function else x * self.w[...]


class Twin(Stage):
    pass


def namesake() -> nnx.Module:
    """Make a stage whose class has the name of `Stage`."""
    return type("Stage", (Stage,), {"__module__": "elsewhere"})()


def param(*shape, dtype=jnp.float32):
    return nnx.Param(jnp.ones(shape, dtype))


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (
            {"v": param(8, 8)},
            {"v": param(4, 8)},
            "at v: Param float32[4,8] against Param float32[8,8]",
        ),
        (
            {"v": param(8)},
            {"v": param(8, dtype=jnp.bfloat16)},
            "at v: Param bfloat16[8] against Param float32[8]",
        ),
        (
            {"v": param(8)},
            {"v": nnx.BatchStat(jnp.ones(8))},
            "at v: BatchStat float32[8] against Param float32[8]",
        ),
        ({}, {"v": param(8)}, "at v: Param float32[8] against no such leaf"),
        ({"v": param(8)}, {}, "at v: no such leaf against Param float32[8]"),
        (
            {"inner": nnx.List([nnx.Dict(a=param(8))])},
            {"inner": nnx.List([nnx.Dict(a=param(9))])},
            "at inner.0.a: Param float32[9] against Param float32[8]",
        ),
        ({"act": "tanh"}, {"act": "relu"}, "in attribute act: 'relu' against 'tanh'"),
        ({"num": 1}, {"num": 2}, "in attribute num: 2 against 1"),
        ({"num": 1}, {}, "in attribute num: nothing against 1"),
        ({}, {"num": 1}, "in attribute num: 1 against nothing"),
        ({"inner": Twin()}, {"inner": Stage()}, "in inner: Stage against Twin"),
        (
            {"inner": Stage()},
            {"inner": namesake()},
            f"in inner: elsewhere.Stage against {__name__}.Stage",
        ),
    ],
)
def test_describe_says_in_what_stages_differ(first, second, difference):
    pipe = make(Stage(**first), Stage(**first), Stage(**second), Stage(**first))
    (line,) = [line for line in pipe.describe().splitlines() if "alike" in line]
    start = f"chunk 0 has stages that are not alike: stages[2] differs from stages[0] {difference};"
    assert line.startswith(start)
    assert re.fullmatch(
        r" \d arrays of parameters keep their names, the rest is packed into \d; a rank stores "
        r"[\d,]+ bytes of them, the largest stage has [\d,]+",
        line.removeprefix(start),
    )


def test_describe_says_what_sharing_costs():
    (line,) = [
        x for x in make(Stage(), Stage(v=param(4, 3))).describe().splitlines() if "alike" in x
    ]
    assert line == (
        "chunk 0 has stages that are not alike: stages[1] differs from stages[0] at v: Param "
        "float32[4,3] against no such leaf; 2 arrays of parameters keep their names, the rest is "
        "packed into 0; a rank stores 80 bytes of them, the largest stage has 80"
    )


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (Stage, Twin, "the module: Twin against Stage"),
        (
            lambda: nnx.Sequential(Stage(), Stage(num=1)),
            lambda: nnx.Sequential(Stage(), Stage(num=2)),
            "attribute layers.1.num: 2 against 1",
        ),
    ],
)
def test_describe_names_the_module_that_differs(first, second, difference):
    assert (
        f"stages[1] differs from stages[0] in {difference};" in make(first(), second()).describe()
    )


def times(by):
    return lambda x, w: x * w * by


@pytest.mark.few
@pytest.mark.parametrize("second", [1.0, 3.0])
def test_functions_defined_per_stage_differ_in_what_they_do(second):
    """Functions of one code over equal values are equal; the description names others."""
    made = [times(1.0), times(second)]
    pipe = make(*map(Stage, made))
    assert (second != 1.0) == (
        f"stages[1] differs from stages[0] in attribute function: {made[1]!r} against {made[0]!r};"
        in pipe.describe()
    )
    want = models.reference([Stage(f) for f in made], X, X * 2, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(X, X * 2), want)


def test_equal_stages_are_not_described_as_different():
    assert "alike" not in make(Stage(), Stage()).describe()


# --- neighbours ---


class Dense(nnx.Module):
    def __init__(self, inputs: int, outputs: int, dtype=jnp.float32):
        self.w = param(inputs, outputs, dtype=dtype)

    def __call__(self, x):
        return x @ self.w[...]


class Fork(Stage):
    """An array to a tree."""

    def __call__(self, x):
        return {"a": x * self.w[...], "b": x[:, :3]}


class Join(nnx.Module):
    """A tree to an array."""

    def __init__(self, width: int):
        self.w = param(width, models.WIDTH)

    def __call__(self, x):
        return x["a"] + x["b"] @ self.w[...]


class Cast(Stage):
    def __call__(self, x):
        return (x * self.w[...]).astype(jnp.bfloat16)


AGREE = (
    " (per microbatch and data shard); neighbours agree on the activation between them: change "
    "either stage"
)


@pytest.mark.few
@pytest.mark.parametrize(
    ("stages", "mismatch"),
    [
        (
            [Dense(8, 16), Dense(8, 8)],
            (
                "stages[1] takes float32[2,8] as the array of its activation, but stages[0] "
                "returns float32[2,16]"
            ),
        ),
        (
            [Stage(), Dense(8, 16), Dense(12, 8)],
            (
                "stages[2] takes float32[2,12] as the array of its activation, but stages[1] "
                "returns float32[2,16]"
            ),
        ),
        (
            [Fork(), Join(4)],
            (
                "stages[1] takes float32[2,4] as ['b'] of its activation, but stages[0] returns "
                "float32[2,3]"
            ),
        ),
        (
            [Fork(), Stage()],
            (
                "stages[1] takes an activation of structure PyTreeDef(*), but stages[0] returns "
                "PyTreeDef({'a': *, 'b': *})"
            ),
        ),
        (
            [Cast(), Dense(8, 8)],
            (
                "stages[1] takes float32[2,8] as the array of its activation, but stages[0] "
                "returns bfloat16[2,8]"
            ),
        ),
    ],
)
def test_a_stage_that_does_not_take_what_its_neighbour_returns(stages, mismatch):
    pipe = make(*stages)
    for call in (pipe, lambda x: pipe.value_and_grad(x, x)):
        with pytest.raises(ValueError) as caught:
            call(X)
        assert str(caught.value) == mismatch + AGREE
        assert isinstance(caught.value.__cause__, (TypeError, ValueError))


def test_a_stage_that_takes_nothing_anybody_knows_fails_as_it_does():
    class Fails(Twin):
        def __call__(self, x):
            raise TypeError("no")

    with pytest.raises(TypeError, match=r"^no") as caught:
        make(Stage(), Fails())(X)
    note = "stages[1] was given what stages[0] returns: float32[2,8]"
    assert caught.value.__notes__[0] == note
