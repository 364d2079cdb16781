"""The warning of parts that mix positions which a mesh axis splits (issue 41)."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import axis_size, exchange, make_mesh, shift_left, shift_right
from pipeline import Pipeline, add_loss
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.layers import Attention, Context, Dropout, MixtureOfExperts
from pipeline.models.decoders.config import LatentConfig
from tests.support.close import assert_close

AXIS = "context"
X = jnp.ones((4, 8, 4))
BOTH = P("data", AXIS)
SPLIT = f"batch= splits them over 2 ranks of {AXIS!r}"
MIXES = f"and {SPLIT}: each rank mixes its own alone, and the result is not that of whole sequences"
REMEDY = (
    f"for causal attention use pipeline.layers.Attention(..., context_axis={AXIS!r}), or take "
    f"slices= in place of the axis; where a position reads later ones too, as in an encoder, fetch "
    f"what other ranks hold by a collective over {AXIS!r} (jax.lax.all_gather of keys and values, "
    f"collectives.exchange)"
)
PLACES = (
    f"begin to count at jax.lax.axis_index({AXIS!r}) times the positions of a rank, or give "
    f"positions as a leaf of inputs or extras"
)


class Layer(nnx.Module):
    """A layer that treats positions by themselves, and does something else beside."""

    def __init__(self, rngs: nnx.Rngs, mix: Callable[..., Any]) -> None:
        self.linear, self.mix = nnx.Linear(4, 4, rngs=rngs), mix

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x.reshape(-1, 4)).reshape(x.shape)
        return x + self.mix(jnp.tanh(y))


class Convolution(nnx.Module):
    """A convolution over positions, of so many at a time."""

    def __init__(self, rngs: nnx.Rngs, window: int = 3) -> None:
        self.conv = nnx.Conv(4, 4, (window,), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.conv(x)


class Foreign(nnx.Module):
    """A layer with attention of flax."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attend = nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attend(x)


class After(nnx.Module):
    """A convolution beside a layer that knows the axis."""

    def __init__(self, rngs: nnx.Rngs, *, first: bool) -> None:
        self.conv = Convolution(rngs)
        self.attend = Attention(4, 2, 2, rngs, context_axis=AXIS, context="ulysses")
        self.first = first

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x) if self.first else x
        x = x + self.attend(x)
        return x if self.first else self.conv(x)


