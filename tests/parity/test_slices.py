"""`Pipeline(slices=N)`: sequences in slices, against the plain model on whole ones (issue 41).

Packed rows, grouped queries and windows; stages that carry keys and values, or a state. Letters: S
ranks, N slices, M microbatches.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.core.step.ranks import in_order
from pipeline.decoders import DecoderConfig, ExpertsConfig, LatentConfig, build, next_token_loss
from pipeline.layers import Context, zigzag
from pipeline.training.batches import Batch, packed
from tests.support.close import assert_close
from tests.support.grids import covering, effort

T, ROWS, M, LAYERS = 16, 4, 2, 4
SIZES = {"width": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "hidden": 16}
POLICY = jax.checkpoint_policies.dots_saveable


@functools.cache
def data(masked: bool = False) -> Batch:
    """Rows of several documents; ``masked`` leaves slices and a microbatch without a token."""
    make = np.random.default_rng(0)
    lessons = [make.integers(0, 24, n) for n in (9, 8, 17, 12, 5, 4)]
    batch = next(packed(lessons, rows=ROWS, length=T))
    if masked:
        words, weights = batch.targets
        weights = np.array(weights)
        weights[:, 4:8] = 0  # slice 1 of four
        weights[2:] = 0  # microbatch 1
        batch = batch._replace(targets=(words, weights))
    return batch


def decoder(stages: int, *, context: Context | None = None, **options: Any) -> Any:
    """Stages, embed and head of four blocks, every second of which has a window."""
    windows = options.pop("windows", (None, 6) * 2)
    config = DecoderConfig(vocabulary=24, layers=LAYERS, windows=windows, **(SIZES | options))
    counts = [LAYERS // stages] * stages
    parts = build(config, counts, nnx.Rngs(0), context=context or Context())
    number = 0
    for part in (*parts[0], *parts[1:]):
        for _, leaf in nnx.to_flat_state(nnx.state(part, nnx.Param)):
            noise = jax.random.normal(jax.random.key(number), leaf.shape)
            leaf.set_value(0.3 * noise + float(len(leaf.shape) == 1))
            number += 1
    return parts


def plain(parts: Any, batch: Batch) -> tuple[Any, Any]:
    """The loss and the gradients of the plain model, in the form of the layer view."""
    stages, embed, head = parts

    @nnx.jit
    @nnx.value_and_grad
    def run(parts):
        x = parts["embed"](batch.inputs)
        for stage in parts["stages"]:
            x = stage(x, **{k: jnp.asarray(v) for k, v in (batch.extras or {}).items()})
        total, weight = next_token_loss(parts["head"](x), batch.targets)
        return total / weight

    return run(nnx.Dict(stages=nnx.List(stages), embed=embed, head=head))


@functools.cache
def wanted(stages: int, masked: bool = False) -> tuple[Any, Any]:
    return plain(decoder(stages), data(masked))


def pipe_of(parts: Any, mesh: dict[str, int], **options: Any) -> Pipeline:
    stages, embed, head = parts
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    given = {"embed": embed, "head": head, "loss_fn": next_token_loss, "num_microbatches": M}
    return Pipeline(stages, mesh=make_mesh(**mesh, devices=devices), **(given | options))


def check(
    pipe: Pipeline, batch: Batch, expected: tuple[Any, Any], *, tolerance: float = 1e-5
) -> None:
    loss, grads = pipe.value_and_grad(batch.inputs, batch.targets, extras=batch.extras)
    value, gradients = expected
    assert_close(loss, value)
    layers = pipe.to_layers(grads)
    for part in ("stages", "embed", "head"):
        pairs = zip(jax.tree.leaves(layers[part]), jax.tree.leaves(gradients[part]), strict=True)
        for a, b in pairs:
            assert_close(a, b, tolerance=tolerance)


MESHES = {"2x1": (2, 1), "4x1": (4, 1), "2x2": (2, 2), "1x1": (1, 1)}  # stage, data
ENGINES = "scan", "programs"
REMATS = "stage", None, POLICY
GRID = [*itertools.product(MESHES, ("seq1f1b", "seq1f1b_zb"), (2, 4), REMATS, ENGINES)]
FAST = {("2x1", "seq1f1b_zb", 2, None, engine) for engine in ENGINES}
SLOW = covering(GRID, FAST)


@pytest.mark.parametrize(
    ("mesh", "schedule", "slices", "remat", "engine"),
    [pytest.param(*case, marks=effort(case, FAST, SLOW)) for case in GRID],
)
def test_loss_and_gradients(mesh, schedule, slices, remat, engine):
    stage, shards = MESHES[mesh]
    sizes, options = {"stage": stage, "data": shards}, {"schedule": schedule, "engine": engine}
    pipe = pipe_of(decoder(stage), sizes, slices=slices, remat=remat, **options)
    check(pipe, data(), wanted(stage))


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, 4, 8])
def test_slices_and_microbatches_without_a_token(slices):
    pipe = pipe_of(decoder(2), {"stage": 2}, slices=slices)
    check(pipe, data(masked=True), wanted(2, masked=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "sizes", "schedule", "remat"),
    [
        ("ulysses", {"stage": 2, "context": 2, "data": 2}, "seq1f1b_zb", None),
        ("ulysses", {"stage": 2, "context": 4, "data": 1}, "seq1f1b", "stage"),
        ("allgather", {"stage": 2, "context": 2, "data": 1}, "seq1f1b", None),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_slices_of_positions_that_a_context_axis_splits(way, sizes, schedule, remat, engine):
    parts = decoder(2, context=Context("context", way))
    options: dict[str, Any] = {"batch": P("data", "context"), "schedule": schedule, "remat": remat}
    options["engine"] = engine
    pipe = pipe_of(parts, sizes, slices=2, **options)
    check(pipe, data(), wanted(2))
    batch = data()
    given: dict[str, Any] = {"extras": batch.extras}
    whole = pipe_of(decoder(2), {"stage": 2})
    assert_close(pipe(batch.inputs, **given), whole(batch.inputs, **given))


@pytest.mark.parametrize(
    ("slices", "order"),
    [(2, [0, 1, 4, 5, 2, 3, 6, 7]), ((6, 2), [0, 1, 2, 6, 3, 4, 5, 7])],
    ids=str,
)
def test_each_rank_of_a_context_axis_gets_its_part_of_every_slice(slices, order):
    """Rank 0 of 2 gets the first 4 of the 8 positions that the batch is sent in."""
    mesh, spec = make_mesh(stage=2, context=2), P("data", "context")
    stages = [nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(2)]
    plan = Pipeline(stages, 2, mesh=mesh, slices=slices, batch=spec).plan
    positions = jnp.arange(8)[None]
    dealt = in_order(plan, positions, spec)
    assert dealt.tolist() == [order]
    assert in_order(plan, dealt, spec, back=True).tolist() == positions.tolist()
    assert in_order(plan, positions, P("data")) is positions


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "remat"), [("seq1f1b_zb", None), ("seq1f1b", "stage")])
def test_beside_a_tensor_axis(schedule, remat):
    sizes = {"stage": 2, "tensor": 2}
    check(pipe_of(decoder(2), sizes, slices=4, schedule=schedule, remat=remat), data(), wanted(2))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "remat"), [("seq1f1b_zb", None), ("seq1f1b", "stage")])
def test_experts_over_an_axis(schedule, remat):
    experts = ExpertsConfig(number=4, top_k=2, hidden=8, layers=(1, 3))
    options: dict[str, Any] = {"batch": P(("data", "expert")), "schedule": schedule}
    sizes = {"stage": 2, "data": 1, "expert": 2}
    pipe = pipe_of(decoder(2, experts=experts), sizes, slices=4, remat=remat, **options)
    check(pipe, data(), plain(decoder(2, experts=experts), data()))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
@pytest.mark.parametrize("schedule", ["seq1f1b", "seq1f1b_zb"])
def test_unlike_stages_carry_different_values(schedule, remat):
    def parts() -> Any:
        stages, embed, head = decoder(4)
        stages[1].blocks = nnx.List([])
        return stages, embed, head

    pipe = pipe_of(parts(), {"stage": 4}, schedule=schedule, slices=4, remat=remat)
    check(pipe, data(), plain(parts(), data()))


@pytest.mark.slow
@pytest.mark.parametrize("slices", [4, (7, 5, 4)])
def test_latent_attention_and_learned_positions_in_slices(slices):
    latent = LatentConfig(query_rank=None, rank=8, nope=4, rope=4, value=4)
    options: dict[str, Any] = {"latent": latent, "windows": (None,) * LAYERS, "head_dim": 8}
    options |= {"kv_heads": 4}
    pipe = pipe_of(decoder(2, **options), {"stage": 2}, slices=slices)
    check(pipe, data(), plain(decoder(2, **options), data()))
    learned: dict[str, Any] = {"rope": None, "positions": T}
    batch = data()._replace(extras={})
    pipe = pipe_of(decoder(2, **learned), {"stage": 2}, slices=slices)
    check(pipe, batch, plain(decoder(2, **learned), batch))


LATENT: dict[str, Any] = {
    "latent": LatentConfig(query_rank=8, rank=8, nope=4, rope=4, value=4),
    "windows": (None,) * LAYERS,
    "head_dim": 8,
    "kv_heads": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "order", "slices", "options"),
    [
        ("ulysses", "zigzag", None, {"schedule": "gpipe"}),
        ("ring", "zigzag", None, {"schedule": "1f1b"}),
        ("ulysses", "zigzag", None, {"schedule": "1f1b", "data": 2}),
        ("ring", "zigzag", None, {"schedule": "zb_h1", "remat": None, "data": 2}),
        ("ring", "contiguous", None, {"schedule": "gpipe", "context": 4}),
        ("ulysses", "contiguous", None, {"schedule": "1f1b", "context": 4}),
        ("allgather", "contiguous", None, {"schedule": "1f1b", "context": 4}),
        ("allgather", "zigzag", None, {"schedule": "zb_h1", "remat": None, "data": 2}),
        ("allgather", "contiguous", 2, {"schedule": "seq1f1b_zb", "remat": None}),
        ("allgather", "zigzag", (8, 4, 4), {}),
        ("ulysses", "contiguous", 2, {"schedule": "seq1f1b_zb", "remat": None}),
        ("ulysses", "zigzag", (8, 4, 4), {}),
        ("ring", "contiguous", 2, {"schedule": "seq1f1b_zb", "remat": None}),
        ("ring", "zigzag", (8, 4, 4), {}),
        ("ulysses", "contiguous", None, {"schedule": "1f1b", "tensor": 2}),
        ("ring", "contiguous", None, {"schedule": "1f1b", "tensor": 2}),
    ],
)
def test_latent_attention_over_a_context_axis(way, order, slices, options):
    """Packed rows; the three ways exchange latents."""
    options = {"stage": 2, "data": 1, "context": 2, **options}
    axes = ("stage", "data", "context", "tensor")
    sizes = {name: options.pop(name) for name in axes if name in options}
    parts = decoder(2, context=Context("context", way, order), **LATENT)
    batch = data()
    if order == "zigzag":
        batch = zigzag(batch, sizes["context"], slices=slices or 1)
    pipe = pipe_of(parts, sizes, slices=slices, batch=P("data", "context"), **options)
    # Two norms and two products more than heads of keys: up to 1.5e-5 of rounding on some releases.
    check(pipe, batch, plain(decoder(2, **LATENT), data()), tolerance=3e-5)


def test_latent_attention_of_heads_that_ulysses_cannot_share():
    few = LATENT | {"heads": 2, "kv_heads": 2}
    parts = decoder(2, context=Context("context", "ulysses"), **few)
    pipe = pipe_of(parts, {"stage": 2, "context": 4}, batch=P("data", "context"))
    batch = data()
    with pytest.raises(ValueError) as caught:
        pipe.loss(batch.inputs, batch.targets, extras=batch.extras)
    assert str(caught.value) == (
        "context='ulysses' with 2 heads of latent attention over 4 ranks of 'context': each rank "
        "takes as many heads; choose an axis that divides 2, or take context='allgather' or 'ring'"
    )


@pytest.mark.slow
def test_outputs_log_probabilities_and_other_numbers_of_microbatches():
    pipe, batch = pipe_of(decoder(2), {"stage": 2}, slices=4), data()
    whole = pipe.replace(slices=None, schedule="1f1b")
    given: dict[str, Any] = {"extras": batch.extras}
    assert_close(pipe(batch.inputs, **given), whole(batch.inputs, **given))
    words = batch.targets[0]
    assert_close(*(one.logprobs(batch.inputs, words, **given) for one in (pipe, whole)))
    weighed: list[Any] = [
        one.loss(batch.inputs, batch.targets, **given, weighed=True, num_microbatches=count)
        for one, count in ((pipe, 4), (whole, 2))
    ]
    assert_close(*weighed)


class Recurrent(nnx.Module):
    """A gated sum over positions, whose state a slice leaves for the next."""

    def __init__(self, rngs: nnx.Rngs, width: int = 4) -> None:
        self.decay = nnx.Param(rngs.params.normal((width,)))
        self.mix = nnx.Param(0.5 * rngs.params.normal((width, width)))

    def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return self.call_slice(x, None, None, scale)[0]

    def call_slice(self, x: Any, earlier: Any, part: Any, scale: jax.Array) -> Any:
        keep = jax.nn.sigmoid(self.decay[...])

        def step(state: jax.Array, one: jax.Array) -> Any:
            state = keep[None] * state + jnp.tanh(one @ self.mix[...])
            return state, state

        start = jnp.zeros_like(x[:, 0])
        if earlier is not None:
            start = jnp.where(part.index > 0, earlier[part.index - 1], start)
        last, states = jax.lax.scan(step, start, jnp.moveaxis(x, 1, 0))
        return x + scale * jnp.moveaxis(states, 0, 1), last


def squares(y: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.square(y - targets).mean()


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("seq1f1b", "stage"), pytest.param("seq1f1b_zb", None, marks=pytest.mark.slow)],
)
def test_a_users_own_stage_carries_a_state(schedule, remat):
    make = np.random.default_rng(1)
    x, targets = (jnp.asarray(make.normal(size=(ROWS, 8, 4)), jnp.float32) for _ in range(2))
    scale = jnp.asarray(make.uniform(size=(ROWS, 1, 1)), jnp.float32)  # the same in all slices

    def stages() -> list[Recurrent]:
        rngs = nnx.Rngs(3)
        return [Recurrent(rngs) for _ in range(2)]

    @nnx.value_and_grad
    def run(stages):
        y = x
        for stage in stages:
            y = stage(y, scale)
        return squares(y, targets)

    value, gradients = run(nnx.List(stages()))
    pipe = Pipeline(
        stages(),
        M,
        loss_fn=squares,
        mesh=make_mesh(stage=2, devices=jax.devices()[:2]),
        schedule=schedule,
        slices=4,
        remat=remat,
    )
    loss, grads = pipe.value_and_grad(x, targets, extras={"scale": scale})
    assert_close(loss, value)
    assert_close(jax.tree.leaves(pipe.to_layers(grads)["stages"]), jax.tree.leaves(gradients))
