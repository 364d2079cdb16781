"""`Pipeline(slices=(t0, t1, ...))`, and rings beside slices, against whole sequences (issue 41).

One layer of attention in each of two stages. Letters: S ranks, N slices, M microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import join_sequence, make_mesh, split_sequence
from pipeline import Pipeline, add_loss, generate
from pipeline.base.agreed.slices import WHOLE_SEQUENCE
from pipeline.layers import Attention, Context, zigzag
from tests.parity.test_slices import (
    ENGINES,
    MESHES,
    Recurrent,
    check,
    data,
    decoder,
    pipe_of,
    wanted,
)
from tests.support.close import assert_close

T, ROWS, M, D = 16, 4, 2, 8
make = np.random.default_rng(0)
X, Y = (jnp.asarray(make.normal(size=(ROWS, T, D)), jnp.float32) for _ in range(2))
EXTRAS = {"segments": jnp.asarray(np.sort(make.integers(1, 4, (ROWS, T)), axis=1), jnp.int32)}
LENGTHS = (7, 5, 4)


class Stage(nnx.Module):
    """Attention and a pointwise part; it may add a loss."""

    adds = False

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.attention = Attention(D, 4, 2, rngs, **options)
        self.up = nnx.Param(0.3 * rngs.params.normal((D, D)))

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        return self.call_slice(x, None, WHOLE_SEQUENCE, segments)[0]

    def call_slice(self, x: Any, earlier: Any, part: Any, segments: Any = None) -> Any:
        if self.adds:
            x = add_loss(x, 0.1 * jnp.square(x).mean())
        y, own = self.attention.call_slice(x, earlier, part, segments=segments)
        x = x + y
        return x + jnp.tanh(x @ self.up[...]), own


class Adding(Stage):
    """A stage that adds a mean over its positions."""

    adds = True


def loss(y: jax.Array, targets: jax.Array) -> Any:
    counts = (targets[..., 0] > -1.0).astype(jnp.float32)
    return (jnp.square(y - targets).sum(-1) * counts).sum(), counts.sum()


def mean(y: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.square(y - targets).mean()


def measured(y: jax.Array, targets: jax.Array) -> Any:
    positive = targets[..., 0] > 0
    return mean(y, targets), {
        "mean": jnp.abs(y).mean(),
        "pair": (jnp.where(positive, y[..., 0], 0.0).sum(), positive.sum()),
        "count": positive.sum(),
    }


def pipe(
    slices: Any, kind: type = Stage, layer: dict[str, Any] | None = None, **options: Any
) -> Pipeline:
    sizes = options.pop("sizes", {"stage": 2})
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    stages = [kind(nnx.Rngs(k), **(layer or {})) for k in range(2)]
    given: dict[str, Any] = {"loss_fn": loss, "mesh": make_mesh(**sizes, devices=devices)}
    return Pipeline(stages, M, slices=slices, **(given | options))


def stepped(one: Pipeline, batch: Any = (X, Y, EXTRAS), **options: Any) -> Any:
    x, y, extras = batch
    value, grads = one.value_and_grad(x, y, extras=extras, **options)
    return value, one.to_layers(grads)["stages"]


@functools.cache
def whole() -> Any:
    return stepped(pipe(None))


def same(found: Any, expected: Any) -> None:
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("lengths", [(1, 2), pytest.param((3, 3, 2), marks=pytest.mark.slow)])
def test_stages_that_carry_a_state_in_slices_of_several_lengths(lengths):
    """A slice reads its own positions of a leaf, and all of a leaf that has only one."""
    x, y = X[:, : sum(lengths), :4], Y[:, : sum(lengths), :4]
    scale, of_positions, of_rows = (
        jnp.asarray(make.uniform(size=shape), jnp.float32)
        for shape in ((ROWS, 1, 1), x.shape[:2], (ROWS, 1))
    )

    def weighted(out: jax.Array, targets: Any) -> Any:
        y, of_positions, of_rows = targets
        weights = (2 - of_positions) * of_rows  # positive where an array is padded with zeros
        return (jnp.square(out - y).sum(-1) * weights).sum(), weights.sum()

    def step(slices: Any) -> Any:
        rngs, mesh = nnx.Rngs(3), make_mesh(stage=2, devices=jax.devices()[:2])
        stages = [Recurrent(rngs) for _ in range(2)]
        one = Pipeline(stages, M, loss_fn=weighted, mesh=mesh, slices=slices)
        return one.value_and_grad(x, (y, of_positions, of_rows), extras={"scale": scale})

    same(step(lengths), step(None))


def test_outputs_of_slices_of_several_lengths_are_joined_without_padding():
    stages = [nnx.Linear(D, D, rngs=nnx.Rngs(k)) for k in range(2)]
    one = Pipeline(stages, M, slices=(4, 2, 1), mesh=make_mesh(stage=2))
    x = X[:, :7]
    assert_close(one(x), stages[1](stages[0](x)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("mesh", "schedule", "slices", "remat"),
    [
        ("2x1", "seq1f1b_zb", (7, 5, 4), None),
        ("2x2", "seq1f1b", (9, 7), "stage"),
        ("4x1", "seq1f1b_zb", (6, 4, 3, 3), "stage"),
        ("1x1", "seq1f1b", (4, 12), None),
        ("2x1", "seq1f1b", (8, 8), jax.checkpoint_policies.dots_saveable),
    ],
)
def test_decoders(mesh, schedule, slices, remat, engine):
    """Packed rows, windows shorter than a slice, grouped queries."""
    stage, shards = MESHES[mesh]
    sizes = {"stage": stage, "data": shards}
    given = {"schedule": schedule, "slices": slices, "remat": remat, "engine": engine}
    check(pipe_of(decoder(stage), sizes, **given), data(), wanted(stage))


@pytest.mark.slow
def test_slices_and_microbatches_without_a_token():
    given = pipe_of(decoder(2), {"stage": 2}, slices=(4, 4, 6, 2))
    check(given, data(masked=True), wanted(2, masked=True))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_unlike_stages(remat):
    def parts() -> Any:
        stages, embed, head = decoder(4)
        stages[1].blocks = nnx.List([])
        return stages, embed, head

    batch = data()
    given: dict[str, Any] = {"extras": batch.extras}
    sliced = pipe_of(parts(), {"stage": 4}, schedule="seq1f1b_zb", slices=LENGTHS, remat=remat)
    found, expected = (
        one.value_and_grad(batch.inputs, batch.targets, **given)
        for one in (sliced, sliced.replace(slices=None, schedule="1f1b"))
    )
    same(found, expected)


class Shifted(nnx.Module):
    """An embedding that adds an input of one position to all positions."""

    def __call__(self, x: dict[str, jax.Array]) -> jax.Array:
        return x["rows"] + x["shift"]

    def call_slice(self, x: dict[str, jax.Array], _: Any, __: Any) -> Any:
        return self(x), ()


OTHERS: dict[str, tuple[dict[str, Any], Callable[[Pipeline], Any]]] = {
    "outputs": ({}, lambda one: one(X, extras=EXTRAS)),
    "gradients for inputs": ({}, lambda one: jax.grad(lambda x: one.loss(x, Y, extras=EXTRAS))(X)),
    "gradients for an input of one position": (
        {"embed": Shifted()},
        lambda one: jax.grad(lambda shift: one.loss({"rows": X, "shift": shift}, Y, extras=EXTRAS))(
            X[:, :1]
        ),
    ),
    "differentiated outputs": (
        {},
        lambda one: jax.grad(lambda x: jnp.sin(one(x, extras=EXTRAS)).sum())(X),
    ),
    "means and metrics": (
        {"loss_fn": measured},
        lambda one: one.value_and_grad(X, Y, extras=EXTRAS, has_aux=True),
    ),
    "weights of means": (
        {"loss_fn": measured},
        lambda one: one.loss(X, Y, extras=EXTRAS, has_aux=True, weighed=True),
    ),
    "scaled sums": ({}, lambda one: one.value_and_grad(X, Y, extras=EXTRAS, loss_scale=2.0**10)),
    "added losses": ({"kind": Adding}, lambda one: one.value_and_grad(X, Y, extras=EXTRAS)),
    "evaluated added losses": ({"kind": Adding}, lambda one: one.loss(X, Y, extras=EXTRAS)),
    "weights with a gradient": (
        {"loss_fn": lambda y, t: (jnp.square(y - t).sum(), jnp.exp(y).sum())},
        lambda one: one.value_and_grad(X, Y, extras=EXTRAS),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OTHERS)
def test_results_beside_gradients(name, engine):
    options, call = OTHERS[name]
    same(call(pipe(LENGTHS, engine=engine, **options)), call(pipe(None, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("slices", [4, LENGTHS])
def test_beside_a_tensor_axis(slices):
    given = {"schedule": "seq1f1b_zb", "remat": None, "sizes": {"stage": 2, "tensor": 2}}
    same(stepped(pipe(slices, **given)), whole())


class Cut(nnx.Module):
    """An embedding that gives each rank of ``tensor`` its positions."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.full((1, 1, D), 0.7))

    def __call__(self, x: jax.Array) -> jax.Array:
        return split_sequence(x * self.scale[...], sequence_axis=1)

    def call_slice(self, x: jax.Array, _: Any, __: Any) -> Any:
        return self(x), ()