def mean(y: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.square(y - targets).mean()


def pipe_of(make: Callable[..., Any], *, ranks: int = 2, **options: Any) -> Pipeline:
    mesh = make_mesh(stage=2, context=ranks, devices=jax.devices()[: 2 * ranks])
    stages = [make(nnx.Rngs(0, dropout=k)) for k in range(2)]
    made: dict[str, Any] = {"loss_fn": mean, "mesh": mesh, "batch": BOTH}
    return Pipeline(stages, 2, **(made | options))


def told(pipe: Pipeline, x: Any = X, targets: Any = X, **given: Any) -> list[str]:
    """The texts of warnings while a step is traced, without the numbers of a trial."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nnx.eval_shape(lambda pipe: pipe.loss(x, targets, **given), pipe)
    texts = [str(one.message) for one in caught]
    place = r"place \d+ of 8 in its result differs by \S+% of the largest entry"
    values = r"[-.e\d]+ for random numbers together, [-.e\d]+ for their parts"
    return [re.sub(values, "VALUES", re.sub(place, "WHERE", text)) for text in texts]


def running(x: jax.Array) -> jax.Array:
    _, sums = jax.lax.scan(lambda s, a: (s + a, s), x[:, 0] * 0, jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(sums, 0, 1)


MIXING: dict[str, Callable[..., Any]] = {
    "a running sum": lambda x: jnp.cumsum(x, axis=1),
    "a mean": lambda x: x.mean(axis=1, keepdims=True),
    "a softmax": lambda x: jax.nn.softmax(x, axis=1),
    "a roll": lambda x: jnp.roll(x, 1, axis=1),
    "a product": lambda x: (x @ x.swapaxes(1, 2)) @ x,
}


@pytest.mark.parametrize("how", MIXING)
def test_stages_that_mix_the_positions_of_one_rank(how):
    pipe = pipe_of(lambda rngs: Layer(rngs, MIXING[how]))
    assert told(pipe) == [f"stages[0] mixes positions (WHERE), {MIXES}: {REMEDY}"]
    assert not told(pipe, X[:2], X[:2], num_microbatches=1)


@pytest.mark.parametrize(
    "make", [Convolution, lambda rngs: Layer(rngs, running), Foreign], ids=["conv", "loop", "flax"]
)
def test_a_convolution_a_loop_and_foreign_attention(make):
    assert told(pipe_of(make)) == [f"stages[0] mixes positions (WHERE), {MIXES}: {REMEDY}"]


@pytest.mark.parametrize("first", [True, False])
def test_a_convolution_beside_a_layer_that_knows_the_axis(first):
    (one,) = told(pipe_of(functools.partial(After, first=first)))
    assert one == f"stages[0] mixes positions (WHERE), {MIXES}: {REMEDY}"


def test_embed_and_head():
    add: Any = lambda x: x + jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None]  # noqa: E731
    pool: Any = lambda y: y - y.max(axis=1, keepdims=True)  # noqa: E731
    pipe = pipe_of(functools.partial(Layer, mix=jnp.sin), embed=add, head=pool)
    of_embed, of_head = told(pipe)
    assert of_embed == f"embed mixes positions (WHERE), {MIXES}: {PLACES}"
    assert of_head == f"head mixes positions (WHERE), {MIXES}: {REMEDY}"


LOSS = (
    f"loss_fn mixes positions (VALUES), {MIXES}: shift targets before they are split, as "
    f"pipeline.training.batches.next_tokens does, and return (sum, weight) that are both sums over "
    f"positions; or add up over all ranks first, jax.lax.psum(x, {AXIS!r}), the sum and its "
    f"divisor alike"
)


def test_labels_that_are_shifted_after_the_cut():
    def shifted(y: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.square(y[:, :-1] - targets[:, 1:]).mean()

    make = functools.partial(Layer, mix=jnp.sin)
    (one,) = told(pipe_of(make, loss_fn=shifted))
    assert one == LOSS
    for loss_fn in (
        lambda y, t: (jnp.square(y - t).sum(), jnp.ones(t.shape).sum()),
        lambda y, t: jnp.square(y - t).sum(axis=1).mean() / y.shape[1],
    ):
        assert told(pipe_of(make, loss_fn=loss_fn)) == []


TARGETS = jax.random.normal(jax.random.key(2), X.shape)
COUNTS = (jnp.arange(8)[None] < jnp.asarray([[5], [8], [6], [7]])).astype(jnp.float32)


def of_sequences(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A loss of the sums of losses and of counts over each sequence."""

    def loss_fn(y: jax.Array, targets: Any) -> jax.Array:
        t, counts = targets
        losses = jnp.square(y - t).mean(-1) * counts
        return function(losses.sum(1), counts.sum(1)).mean()

    return loss_fn


def whole(x: jax.Array) -> jax.Array:
    is_split = AXIS in jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.psum(x, AXIS) if is_split else x


@pytest.mark.parametrize(
    "function",
    [
        lambda v, n: v / n,  # a mean of every sequence
        lambda v, _: jax.nn.log_sigmoid(-v / 8),  # DPO
        lambda v, _: jnp.square(v),
        lambda v, n: jnp.where(n > 0, v, 0) / jnp.maximum(n, 1),
    ],
)
def test_a_loss_that_is_no_sum_over_positions_is_warned_of(function):
    """Each rank has a part of a sequence's sum; the loss needs all of it (issue 52)."""
    pipe = pipe_of(functools.partial(Layer, mix=jnp.sin), loss_fn=of_sequences(function))
    texts = told(pipe, X, (TARGETS, COUNTS))
    assert [text for text in texts if "over rows" not in text] == [LOSS]


@pytest.mark.few
@pytest.mark.parametrize(
    "loss_fn",
    [
        of_sequences(lambda v, n: whole(v) / whole(n)),
        of_sequences(lambda v, _: jax.nn.log_sigmoid(-whole(v))),
        lambda y, t: jnp.square(y - t[0]).mean(),
        lambda y, t: ((jnp.square(y - t[0]).mean(-1) * t[1]).sum(), t[1].sum()),
        lambda y, t: 3 * jnp.square(y - t[0]).sum() / y.size - jnp.abs(y).mean(),
        lambda y, t: (jnp.square(y - t[0]).sum(), float(y.size)),
    ],
)
def test_a_loss_of_sums_over_all_ranks_is_right(loss_fn):
    make, results = functools.partial(Layer, mix=jnp.sin), []
    for ranks in 1, 2:
        pipe = pipe_of(make, loss_fn=loss_fn, ranks=ranks)
        assert not told(pipe, X, (TARGETS, COUNTS))
        results.append(pipe.loss(X, (TARGETS, COUNTS)))
    assert_close(*results)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, t: jnp.square(y - t).sum(1).mean(),
        lambda y, t: jnp.square(y - t).sum() / 64,
        lambda y, t: (jnp.square(y - t).mean(), jnp.ones(t.shape).sum()),
    ],
)
def test_a_loss_whose_size_grows_with_positions_is_warned_of(loss_fn):
    """The step takes the mean of the ranks' parts, of a sum over a sequence too (issue 52)."""
    texts = told(pipe_of(functools.partial(Layer, mix=jnp.sin), loss_fn=loss_fn))
    (text,) = [text for text in texts if "over rows" not in text]  # two of them are no means either
    assert text == (
        f"loss_fn divides a sum over positions by a number that does not grow as they do, and "
        f"{SPLIT}: the step takes the mean of the ranks' losses, which is not the loss of whole "
        f"sequences: return (sum, weight) that are both sums over positions, or a mean over "
        f"them"
    )


