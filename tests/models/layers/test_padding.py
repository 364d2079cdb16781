"""Padding reaches no statistic of a layer: added rows, and empty positions (issue 52)."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import CrossEntropy, Pipeline, add_loss, decoders
from pipeline.layers import ExpertState, MixtureOfExperts, advance_experts, data_mask
from pipeline.layers.experts import dispatch_by_capacity, route
from pipeline.training.batches import bucketed, masked, packed, padded
from tests.support.close import assert_close

D, ROWS = 8, 6
X, T = np.asarray(jax.random.normal(jax.random.key(1), (2, ROWS, 5, D)))
NEVER: Any = lambda stage: None  # noqa: E731  counts are compared before they are loads


def squares(y: Any, t: Any) -> Any:
    return ((y - t) ** 2).mean()


def run(options: dict[str, Any], rows: int, M: int, batch: Any = None, **sizes: int) -> Any:
    """Loss, gradients and state of two mixtures on rows that were padded to a multiple."""
    (given,) = padded([(X, T)], multiple=rows)
    has_state = "bias_rate" in options or options.get("balance") == "batch"
    state = {"state": ExpertState, "after_step": NEVER} if has_state else {}
    pipe = Pipeline(
        [MixtureOfExperts(D, 12, 4, 2, nnx.Rngs(k), **options) for k in range(2)],
        M,
        loss_fn=masked(squares),
        mesh=make_mesh(stage=2, **sizes),
        batch=batch,
        **state,
    )
    loss, grads = pipe.value_and_grad(given.inputs, given.targets)
    return loss, pipe.to_layers(grads)["stages"], nnx.state(pipe.stages()[0], ExpertState)


ALL = {"z_weight": 0.1, "balance_weight": 0.1}
SEQUENCE, BATCH = {**ALL, "balance": "sequence"}, {**ALL, "balance": "batch"}
CAPACITY = {"dispatch": "capacity", "capacity_factor": 0.5, "bias_rate": 0.1}


@pytest.mark.few
@pytest.mark.parametrize(
    ("options", "rows", "M", "sizes"),
    [
        (ALL, 8, 1, {"data": 2}),
        (SEQUENCE, 8, 4, {"data": 2}),
        (BATCH, 16, 4, {"data": 2}),
        ({**ALL, "bias_rate": 0.1, "shared_hidden": 4}, 8, 1, {"expert": 2, "data": 2}),
        (CAPACITY, 8, 1, {}),
        ({**CAPACITY, "chunk": 10}, 8, 1, {}),
    ],
)
def test_rows_that_were_added_reach_no_router(options, rows, M, sizes):
    batch = P(("data", "expert")) if "expert" in sizes else None
    found, wanted = run(options, rows, M, batch, **sizes), run(options, ROWS, 1)
    jax.tree.map(assert_close, found, wanted)


def decoder(given: Any, length: int, experts: dict[str, Any], **how: Any) -> Any:
    config = decoders.DecoderConfig(
        vocabulary=32,
        width=8,
        layers=2,
        heads=2,
        kv_heads=2,
        head_dim=4,
        hidden=8,
        experts=decoders.ExpertsConfig(4, 2, 12, (0, 1), **experts),
    )
    stages, embed, head = decoders.build(config, [1, 1], nnx.Rngs(0), **how.pop("build", {}))
    ends = {"embed": embed, "head": head, "loss_fn": decoders.next_token_loss}
    how = {"mesh": make_mesh(stage=2), **how}
    assert given.inputs.shape[1] == length
    pipe = Pipeline(stages, 1, **ends, **how)
    loss, grads = pipe.value_and_grad(given.inputs, given.targets, extras=given.extras or {})
    return loss, pipe.to_layers(grads)["stages"]


DOCUMENT = np.arange(9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda t: packed([DOCUMENT], rows=1, length=t), {}),
        (lambda t: packed([DOCUMENT], rows=1, length=t), {"slices": 2}),
        (lambda t: bucketed([DOCUMENT], rows=1, lengths=[t]), {}),
        (
            lambda t: bucketed([DOCUMENT], rows=2, lengths=[t]),
            {"mesh": {"stage": 2, "data": 2}},
        ),
        (
            lambda t: packed([DOCUMENT], rows=1, length=t),
            {"slices": (6, 10)},
        ),
    ],
)
@pytest.mark.parametrize("experts", [ALL, SEQUENCE])
def test_empty_positions_reach_no_router(make, how, experts):
    wanted = decoder(next(packed([DOCUMENT], rows=1, length=8)), 8, experts)
    if "mesh" in how:
        how = {**how, "mesh": make_mesh(**how["mesh"])}
    jax.tree.map(assert_close, decoder(next(make(16)), 16, experts, **how), wanted)


class Arranged(nnx.Module):
    """A mixture whose input is arranged otherwise than the microbatch."""

    def __init__(self, rngs: nnx.Rngs, arrange: Any) -> None:
        self.experts = MixtureOfExperts(D, 12, 4, 2, rngs, z_weight=0.1)
        self.arrange = arrange

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.arrange(self.experts, x)


@pytest.mark.parametrize(
    ("arrange", "shape"),
    [
        (lambda m, x: m(x.swapaxes(0, 1)).swapaxes(0, 1), [5, 8]),
        (lambda m, x: jnp.concatenate([m(x[:4]), m(x[4:])]), [4, 5]),
        (lambda m, x: jax.vmap(m)(x), [5]),
    ],
)
def test_padding_that_a_layer_cannot_find_is_refused(arrange, shape):
    """A number of tokens does not say which of them are padding."""
    (given,) = padded([(X, T)], multiple=8)
    stages = [Arranged(nnx.Rngs(k), arrange) for k in range(2)]
    pipe = Pipeline(stages, 1, loss_fn=masked(squares))
    with pytest.raises(ValueError) as caught:
        pipe.loss(given.inputs, given.targets)
    assert str(caught.value).partition("\n")[0] == (
        f"the batch has padding, [8] rows of a microbatch, and a layer that leaves it out was "
        f"given tokens {shape}: give it the rows of the microbatch as its leading axes, in one "
        f"piece and not under jax.vmap; or give batches without padding"
    )


@pytest.mark.slow
def test_a_layer_that_forms_no_statistic_may_arrange_its_input_as_it_likes():
    (given,) = padded([(X, T)], multiple=8)
    swapped: Any = lambda m, x: m(x.swapaxes(0, 1)).swapaxes(0, 1)  # noqa: E731
    stages = [Arranged(nnx.Rngs(k), swapped) for k in range(2)]
    for stage in stages:
        stage.experts.z_weight = 0.0
    found = Pipeline(stages, 1, loss_fn=masked(squares)).loss(given.inputs, given.targets)
    assert_close(found, Pipeline(stages, 1, loss_fn=squares).loss(X, T))


@pytest.mark.slow
def test_tokens_of_rows_and_positions_in_one_dim_are_found():
    batch, results = next(packed([DOCUMENT], rows=2, length=16)), []
    flat: Any = lambda m, x: m(x.reshape(-1, D)).reshape(x.shape)  # noqa: E731
    for arrange in (lambda m, x: m(x)), flat:
        stages = [Arranged(nnx.Rngs(k), arrange) for k in range(2)]
        embed = nnx.Embed(32, D, rngs=nnx.Rngs(3))
        head = nnx.Linear(D, 32, rngs=nnx.Rngs(4))
        pipe = Pipeline(stages, 1, embed=embed, head=head, loss_fn=CrossEntropy())
        results.append(pipe.loss(batch.inputs, batch.targets))
    assert_close(*results)


@pytest.mark.slow
def test_segment_ids_of_another_meaning_mark_no_padding():
    """0 is BERT's first sentence (issue 52): padding is marked in targets alone."""

    class Sentences(MixtureOfExperts):
        def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
            del segment_ids
            return super().__call__(x)

    stages = [Sentences(D, 12, 4, 2, nnx.Rngs(k), bias_rate=0.1) for k in range(2)]
    pipe = Pipeline(stages, 1, loss_fn=squares, state=ExpertState, after_step=NEVER)
    pipe.value_and_grad(X, T, extras={"segment_ids": np.zeros(X.shape[:2], np.int32)})
    assert int(pipe.stages()[0].counts[...].sum()) == X.shape[0] * X.shape[1] * 2


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_capacity_is_that_of_the_real_tokens_to_the_last_place(factor):
    x = jax.random.normal(jax.random.key(0), (400, D))
    moe = MixtureOfExperts(D, 12, 8, 2, nnx.Rngs(0))
    found = []
    for count in 300, 400:
        routing = route(moe.logits(x[:count]), moe.router)
        mask = jnp.arange(count) < 300
        options = {"factor": factor, "is_data": mask if count > 300 else None}
        found.append(dispatch_by_capacity(x[:count], routing, moe.experts, 8, None, **options))
    assert_close(found[1][0][:300], found[0][0])
    assert int(found[0][1]) == int(found[1][1]) > 0


