"""The Llama of `bench.tpu_llama` as it is trained without us, for `bench.tpu_cycles`.

The same layers, loss and optimizer, float32 weights and bfloat16 activations, as
GPipe: `shard_map`, a scan over ticks, `ppermute`, differentiated by `jax.grad`;
shifted: `vmap` over stages, whose outputs a sharded buffer shifts by one, left to the compiler;
FSDP: every weight over all chips, gathered by a block before it runs and again in its backward;
with an axis `tensor` a rank gathers its part of a layer (Megatron's, with sequence parallelism).

All compute a block's forward again in its backward and keep what its attention gives; GPipe, which
has no room for that, and 70B on v6e, which is quicker without, do not, and "8B-fsdp-kept" keeps all
but the weights, as "8B-best" of ours, one of a chip's rows after another. Gradients of weights are
reduced once a step, but by FSDP. GPipe and shifted share the head: each rank of a pipeline takes
its part of the microbatches.
Letters: S ranks, M microbatches, D shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from bench import (
    tpu,  # noqa: F401  (before jax)
    tpu_experts,
)
from bench.tpu_llama import CASES, Case

import jax  # isort: skip
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline.models.layers import attention, kernels

Loss = Callable[..., jax.Array]  # of (weights, words, targets)
ROWS = "data", "expert"
# Options of a model whose blocks are computed again.
AGAIN = ("scan_layers", "remat_blocks", "keep_attention")


def _like(
    name: str,
    kind: str,
    *,
    again: Sequence[str] = AGAIN,
    **changes: Any,
) -> tuple[str, Case]:
    """A peer on the mesh of one of ours.

    Args:
      name: of ours.
      kind: of the peer.
      again: the options of a model that are on for blocks to be computed again.
      **changes: to the case.
    """
    case = CASES[name]
    changed = {"loss_chunks": None, "sequence_parallel": "tensor" in changes.get("axes", ())}
    blocks = dict.fromkeys(AGAIN, False) | dict.fromkeys(again, True)
    config = dataclasses.replace(case.config, **changed, **blocks)
    return kind, dataclasses.replace(case, config=config, options={}, chunks=1, **changes)


# By name, which kind and what of. Microbatches of FSDP are its own: gradients of each are summed.
PEERS = {
    "8B-gpipe": _like("8B-best", "gpipe", again=AGAIN[:2]),
    "8B-shifted": _like("8B-best", "shifted"),
    "8B-fsdp": _like("8B-best", "fsdp", axes={"data": 64}, rows=4, microbatches=1),
    "8B-fsdp-kept": _like("8B-best", "fsdp", again=(), axes={"data": 64}, microbatches=4),
    "8B-v6e-fsdp": _like("8B-v6e", "fsdp", axes={"data": 64}, rows=4, microbatches=1),
    "70B-gpipe": _like("70B-again", "gpipe", again=AGAIN[:2]),
    "70B-shifted": _like("70B-again", "shifted"),
    "70B-fsdp": _like("70B-again", "fsdp", axes={"data": 512}, rows=2, microbatches=1),
    "70B-v6e-fsdp": _like("70B-v6e", "fsdp", again=AGAIN[:2], axes={"data": 256}, microbatches=4),
    "70B-v6e-fsdp-tensor": _like(
        "70B-v6e",
        "fsdp",
        again=AGAIN[:2],
        axes={"data": 128, "tensor": 2},
        rows=2,
        microbatches=4,
    ),
    **tpu_experts.PEERS,
}


def lower(kind: str, case: Case, devices: Any) -> tuple[Mesh, Callable[[], jax.stages.Lowered]]:
    """The mesh of a peer, and its training step."""
    sizes = {"stage": 1, **case.axes}
    mesh = make_mesh(devices=devices, **sizes)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    make, specs_of = {
        "gpipe": (gpipe, staged),
        "shifted": (shifted, staged),
        "fsdp": (fsdp, spread),
    }[kind]
    S = sizes["stage"]
    parts = nnx.eval_shape(lambda: case.parts(S))
    graphs, states = zip(*(nnx.split(part) for part in (parts[0][0], *parts[1:])), strict=True)
    stacked = jax.tree.map(lambda w: jax.ShapeDtypeStruct((S, *w.shape), w.dtype), states[0])
    weights = (stacked, *states[1:])
    M, one_by_one = case.microbatches, kind == "fsdp" and case.microbatches > 1
    lead = 2 if case.config.scan_layers else 1  # stages, and layers where they are stacked
    specs = specs_of(weights, sizes, lead)
    loss = make(case, mesh, graphs, specs)

    def lowered() -> jax.stages.Lowered:
        kept = owned(weights, specs, sizes, lead)
        place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
        tx = optax.adam(1e-4)
        where = place(specs, is_leaf=_is_spec)
        state = jax.eval_shape(tx.init, weights)
        parts_of = place(
            optax.tree_map_params(
                tx, lambda _, s: s, state, kept, transform_non_params=lambda _: P()
            ),
            is_leaf=_is_spec,
        )

        @functools.partial(
            jax.jit,
            donate_argnums=(0, 1),
            in_shardings=(where, parts_of, None, None),
            out_shardings=(where, parts_of, None),
        )
        def step(weights: Any, state: Any, words: Any, targets: Any) -> Any:
            if one_by_one:
                value, grads = summed(jax.value_and_grad(loss), weights, words, targets)
            else:
                value, grads = jax.value_and_grad(loss)(weights, words, targets)
            grads = jax.lax.with_sharding_constraint(grads, place(kept, is_leaf=_is_spec))
            updates, state = tx.update(grads, state, weights)
            return optax.apply_updates(weights, updates), state, value

        rows = case.shards * case.rows
        if one_by_one:
            shape, spec = (M, rows, case.length), P(None, case.row_axes)
        else:
            shape, spec = (M * rows, case.length), P(case.row_axes)
        words = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            return step.lower(weights, state, words, words)

    return mesh, lowered


def summed(
    value_and_grad: Callable[..., Any], weights: Any, words: jax.Array, targets: jax.Array
) -> Any:
    """Mean of losses and gradients over [M, rows, T] words, one microbatch after the other."""

    def one(total: Any, batch: Any) -> tuple[Any, None]:
        # As they are: XLA fails to move reductions out of the loop, and these sum by the row.
        found = jax.lax.optimization_barrier(value_and_grad(weights, *batch))
        return jax.tree.map(jnp.add, total, found), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
    total, _ = jax.lax.scan(one, zeros, (words, targets))
    return jax.tree.map(lambda x: x / words.shape[0], total)


def _axes(name: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a spec."""
    return name if isinstance(name, tuple) else () if name is None else (name,)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def staged(weights: Any, sizes: dict[str, int], lead: int) -> Any:
    """Stages over ``stage``, the ends everywhere."""
    del sizes, lead
    stages, *ends = weights
    return (
        jax.tree.map(lambda _: P("stage"), stages),
        *(jax.tree.map(lambda _: P(), end) for end in ends),
    )