class Parallel(nnx.Module):
    """Attention on a rank's positions; the last stage joins them."""

    def __init__(self, rngs: nnx.Rngs, *, joins: bool) -> None:
        self.attention = Attention(D, 4, 2, rngs, sequence_parallel=True)
        self.joins = joins

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        return self.call_slice(x, None, WHOLE_SEQUENCE, segments)[0]

    def call_slice(self, x: Any, earlier: Any, part: Any, segments: Any) -> Any:
        y, own = self.attention.call_slice(x, earlier, part, segments=segments)
        y = jnp.tanh(x + y)
        return (join_sequence(y, sequence_axis=1) if self.joins else y), own


@pytest.mark.slow
@pytest.mark.parametrize("slices", [4, (6, 6, 4)])
def test_sequence_parallelism(slices):
    def step(slices: Any) -> Any:
        stages = [Parallel(nnx.Rngs(k), joins=k == 1) for k in range(2)]
        mesh = make_mesh(stage=2, tensor=2, devices=jax.devices()[:4])
        one = Pipeline(stages, M, embed=Cut(), loss_fn=loss, mesh=mesh, slices=slices)
        value, grads = one.value_and_grad(X, Y, extras=EXTRAS)
        return value, one.to_layers(grads)

    same(step(slices), step(None))


