"""Activations between stages, and errors that name the part of the model (issue 38).

Letters: M microbatches, K stages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support.close import assert_close

WIDTH, M = 6, 2
X, T = jax.random.normal(jax.random.key(0), (2, 8, WIDTH))


class Stage(nnx.Module):
    """Whatever it is told to do."""

    def __init__(self, k, run):
        self.layer, self.k, self.run = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k)), k, run

    def __call__(self, x):
        return self.run(self, x)


def make(run, K=2, loss_fn=lambda y, t: ((y[0] - t) ** 2).mean(), **options):
    stages = [Stage(k, run) for k in range(K)]
    return Pipeline(stages, M, mesh=make_mesh(stage=K), loss_fn=loss_fn, **options)


def passed(stage, carried):
    return stage.layer(carried[0]), carried[1]


def chosen(stage, carried):
    x, how = carried
    return (x + stage.layer(x) if how else stage.layer(x)), how


def repeated(stage, carried):
    x, times = carried
    for _ in range(times):
        x = stage.layer(x)
    return x, times


def reshaped(stage, carried):
    x, parts = carried
    return stage.layer(x).reshape(-1, parts, WIDTH // 2).reshape(-1, WIDTH), parts


STATIC = {
    "bool": (True, chosen, "bool[]"),
    "int": (2, repeated, "int32[]"),
    "shape": (2, reshaped, "int32[]"),
    "float": (0.5, chosen, "float32[]"),
}


@pytest.mark.parametrize("name", STATIC)
def test_a_number_in_an_activation_is_traced(name):
    value, run, said = STATIC[name]
    with pytest.raises(ValueError, match="stages") as caught:
        make(run, embed=lambda x: (x, value)).loss(X, T)
    assert str(caught.value) == (
        f"stages[0] needs a value while it is traced, and was given {said} as [1] of its "
        f"activation: activations are sent as arrays, so a Python bool or number in one is traced "
        f"in the next stage; give what says how to compute to the constructors of the stages, or "
        f"choose by jnp.where or jax.lax.cond"
    )


def test_a_flag_that_a_stage_makes_is_traced_in_the_next():
    def run(stage, x):
        return (stage.layer(x), True) if stage.k == 0 else chosen(stage, x)

    with pytest.raises(ValueError, match=r"^stages\[1\] needs a value while it is traced"):
        make(run).value_and_grad(X, T)


def test_a_flag_that_a_stage_looks_up_is_traced():
    def run(stage, carried):
        x, how = carried
        return stage.layer(x) * {True: 2, False: 1}[how], how

    with pytest.raises(ValueError, match=r"^stages\[0\] needs a value while it is traced"):
        make(run, embed=lambda x: (x, True)).loss(X, T)


@pytest.mark.parametrize("part", ["head", "loss_fn"])
def test_a_flag_is_traced_behind_the_stages(part):
    def ends(y, t=None):
        y, how = y
        return (y if t is None else (y - t).mean()) * (2 if how else 1)

    what = "its activation" if part == "head" else "the outputs"
    options = {"loss_fn": lambda y, t: (y - t).mean()} | {part: ends}
    pipe = make(passed, embed=lambda x: (x, True), **options)
    for method in (pipe.loss, pipe.value_and_grad):
        with pytest.raises(ValueError, match="while it is traced") as caught:
            method(X, T)
        assert str(caught.value).startswith(
            f"{part} needs a value while it is traced, and was given bool[] as [1] of {what}: "
        )


def test_numbers_may_be_computed_with():
    def run(stage, carried):
        x, scale, how = carried
        return jnp.where(how, stage.layer(x) * scale, x), scale, how

    pipe = make(run, embed=lambda x: (x, 0.5, True))
    wanted = X
    for stage in pipe.stages():
        wanted = stage.layer(wanted) * 0.5
    assert_close(pipe.loss(X, T), ((wanted - T) ** 2).mean())


class Mode:
    def __repr__(self):
        return "Mode()"


@pytest.mark.parametrize(("value", "said"), [("causal", "'causal'"), (Mode(), "Mode()")])
def test_what_is_no_array_is_refused_by_name(value, said):
    rule = (
        "; what passes between stages, and to the loss, is arrays and numbers: give what says how "
        "to compute to the constructors of the stages"
    )

    def first(stage, x):
        return (stage.layer(x), {"mode": value}) if stage.k == 0 else passed(stage, x)

    embedded = {"embed": lambda x: (x, value)}
    cases = {
        f"embed returned {said} as [1] of its activation": (passed, embedded),
        f"a stage returned {said} as [1]['mode'] of its activation": (first, {}),
        f"head returned {said} as [1] of its outputs": (
            lambda stage, x: stage.layer(x),
            {"head": lambda y: (y, value)},
        ),
    }
    for message, (run, options) in cases.items():
        with pytest.raises(ValueError, match="returned") as caught:
            make(run, **options).loss(X, T)
        assert str(caught.value) == message + rule


class OwnError(Exception):
    """An exception of a library of the user's."""