def test_what_is_not_known():
    called = lambda x: jax.pure_callback(jnp.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # noqa: E731
    (one,) = told(pipe_of(functools.partial(Layer, mix=called)))
    assert one == (
        f"whether stages[0] mixes positions cannot be told (it has the primitive 'pure_callback'), "
        f"and {SPLIT}, each of which has a part: if it does, {REMEDY}; if it does not, let it say "
        f"so, mixes_positions = False"
    )


@pytest.mark.parametrize("batch", [P("data", AXIS), P("data")])
def test_nothing_is_split(batch):
    mesh = make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    options = {"mesh": mesh, "batch": P("data")} if batch == P("data") else {"batch": batch}
    assert not told(pipe_of(Convolution, ranks=1, **options))


def halo(x: jax.Array) -> jax.Array:
    """A mean of each position and its neighbours, which other ranks may hold."""
    left, right = shift_right(x[:, -1:], AXIS), shift_left(x[:, :1], AXIS)
    whole = jnp.concatenate([left, x, right], axis=1)
    return whole[:, :-2] + whole[:, 1:-1] + whole[:, 2:]


def recurrence(x: jax.Array, send: Any = exchange) -> jax.Array:
    """States of h[t] = h[t - 1] / 2 + x[t], whose last one goes from rank to rank."""
    last, own = jax.lax.scan(
        lambda h, a: (h / 2 + a,) * 2, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0)
    )
    ranks, t = axis_size(AXIS), x.shape[1]
    edges, start = [(r, r + 1) for r in range(ranks - 1)], jnp.zeros_like(last)
    for _ in range(ranks - 1):
        start = send(last + start / 2**t, edges, AXIS)
    decay = jnp.exp2(-jnp.arange(1, t + 1, dtype=x.dtype))
    return jnp.moveaxis(own, 0, 1) + decay[None, :, None] * start[:, None]


def permuted(x: jax.Array, edges: Any, axis: str) -> jax.Array:
    return jax.lax.ppermute(x, axis, edges)


def places(x: jax.Array) -> jax.Array:
    here = jax.lax.axis_index(AXIS) * x.shape[1] + jnp.arange(x.shape[1])
    return x * jnp.ones((8, 4))[here][None]


def balanced(x: jax.Array) -> jax.Array:
    return add_loss(x, jnp.square(x).mean())


DECLARED: dict[str, Callable[..., Any]] = {
    "halo": halo,
    "recurrence": recurrence,
    "places": places,
    "an added loss": balanced,
    "a stack, taken apart": lambda x: sum(jnp.unstack(jnp.stack([x, 2 * x])), start=-x),
    "a mean of all": lambda x: jax.lax.pmean(x.mean(axis=1, keepdims=True), AXIS),
    "each by itself": lambda x: jnp.moveaxis(jax.lax.map(jnp.sin, jnp.moveaxis(x, 1, 0)), 0, 1),
    "a gathered sequence": lambda x: (
        x
        @ jnp.cumsum(jax.lax.all_gather(x, AXIS, axis=1, tiled=True), axis=1).swapaxes(1, 2)[
            ..., :4
        ]
    ),
    "patches": lambda x: jnp.repeat(
        jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 4, 1), (1, 4, 1), "VALID"), 4, axis=1
    ),
}