class Counting(Stage):
    """A stage that counts the positions it has seen."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.seen = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def call_slice(self, x: Any, earlier: Any, part: Any, segments: Any = None) -> Any:
        self.seen[...] += x.shape[0] * x.shape[1]
        return super().call_slice(x, earlier, part, segments)


class Dropping(Stage):
    """A stage with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3))

    def call_slice(self, x: Any, earlier: Any, part: Any, segments: Any = None) -> Any:
        y, own = super().call_slice(x, earlier, part, segments)
        return self.dropout(y), own


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("slices", [4, LENGTHS])
def test_declared_state_and_dropout(slices, engine):
    one = pipe(slices, kind=Counting, state=nnx.BatchStat, engine=engine)
    same(stepped(one), whole())
    assert [int(stage.seen[...]) for stage in one.stages()] == [ROWS * T] * 2
    again = {"schedule": "seq1f1b_zb", "remat": None}
    dropping = functools.partial(pipe, slices, kind=Dropping)
    same(stepped(dropping(engine=engine)), stepped(dropping(**again)))


@pytest.mark.slow
@pytest.mark.parametrize("slices", [4, LENGTHS])
def test_text_is_generated_by_whole_sequences(slices):
    prompts = jnp.asarray(data().inputs[:2, :4])
    sliced, plain = (pipe_of(decoder(2), {"stage": 2}, slices=one) for one in (slices, None))
    assert np.array_equal(*(generate(one, prompts, max_new_tokens=4) for one in (sliced, plain)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slices", "way"), [(4, None), (LENGTHS, None), (2, "ring"), ((8, 4, 4), "ulysses")]
)
def test_sinks_and_tied_embeddings(slices, way):
    batch, sizes = data(), {"stage": 2} | ({"context": 2, "data": 1} if way else {})
    split = P("data", "context") if way else P("data")
    context = Context("context", way) if way else None
    kinds: dict[str, Any] = {"sinks": True, "tied": True}
    one = pipe_of(decoder(2, context=context, **kinds), sizes, slices=slices, batch=split)
    other = pipe_of(decoder(2, **kinds), {"stage": 2})
    found, expected = (
        p.value_and_grad(batch.inputs, batch.targets, extras=batch.extras) for p in (one, other)
    )
    same(found, expected)


CONTEXTS = [
    ("ring", "contiguous", 2, "seq1f1b_zb", None),
    ("ring", "contiguous", (8, 4, 4), "seq1f1b", "stage"),
    ("ring", "zigzag", 2, "seq1f1b", "stage"),
    ("ring", "zigzag", (8, 4, 4), "seq1f1b_zb", None),
    ("allgather", "zigzag", (8, 4, 4), "seq1f1b", "stage"),
    ("ulysses", "zigzag", 2, "seq1f1b", None),
    ("ulysses", "contiguous", (6, 6, 4), "seq1f1b", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "order", "slices", "schedule", "remat"), CONTEXTS)
def test_slices_over_a_context_axis(way, order, slices, schedule, remat):
    layer = {"context_axis": "context", "context": way, "context_order": order}
    given = {"batch": P("data", "context"), "sizes": {"stage": 2, "context": 2}}
    one = pipe(slices, layer=layer, schedule=schedule, remat=remat, **given)
    batch: Any = X, Y, EXTRAS
    if order == "zigzag":
        batch = zigzag(batch, 2, slices=slices)
    same(stepped(one, batch), whole())


@pytest.mark.slow
@pytest.mark.parametrize("slices", [4, LENGTHS])
def test_windows_soft_caps_and_chunks(slices):
    layer = {"window": 3, "softcap": 2.0, "query_chunk": 1}
    one = pipe(slices, layer=layer, schedule="seq1f1b_zb", remat=None)
    same(stepped(one), stepped(pipe(None, layer=layer)))


def own_of_many_shapes(slices: Sequence[int]) -> Pipeline:
    class Odd(Stage):
        """A stage that leaves more of a short slice than of a long one."""

        def call_slice(self, x: Any, earlier: Any, part: Any, segments: Any = None) -> Any:
            y, _ = super().call_slice(x, None, WHOLE_SEQUENCE, segments)
            return y, jnp.zeros((x.shape[0], 20 - x.shape[1]))

    return pipe(slices, kind=Odd)


def test_own_of_a_slice_that_does_not_fit():
    with pytest.raises(ValueError) as caught:
        own_of_many_shapes((10, 6)).loss(X, Y)
    assert str(caught.value).partition("\n")[0] == (
        "call_slice returned as own float32[2,14] for slice 1, and float32[2,10] for the longest: "
        "own has the same leaves for every slice, as long as the slice or of one shape for all"
    )