ERRORS = [
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    AssertionError,
    NotImplementedError,
    OwnError,
]


@pytest.mark.few
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("part", ["stages[0]", "stages[1]", "embed", "head", "loss_fn"])
def test_an_error_says_which_part_raised_it(error, part):
    def fails(*_):
        raise error("mine")

    def run(stage, x):
        return fails() if part == f"stages[{stage.k}]" else stage.layer(x)

    options = {part: fails} if "stages" not in part else {}
    pipe = make(run, **({"loss_fn": lambda y, t: (y - t).mean()} | options))
    for method in (pipe.loss, pipe.value_and_grad):
        with pytest.raises(error, match="mine") as caught:
            method(X, T)
        assert type(caught.value) is error
        notes = [note for note in caught.value.__notes__ if note.startswith(f"{part} was given")]
        assert len(notes) == 1


def masked(y, mask):
    return y * mask[:, None]


def masked_loss(y, t, *, mask):
    return (masked(y - t, mask) ** 2).mean()


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"embed": masked}, "give embed such an array as a part of inputs"),
        ({"head": masked}, "let the last stage use such an array (pool there, for example), or"),
        ({"loss_fn": masked_loss}, "give the loss such an array as a part of targets"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_who_gets_no_extras_says_so_and_how_to_pass_them(options, way):
    """Embed, head and loss (issue 52, U-embed-says-extras)."""

    class Masked(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x, mask):
            return masked(self.layer(x), mask)

    options = {"loss_fn": lambda y, t: ((y - t) ** 2).mean()} | options
    pipe = Pipeline([Masked(), Masked()], M, mesh=make_mesh(stage=2), **options)
    with pytest.raises(TypeError, match="argument: 'mask'") as caught:
        pipe.loss(X, T, extras={"mask": X[:, 0]})
    assert f"extras 'mask' go to stages alone, by name; {way}" in "\n".join(caught.value.__notes__)


def rule(error, where):
    """The identity, with a derivative that raises."""

    @jax.custom_vjp
    def f(x):
        return x

    def fails(*_):
        raise error("mine")

    f.defvjp(*((fails, fails) if where == "forward" else (lambda x: (x, None), fails)))
    return f


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("part", "said", "options"),
    [
        ("stages[1]", "stages[1]", {"schedule": "1f1b"}),
        ("head", "head, or loss_fn,", {}),
        ("loss_fn", "loss_fn", {}),
        pytest.param("embed", "embed", {}, marks=pytest.mark.slow),
        pytest.param(
            *("stages[1]", "stages[1]", {"schedule": "zb_h1", "remat": None}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_of_a_derivative_says_which_part_raised_it(part, said, options, where):
    fails = rule(OwnError, where)

    def run(stage, x):
        y = stage.layer(x)
        return fails(y) if part == f"stages[{stage.k}]" else y

    loss_fn = lambda y, t: ((y - t) ** 2).mean()  # noqa: E731
    embed = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(7))
    ends = {
        "embed": {"embed": nnx.Sequential(embed, fails)},
        "head": {"head": fails},
        "loss_fn": {"loss_fn": lambda y, t: loss_fn(fails(y), t)},
    }
    pipe = make(run, **({"loss_fn": loss_fn} | ends.get(part, {}) | options))
    pipe.loss(X, T)  # without a derivative
    with pytest.raises(OwnError, match="mine") as caught:
        pipe.value_and_grad(X, T)
    assert [n for n in caught.value.__notes__ if n == f"{said} was being differentiated"]