def spread(weights: Any, sizes: dict[str, int], lead: int) -> Any:
    """Every weight over ``data``, along its first axis that can be cut but stages and layers.

    Layers that are cut over ``tensor`` or ``expert`` say along which axis; what is not cut over
    ``expert`` is spread over it too.
    """
    stages, *ends = weights
    cut = over_layers(stages, sizes, before=1), *(over_layers(end, sizes) for end in ends)
    return owned(weights, cut, sizes, lead)


def over_layers(state: Any, sizes: dict[str, int], before: int = 0) -> Any:
    """Specs of weights as their layers cut them; axes that were put ``before`` are whole."""

    def spec(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        names = variable.get_metadata("out_sharding", None) or ()
        kept = [name if name in sizes else None for name in names]
        return variable.replace(P(*[None] * before, *kept) if any(kept) else P())

    return jax.tree.map(spec, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def owned(weights: Any, specs: Any, sizes: dict[str, int], lead: int) -> Any:
    """Specs of what is kept of a weight once: divided over ``data`` too, where it can be."""
    stages, *ends = weights

    def one(first: int) -> Any:
        def of(w: Any, spec: P) -> P:
            names = [*spec, *[None] * (len(w.shape) - len(spec))]
            rows = ("data",) if "expert" in names or "expert" not in sizes else ROWS
            ranks = math.prod(sizes[axis] for axis in rows)
            done = any("data" in _axes(name) for name in names)
            for axis in range(len(names) if done else first, len(names)):
                if names[axis] is None and w.shape[axis] % ranks == 0:
                    names[axis] = rows if len(rows) > 1 else "data"
                    break
            return P(*names)

        return of

    return (
        jax.tree.map(one(lead), stages, specs[0]),
        *(jax.tree.map(one(0), end, spec) for end, spec in zip(ends, specs[1:], strict=True)),
    )


def mean_of(case: Case, head: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    """The sum of the losses of [n, rows, t, d] microbatches, one after the other."""
    losses = case.losses()

    @jax.checkpoint
    def one(pair: Any) -> jax.Array:
        return losses(head(pair[0]), pair[1])[0]

    return jax.lax.map(one, (x, targets)).sum()


def gpipe(case: Case, mesh: Mesh, graphs: Any, specs: Any) -> Loss:
    """GPipe, every microbatch forward and then, in the transpose of the scan, back."""
    S, M = mesh.shape["stage"], case.microbatches

    def local(weights: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
        # Sums over data and stages follow from these, once a step.
        whole = functools.partial(jax.lax.pcast, axis_name=("data", "stage"), to="varying")
        over_data = functools.partial(jax.lax.pcast, axis_name="data", to="varying")
        stage = nnx.merge(graphs[0], jax.tree.map(lambda w: over_data(w[0]), weights[0]))
        embed, head = (
            nnx.merge(graph, jax.tree.map(whole, state))
            for graph, state in zip(graphs[1:], weights[1:], strict=True)
        )
        rank = jax.lax.axis_index("stage")
        words, targets = (x.reshape(M, -1, case.length) for x in (words, targets))

        def tick(state: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.where(rank == 0, embed(words[jnp.minimum(time, M - 1)]), state)
            y = stage(x)
            return jax.lax.ppermute(y, "stage", [(r, r + 1) for r in range(S - 1)]), y

        shape = (case.rows, case.length, case.config.hidden_size)
        start = whole(jnp.zeros(shape, jnp.bfloat16))
        _, ys = jax.lax.scan(tick, start, jnp.arange(M + S - 1))
        last = jnp.where(rank == S - 1, ys[S - 1 :], 0)
        mine = jax.lax.psum_scatter(last, "stage", scatter_dimension=0, tiled=True)
        n = M // S
        part = jax.lax.dynamic_slice_in_dim(targets, rank * n, n)
        total = mean_of(case, head, mine, part)
        return jax.lax.psum(total, ("data", "stage")) / (words.size * mesh.shape["data"])

    rows = P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, rows, rows), out_specs=P())


def shifted(case: Case, mesh: Mesh, graphs: Any, specs: Any) -> Loss:
    """All stages at once by `vmap` over a sharded stage axis, their outputs shifted by one."""
    del specs
    S, M = mesh.shape["stage"], case.microbatches
    along = NamedSharding(mesh, P("stage", "data"))

    def stage(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphs[0], state)(x)

    run = jax.vmap(stage, spmd_axis_name="stage")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> jax.Array:
        """A compiler cannot cut a kernel: rows are cut by hand."""
        rows = P("data")
        on_this = jax.shard_map(
            kernels.splash, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False
        )
        return on_this(q, k, v)

    def loss(weights: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
        embed, head = (nnx.merge(g, s) for g, s in zip(graphs[1:], weights[1:], strict=True))
        D = mesh.shape["data"]

        def by_microbatch(x: jax.Array) -> jax.Array:  # each data shard has rows of all
            x = x.reshape(D, M, case.rows, case.length)
            return jnp.moveaxis(x, 1, 0).reshape(M, D * case.rows, case.length)

        words, targets = by_microbatch(words), by_microbatch(targets)

        def tick(state: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = embed(words[jnp.minimum(time, M - 1)])
            state = jnp.roll(state, 1, axis=0).at[0].set(x)
            state = run(weights[0], jax.lax.with_sharding_constraint(state, along))
            return jax.lax.with_sharding_constraint(state, along), state[-1]

        shape = (S, D * case.rows, case.length, case.config.hidden_size)
        start = jax.lax.with_sharding_constraint(jnp.zeros(shape, jnp.bfloat16), along)
        _, ys = jax.lax.scan(tick, start, jnp.arange(M + S - 1))
        rows = NamedSharding(mesh, P(None, ("data", "stage")))  # the head of a row on one chip
        ys = ys[S - 1 :]
        ys, targets = (x.reshape(M // S, S * x.shape[1], *x.shape[2:]) for x in (ys, targets))
        ys, targets = (jax.lax.with_sharding_constraint(x, rows) for x in (ys, targets))
        return mean_of(case, head, ys, targets) / words.size

    def patched(*given: Any) -> jax.Array:
        with mock.patch.object(attention, "attend", attend):
            return loss(*given)

    return patched


def fsdp(case: Case, mesh: Mesh, graphs: Any, specs: Any) -> Loss:
    """Weights are gathered in bfloat16, and their gradients summed in it."""

    def whole(w: jax.Array, spec: P, drop: int = 0) -> jax.Array:
        axis, names = next((n, _axes(x)) for n, x in enumerate(spec) if "data" in _axes(x))
        return jax.lax.all_gather(w.astype(jnp.bfloat16), names, axis=axis - drop, tiled=True)

    def local(weights: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
        stage, embed, head = (nnx.merge(g, s) for g, s in zip(graphs, weights, strict=True))
        for end, spec in zip((embed, head), specs[1:], strict=True):
            nnx.update(end, jax.tree.map(whole, nnx.state(end), spec))
        x = embed(words)
        if case.config.scan_layers:
            graph, blocks = nnx.split(stage.blocks)
            blocks = jax.tree.map(lambda w: w[0], blocks)
            kept = jax.checkpoint_policies.save_only_these_names(kernels.RESIDUALS)

            @functools.partial(jax.checkpoint, policy=kept if case.config.keep_attention else None)
            def block(x: jax.Array, state: Any) -> jax.Array:
                gathered = functools.partial(whole, drop=2)
                return nnx.merge(graph, jax.tree.map(gathered, state, specs[0]["blocks"]))(x)

            x, _ = jax.lax.scan(lambda x, state: (block(x, state), None), x, blocks)
        else:
            kept = jax.checkpoint_policies.save_anything_except_these_names("gathered")
            for n, one in enumerate(stage.blocks):
                graph, state = nnx.split(one)
                of_one = specs[0]["blocks"][n]

                @functools.partial(jax.checkpoint, policy=kept)
                def block(x: jax.Array, state: Any, graph: Any = graph, at: Any = of_one) -> Any:
                    gathered = jax.tree.map(lambda w, spec: whole(w[0], spec, drop=1), state, at)
                    return nnx.merge(graph, checkpoint_name(gathered, "gathered"))(x)

                x = block(x, state)
        total = mean_of(case, head, x[:, None], targets[:, None])
        return jax.lax.psum(total, case.row_axes) / (words.size * case.shards)

    # Every weight is gathered, whose transpose sums, so no types are needed but by layers over
    # `tensor`; and with them kernels are regions (`collectives.local`) into which a policy of
    # `jax.checkpoint` looks for names to keep, and for nothing else.
    rows, typed = P(case.row_axes), "tensor" in mesh.shape
    given = specs, rows, rows
    return jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=P(), check_vma=typed)
