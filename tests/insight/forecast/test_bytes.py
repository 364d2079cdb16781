"""Bytes of a step: by types and timetable, by the compiler, and the warnings where they exceed.

Letters: S ranks, V chunks per rank, M microbatches, D data shards, b rows of a microbatch.
"""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.step import operands
from pipeline.insight.forecast import limit
from pipeline.insight.forecast.bytes import predict
from tests.support import models
from tests.support.grids import covering, effort
from tests.support.sizes import is_legal

WIDTH, HIDDEN = 256, 512  # of an activation, and inside a layer
ROWS = 1024  # b: an activation has 1 MiB, a layer's weights have 1 MiB
MIB = 2**20


class Layer(nnx.Module):
    """A residual MLP."""

    def __init__(self, rngs: nnx.Rngs, dtype=jnp.float32):
        self.up = models.normal(rngs, WIDTH, HIDDEN, dtype=dtype)
        self.down = models.normal(rngs, HIDDEN, WIDTH, dtype=dtype)

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


class Stage(nnx.Module):
    """Two of them."""

    def __init__(self, rngs: nnx.Rngs, **options):
        self.layers = nnx.List([Layer(rngs, **options), Layer(rngs, **options)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scanned(nnx.Module):
    """Three layers in a scan."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = models.normal(rngs, 3, WIDTH, HIDDEN)
        self.down = models.normal(rngs, 3, HIDDEN, WIDTH)

    def __call__(self, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, (self.up[...], self.down[...]))[0]


def make(family, M=8, *, S=4, V=1, D=1, kind=Stage, **options):
    """A pipeline of abstract stages, and the type of its inputs and targets."""
    pipe = Pipeline(
        [nnx.eval_shape(lambda: kind(nnx.Rngs(0))) for _ in range(V * S)],
        M,
        schedule=family,
        mesh=make_mesh(stage=S, data=D),
        loss_fn=models.squares,
        **options,
    )
    return pipe, jax.ShapeDtypeStruct((M * D * ROWS, WIDTH), jnp.float32)


def assert_as_compiled(pipe, x):
    """Arguments exactly, results but for a table of pointers; the compiler's temporaries add."""
    found = predict(pipe.plan, *pipe._operands(x, x, None))
    compiled = pipe.lower(x, x).compile().memory_analysis()
    assert found.arguments == compiled.argument_size_in_bytes
    assert found.returned == pytest.approx(compiled.output_size_in_bytes, abs=1024)
    assert found.temporaries <= compiled.temp_size_in_bytes


# --- every family ---

GRID = [
    (family, V, remat)
    for family, V, remat in itertools.product(schedules.names(), (1, 2), ("stage", None))
    if is_legal(family, 4, 8, V)
]
FAST = {
    ("1f1b", 1, "stage"),
    ("eager_1f1b", 2, None),
    ("zb_h1", 1, None),
}
# Every pair of values in CI.
SLOW = covering(GRID, FAST)


@pytest.mark.few
@pytest.mark.parametrize(
    ("family", "V", "remat"),
    [pytest.param(*c, marks=effort(c, FAST, SLOW)) for c in GRID],
)
def test_a_compiled_step_has_what_the_timetable_says(family, V, remat):
    assert_as_compiled(*make(family, V=V, remat=remat))


@pytest.mark.parametrize(
    ("family", "kind", "remat"),
    [
        ("1f1b", Scanned, None),
        pytest.param("1f1b", Scanned, "stage", marks=pytest.mark.slow),
        pytest.param("zb_h1", Scanned, "stage", marks=pytest.mark.slow),
    ],
)
def test_a_scan_over_layers(family, kind, remat):
    assert_as_compiled(*make(family, kind=kind, remat=remat))


def test_sums_of_narrow_gradients_are_temporaries():
    """bfloat16 weights have float32 sums, which the results have no room for."""
    kind = lambda rngs: Stage(rngs, dtype=jnp.bfloat16)  # noqa: E731
    pipe, x = make("1f1b", kind=kind)
    x = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    found = predict(pipe.plan, *pipe._operands(x, x, None))
    assert (found.weights, found.returned) == (MIB, MIB + 4)
    assert found.totals == 2 * MIB + 8


def test_each_part():
    """S = 4, M = 8: a message has 1 MiB, a layer's residuals are its input and its tanh."""
    pipe, x = make("zb_h1", D=2, remat=None)
    found, program = predict(pipe.plan, *pipe._operands(x, x, None)), pipe.plan.training
    values = program.values
    assert (found.messages.count, found.messages.each) == (values["operand"].device + 1, MIB)
    assert (found.stashes.count, found.stashes.each) == (values["stash"].device, 6 * MIB)
    # An input and an output gradient of each of four matrices, less what two of them share.
    crossings = values["crossing"].device
    assert (found.crossings.count, found.crossings.each) == (crossings, 12 * MIB)
    assert (found.weights, found.batch) == (2 * MIB, 16 * MIB)
    # The sum over data shards is what is returned, so that what is summed lies elsewhere.
    assert (found.returned, found.totals) == (2 * MIB + 4, 2 * MIB + 8)
    assert found.total == found.arguments + found.returned + found.temporaries
    assert found.least == found.total - found.returned
    assert found.largest == (
        f"{crossings} stashes of what I leaves for W, {12 * MIB:,} bytes each",
        12 * MIB * crossings,
    )


# --- what describe says ---


def test_describe_says_what_is_known():
    pipe, x = make("1f1b", remat=None)
    known = (
        "bytes per rank: weights 2,097,152, sums of gradients 2,097,152; "
        "describe(inputs, targets) predicts the rest"
    )
    other = "engine='programs': 0.82 of this step, by the event clock"
    counted = [
        "bytes per rank, predicted: 49,283,084",
        "  arguments 18,874,368: weights 2,097,152, batch 16,777,216",
        "  results 2,097,156: gradients and loss",
        (
            "  temporaries between actions 28,311,560: 3 messages of 1,048,576, 4 stashes of "
            "6,291,456, sums 8"
        ),
    ]
    more = "  temporaries within an action are not counted: describe(compiled=True) has them"
    assert pipe.describe().splitlines()[6:] == [known, other]
    assert pipe.describe(x, x).splitlines()[6:11] == [*counted, more]
    assert pipe.describe().splitlines()[6:] == [known, other]
    compiled = pipe.lower(x, x).compile().memory_analysis()
    sizes = (
        compiled.argument_size_in_bytes,
        compiled.output_size_in_bytes,
        compiled.temp_size_in_bytes,
    )
    assert pipe.describe().splitlines()[6:10] == counted
    said = pipe.describe(compiled=True)
    assert said.splitlines()[6:10] == [
        f"{line}; compiled {size:,}"
        for line, size in zip(counted, (sum(sizes), *sizes), strict=True)
    ]
    assert more not in said


def test_describe_refuses_to_compile_nothing():
    with pytest.raises(ValueError) as error:
        make("1f1b")[0].describe(compiled=True)
    assert str(error.value) == (
        "describe(compiled=True) compiles a step, and no batch is known; give it one, "
        "describe(inputs, targets, compiled=True), of arrays or jax.ShapeDtypeStruct"
    )


# --- a step that is too large ---


def told(pipe, *batch, call="lower"):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        getattr(pipe, call)(*batch)
    return [str(w.message) for w in found]


def test_a_count_that_fails_does_not_stop_the_step(monkeypatch):
    def fail(*_, **__):
        raise KeyError("a primitive")

    pipe, x = make("gpipe", memory_limit=1)
    monkeypatch.setattr(limit, "predict", fail)
    assert told(pipe, x, x) == [
        "what a step takes could not be found (KeyError: 'a primitive'); it runs"
    ]


@pytest.mark.slow
def test_a_step_that_is_too_large_is_told_of_once():
    pipe, x = make("gpipe", remat=None, memory_limit=60_000_000)
    text = (
        "a step is predicted to take at least 80,740,356 bytes on each device, and memory_limit "
        "allows 60,000,000; its largest part is 8 residual stashes, 6,291,456 bytes each: "
        '50,331,648 bytes; of the options that change no result, remat="stage" saves most: '
        "49,283,072 bytes between actions"
    )
    assert told(pipe, x, x) == [text]
    assert told(pipe, x, x) == []


SAVES = "of the options that change no result, {} saves most: {} bytes between actions"


@pytest.mark.few
@pytest.mark.parametrize(
    ("family", "M", "limit", "help_"),
    [
        ("gpipe", 16, 45_000_000, SAVES.format('schedule="1f1b"', "12,582,912")),
        (
            "1f1b",
            8,
            1_000_000,
            SAVES.format("num_microbatches=16", "3,145,728") + ", which is not enough",
        ),
    ],
)
def test_what_would_help(family, M, limit, help_):
    pipe, x = make(family, M, memory_limit=limit)
    (text,) = told(pipe, x, x)
    assert text.endswith(f" bytes; {help_}")


@pytest.mark.slow
def test_nothing_would_help():
    pipe, _ = make("1f1b", memory_limit=1_000_000)
    one_row_each = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    (text,) = told(pipe, one_row_each, one_row_each)
    assert text.endswith(
        " bytes; no other remat, schedule or num_microbatches takes less: use more ranks, or fewer "
        "rows in a batch"
    )


def small(**options):
    pipe = Pipeline(
        models.build(models.Block, 2),
        4,
        schedule="1f1b",
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
        **options,
    )
    return pipe, models.rows(8), models.rows(8, seed=1)


@pytest.mark.slow
def test_it_is_told_wherever_a_step_trains_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(limit, "alternatives", lambda *_: [])  # each of them is a trace
    pipe, x, t = small(memory_limit=1)
    (text,) = told(pipe, x, t, call="value_and_grad")
    assert text.startswith("a step is predicted to take ")
    assert told(pipe, x, t, call="value_and_grad") == []
    plain = small()[0].value_and_grad(x, t)
    assert models.distance(pipe.value_and_grad(x, t), plain) == 0

    pipe, x, t = small(memory_limit=1)
    assert told(pipe, x, call="__call__") == told(pipe, x, t, call="loss") == []  # forward only
    with pytest.warns(UserWarning, match="^a step is predicted to take "):
        nnx.value_and_grad(lambda m: m.loss(x, t))(pipe)
    pipe, x, t = small(memory_limit=1)
    with pytest.warns(UserWarning, match="^a step is predicted to take "):
        nnx.grad(lambda m: jnp.sum(m(x)))(pipe)


def compiled_size(pipe, *batch):
    sizes = pipe.lower(*batch).compile().memory_analysis()
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )


@pytest.mark.parametrize("is_jitted", [False, True])
def test_the_compiler_says_what_a_step_takes(is_jitted):
    """A step that fits but for temporaries within actions; `lower` and `check` compile nothing."""
    pipe, x, t = small()
    size = compiled_size(pipe, x, t)
    assert told(small(memory_limit=size)[0], x, t, call="value_and_grad") == []
    pipe, x, t = small(memory_limit=size - 1)
    assert told(pipe, x, t) == pipe.check(x, t) == []
    step = nnx.jit(lambda pipe, x, t: pipe.value_and_grad(x, t)) if is_jitted else None
    with pytest.warns(UserWarning, match="^a step takes ") as caught:
        (step or Pipeline.value_and_grad)(pipe, x, t)
    (text,) = [str(one.message) for one in caught]
    assert text.startswith(
        f"a step takes {size:,} bytes on each device, as compiled, and memory_limit allows "
        f"{size - 1:,}; its largest part is "
    )
    assert told(pipe, x, t, call="value_and_grad") == []


def test_a_limit_of_the_runtime_compiles_nothing_within_a_jit(monkeypatch):
    monkeypatch.setattr(operands, "reported_limit", lambda device: 10**9)
    monkeypatch.setattr(limit, "compiled_bytes", lambda step: 10**10)
    pipe, x, t = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.jit(lambda pipe, x, t: pipe.value_and_grad(x, t))(pipe, x, t)
    (text,) = told(pipe, x, t, call="value_and_grad")
    assert text.startswith(
        "a step takes 10,000,000,000 bytes on each device, as compiled, and its "
    )


def test_a_device_that_says_its_limit(monkeypatch):
    monkeypatch.setattr(limit, "alternatives", lambda *_: [])
    pipe, x, t = small()
    monkeypatch.setattr(operands, "reported_limit", lambda device: 1000 + device.id)
    (text,) = told(pipe, x, t)
    assert " on each device, and its runtime allows 1,000; " in text
    monkeypatch.setattr(operands, "reported_limit", lambda device: 10**9 if device.id else None)
    assert told(small()[0], x, t) == []


def test_a_step_that_fits_is_passed_over():
    pipe, x = make("gpipe", memory_limit=88_605_075, remat=None)
    assert told(pipe, x, x) == []


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "16GiB"])
def test_limits_that_are_none(given):
    with pytest.raises(ValueError) as error:
        make("1f1b", memory_limit=given)
    assert str(error.value) == (
        f"memory_limit={given!r}: must be an integer > 0, the bytes that a device may hold, or "
        f"None for what its runtime reports"
    )