@pytest.mark.slow
def test_a_batch_of_padding_alone_adds_nothing():
    batch = next(packed([DOCUMENT], rows=1, length=8))
    empty = jax.tree.map(np.zeros_like, batch[:3])
    loss, _ = decoder(batch._replace(**dict(zip(batch._fields, empty, strict=False))), 8, ALL)
    assert float(loss) == 0


# ---- layers of one's own ---------------------------------------------------


class Penalty(nnx.Module):
    """A layer that adds the mean square of its input."""

    asks = False

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        squares = jnp.square(x).mean((1, 2))
        if self.asks:
            counts = data_mask().astype(jnp.float32)
            return add_loss(self.linear(x), (squares * counts).sum() / counts.sum())
        return add_loss(self.linear(x), squares.mean())


class AskingPenalty(Penalty):
    asks = True


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(D, D, rngs=rngs), nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


REMEDY = (
    "the batch has padding (pipeline.training.batches), which it may count: leave out what "
    "pipeline.layers.data_mask() says is no data (a stage that calls it first is not warned of), "
    "or give batches without padding"
)


def said(kind: Any, rows: int = 8, loss_fn: Any = None, **options: Any) -> tuple[float, list[str]]:
    (given,) = padded([(X, T)], multiple=rows)
    pipe = Pipeline(
        [kind(nnx.Rngs(k)) for k in range(2)], 1, loss_fn=loss_fn or masked(squares), **options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = pipe.value_and_grad(given.inputs, given.targets)[0]
    return float(loss), [str(one.message) for one in caught]


@pytest.mark.slow
def test_a_foreign_loss_over_padding_is_warned_of_by_name():
    texts = [f"stages[{k}] calls add_loss, and {REMEDY}" for k in range(2)]
    assert said(Penalty)[1] == texts
    assert said(Penalty, rows=ROWS)[1] == texts  # padded() says so, whether or not rows were added


def test_foreign_state_over_padding_is_warned_of_by_name():
    text = f"stages[0] writes norm.mean (BatchStat), norm.var (BatchStat), and {REMEDY}"
    assert said(Normed, state=nnx.BatchStat)[1] == [text]


@pytest.mark.slow
def test_foreign_state_in_embed_and_head_is_warned_of_by_name():
    ends = {"embed": Normed(nnx.Rngs(5)), "head": Normed(nnx.Rngs(6))}
    make = lambda rngs: nnx.Linear(D, D, rngs=rngs)  # noqa: E731
    texts = [
        f"{name} writes norm.mean (BatchStat), norm.var (BatchStat), and {REMEDY}" for name in ends
    ]
    assert said(make, state=nnx.BatchStat, **ends)[1] == texts


@pytest.mark.slow
def test_experts_in_embed_are_told_that_no_step_advances_them():
    make = lambda rngs: nnx.Linear(D, D, rngs=rngs)  # noqa: E731
    embed = MixtureOfExperts(D, 12, 4, 2, nnx.Rngs(9), bias_rate=0.1)
    (text,) = said(make, state=ExpertState, after_step=advance_experts, embed=embed)[1]
    assert text == (
        "bias of embed changes after a step only, and after_step= runs on stages only: call "
        "pipeline.layers.advance_experts(pipe) after each update, or move the layer into a stage"
    )


class AskingNorm(Normed):
    def __call__(self, x: jax.Array) -> jax.Array:
        assert data_mask() is not None
        return super().__call__(x)


def test_an_embed_that_asks_for_the_mask_is_passed_over():
    make = lambda rngs: nnx.Linear(D, D, rngs=rngs)  # noqa: E731
    assert said(make, state=nnx.BatchStat, embed=AskingNorm(nnx.Rngs(5)))[1] == []


@pytest.mark.slow
def test_a_foreign_layer_that_asks_for_the_mask_is_right_and_passed_over():
    loss, texts = said(AskingPenalty)
    assert not texts
    assert_close(loss, said(AskingPenalty, rows=ROWS)[0])


def test_without_padding_there_is_no_mask():
    assert data_mask() is None
    stages = [Penalty(nnx.Rngs(k)) for k in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pipeline(stages, 2, loss_fn=squares).loss(X, T)


@pytest.mark.slow
def test_words_that_a_loss_ignores_are_data():
    """A prompt has no loss and is still routed, as without a pipeline."""
    x, t = X, np.full(X.shape[:2], -100, np.int32)
    t[:, :2] = 1
    stages = [MixtureOfExperts(D, 12, 4, 2, nnx.Rngs(k), bias_rate=0.1) for k in range(2)]
    pipe = Pipeline(stages, 1, loss_fn=CrossEntropy(), state=ExpertState, after_step=NEVER)
    pipe.value_and_grad(x, t)
    assert int(pipe.stages()[0].counts[...].sum()) == x.shape[0] * x.shape[1] * 2


# ---- state that only a step's end changes ----------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name"),
    [({"bias_rate": 0.1}, "bias"), ({"balance": "batch", "balance_weight": 0.1}, "load")],
)
def test_experts_that_nobody_advances_are_warned_of(options, name):
    make = lambda rngs: MixtureOfExperts(D, 12, 4, 2, rngs, **options)  # noqa: E731
    text = (
        f"{name} of stages[0] changes after a step only, and the pipeline has no after_step=: give "
        f"it after_step=pipeline.layers.advance_experts; if your loop calls that itself, give it "
        f"after_step=lambda stage: None"
    )
    assert said(make, state=ExpertState)[1] == [text]
    assert said(make, state=ExpertState, after_step=advance_experts)[1] == []


def test_undeclared_counts_of_experts_say_how_to_declare_them():
    make = lambda rngs: MixtureOfExperts(D, 12, 4, 2, rngs, counts=True)  # noqa: E731
    with pytest.raises(ValueError) as caught:
        said(make)
    assert str(caught.value) == (
        "a stage writes to its ExpertState counts: a pipeline runs a stage many times per step and "
        "keeps no such state; declare it, Pipeline(..., state=ExpertState, "
        "after_step=advance_experts (both of pipeline.layers))"
    )