@pytest.mark.parametrize("name", DECLARED)
def test_stages_that_fetch_positions_or_need_none(name):
    assert told(pipe_of(functools.partial(Layer, mix=DECLARED[name]))) == []


def test_stages_with_a_permute_of_jax():
    mix = functools.partial(recurrence, send=permuted)
    alone = make_mesh(stage=1, context=2, devices=jax.devices()[:2])
    assert told(pipe_of(functools.partial(Layer, mix=mix), mesh=alone)) == []


def test_windows_of_one_position_and_dropout_of_flax():
    assert told(pipe_of(functools.partial(Convolution, window=1))) == []

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs.fork()))

    assert told(pipe_of(make)) == []


class Ours(nnx.Module):
    """Attention, dropout and experts of `pipeline.layers`."""

    def __init__(self, rngs: nnx.Rngs, way: Any, order: Any) -> None:
        options: dict[str, Any] = {"context": way, "context_order": order, "window": 6}
        self.attend = Attention(4, 2, 2, rngs, context_axis=AXIS, **options)
        self.drop = Dropout(0.5, rngs=rngs.fork())
        losses: dict[str, Any] = {"balance_weight": 0.1, "z_weight": 0.1}
        self.experts = nnx.List(
            MixtureOfExperts(4, 8, 4, 2, rngs, axis=None, balance=balance, **losses)
            for balance in ("microbatch", "sequence")
        )

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:
        x = x + self.drop(self.attend(x, segments=segments))
        for one in self.experts:
            x = x + one(x)
        return x


CASES = [
    ("allgather", "contiguous", None),
    ("ulysses", "zigzag", None),
    ("ring", "contiguous", None),
    ("ring", "zigzag", None),
    ("ring", "zigzag", 2),
    pytest.param("allgather", "contiguous", 2, marks=pytest.mark.slow),
    pytest.param("ulysses", "contiguous", (6, 2), marks=pytest.mark.slow),
    pytest.param("ring", "contiguous", (6, 2), marks=pytest.mark.slow),
]


@pytest.mark.few
@pytest.mark.parametrize(("way", "order", "slices"), CASES)
def test_layers_of_this_library(way, order, slices):
    if slices:  # a stage of one's own needs call_slice, which attention has
        make = functools.partial(
            Attention, 4, 2, 2, context_axis=AXIS, context=way, context_order=order
        )
    else:
        make = functools.partial(Ours, way=way, order=order)
    pipe = pipe_of(make, slices=slices)
    assert told(pipe, extras={"segments": jnp.ones((4, 8), int)}) == []


LATENT = LatentConfig(query_rank=8, rank=8, nope=4, rope=4, value=4)


@pytest.mark.few
@pytest.mark.parametrize(
    ("context", "more", "chunks"),
    [
        (Context(AXIS, "ring", "zigzag"), {}, None),
        (Context(AXIS, "ulysses"), {"rope": None, "positions": 8, "sinks": True}, None),
        (Context(AXIS, "allgather"), {"latent": LATENT}, None),
        (Context(AXIS, "ulysses"), {"latent": LATENT}, 2),
        (Context(AXIS, "ring", "zigzag"), {"latent": LATENT}, None),
    ],
)
def test_decoders(context, more, chunks):
    sizes = {"width": 8, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 4, "hidden": 8}
    config = DecoderConfig(vocabulary=16, **(sizes | more))
    stages, embed, head = build(config, [1, 1], nnx.Rngs(0), context=context, loss_chunks=chunks)
    mesh = make_mesh(stage=2, context=2, devices=jax.devices()[:4])
    ends: dict[str, Any] = {"embed": embed, "head": head, "loss_fn": next_token_loss}
    pipe = Pipeline(stages, 2, mesh=mesh, batch=BOTH, **ends)
    words = jnp.ones((4, 8), int)
    extras = {"segment_ids": words, "positions": words}
    assert told(pipe, words, (words, jnp.ones((4, 8))), extras=extras) == []


@pytest.mark.slow
def test_the_recurrence_is_that_of_whole_sequences():
    x = jax.random.normal(jax.random.key(0), (4, 8, 4))
    pipe = pipe_of(functools.partial(Layer, mix=recurrence))
    whole = pipe_of(functools.partial(Layer, mix=recurrence), ranks=1)
    assert_close(pipe.loss(x, X), whole.loss(x, X))
