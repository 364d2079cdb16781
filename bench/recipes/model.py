"""A training step of a recipe, sharded by the compiler.

Weights of all layers are stacked and scanned; their first axis that has the model's width is
divided over ``data``, experts over ``expert``. Activations have their batch over both axes. The
compiler places every collective, as it does for MaxText. Splash attention stands in a `shard_map`,
since no compiler can divide a kernel. The embedding is a product with a one-hot matrix, the loss
one with one-hot targets, and AdamW follows a clip of the global norm: so do the recipes.

Letters: b sequences, t positions, d width, h heads, k heads of keys, c width of a head, e experts,
n places of an expert, f hidden columns, v words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from bench import tpu  # noqa: F401  (before jax)
from bench.recipes.table import Recipe

import jax  # isort: skip
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh

ROWS = ("data", "expert")
BLOCK = 512
THETA = 500000.0


def mesh_of(recipe: Recipe, devices: Any) -> Mesh:
    """The recipe's mesh of axes that are left to the compiler."""
    sizes = {"stage": 1, "expert": 1, **recipe.axes}
    mesh = make_mesh(devices=devices, **sizes)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def weights_of(recipe: Recipe) -> dict[str, Any]:
    """Shapes of all weights; the arrays of ``layers`` are stacked."""
    s, dtype = recipe.sizes, jnp.dtype(recipe.weights)
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (s.width,),
        "query": (s.width, s.heads, s.head),
        "key": (s.width, s.groups, s.head),
        "value": (s.width, s.groups, s.head),
        "out": (s.heads, s.head, s.width),
        "mlp_norm": (s.width,),
    }
    lead = (s.experts,) if s.experts else ()
    layer |= dict.fromkeys(("wi_0", "wi_1"), (*lead, s.width, s.hidden))
    layer["wo"] = (*lead, s.hidden, s.width)
    if s.experts:
        layer["gate"] = (s.width, s.experts)
    make = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    return {
        "embed": make((s.vocab, s.width)),
        "layers": {name: make((s.layers, *shape)) for name, shape in layer.items()},
        "norm": make((s.width,)),
        "logits": make((s.width, s.vocab)),
    }


def specs_of(recipe: Recipe) -> dict[str, Any]:
    """Specs of all weights over the mesh."""
    s = recipe.sizes

    def spec(name: str, shape: tuple[int, ...], stacked: int) -> P:
        if "norm" in name:
            return P()
        dims: list[str | None] = [None] * len(shape)
        first = stacked + (1 if s.experts and name.startswith("w") else 0)
        dims[shape.index(s.width, first)] = "data"
        if first > stacked:
            dims[stacked] = "expert"
        return P(*dims)

    weights = weights_of(recipe)
    layers = {name: spec(name, w.shape, 1) for name, w in weights["layers"].items()}
    ends = {name: spec(name, weights[name].shape, 0) for name in ("embed", "norm", "logits")}
    return {**ends, "layers": layers}


def policy_of(recipe: Recipe) -> Callable[..., Any]:
    """The policy of `jax.checkpoint` that saves and offloads what the recipe says."""
    if recipe.dots:
        return jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(recipe.saved),
        names_which_can_be_offloaded=list(recipe.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def loss_of(recipe: Recipe, mesh: Mesh) -> Callable[..., jax.Array]:
    """The mean loss of weights, words and targets `[b, t]`."""

    def rows(x: jax.Array) -> jax.Array:
        spec = P(ROWS, *[None] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    attend = attention_of(recipe, mesh)
    mlp = experts_of(recipe, mesh) if recipe.sizes.experts else dense

    @functools.partial(jax.checkpoint, policy=policy_of(recipe), prevent_cse=False)
    def layer(x: jax.Array, w: Any) -> jax.Array:
        w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
        x = checkpoint_name(rows(x), "decoder_layer_input")
        y = rows(norm(x, w["attention_norm"]))
        q, k, v = (jnp.einsum("btd,dhc->bthc", y, w[name]) for name in ("query", "key", "value"))
        q = checkpoint_name(rotate(q) * recipe.sizes.head**-0.5, "query_proj")
        k, v = checkpoint_name(rotate(k), "key_proj"), checkpoint_name(v, "value_proj")
        y = jnp.einsum("bthc,hcd->btd", rows(attend(q, k, v)), w["out"])
        x = x + rows(checkpoint_name(y, "out_proj"))
        return rows(x + rows(mlp(rows(norm(x, w["mlp_norm"])), w)))

    def loss(weights: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
        one_hot = jax.nn.one_hot(words, recipe.sizes.vocab, dtype=jnp.bfloat16)
        x = rows(jnp.einsum("btv,vd->btd", rows(one_hot), weights["embed"].astype(jnp.bfloat16)))
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights["layers"])
        x = norm(x, weights["norm"].astype(jnp.bfloat16))
        logits = jnp.einsum("btd,dv->btv", x, weights["logits"].astype(jnp.bfloat16))
        return jnp.mean(cross_entropy(rows(logits), targets))

    return loss


@functools.partial(jax.checkpoint, prevent_cse=False)
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Losses `[b, t]` in float32; the backward reads the logits as they are."""
    logits = logits.astype(jnp.float32)
    labels = jax.nn.one_hot(targets, logits.shape[-1])
    return jax.nn.logsumexp(logits, -1) - jnp.sum(labels * logits, -1)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of `[b, t, h, c]`, halves against each other."""
    t, c = x.shape[1], x.shape[3]
    angles = jnp.arange(t)[:, None] * THETA ** (-jnp.arange(0, c, 2) / c)
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    y = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return y.astype(x.dtype)


def dense(x: jax.Array, w: Any) -> jax.Array:
    """SwiGLU."""
    gate = checkpoint_name(jnp.einsum("btd,df->btf", x, w["wi_0"]), "mlpwi_0")
    up = checkpoint_name(jnp.einsum("btd,df->btf", x, w["wi_1"]), "mlpwi_1")
    return checkpoint_name(jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, w["wo"]), "mlpwo")


def experts_of(recipe: Recipe, mesh: Mesh) -> Callable[[jax.Array, Any], jax.Array]:
    """SwiGLU experts with a capacity, dispatched and combined by products with one-hot masks."""
    s = recipe.sizes
    places = int(math.ceil(recipe.length * s.top / s.experts) * recipe.capacity)

    def by_expert(x: jax.Array) -> jax.Array:
        spec = P("expert", "data", *[None] * (x.ndim - 2))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def masks(x: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, chosen = jax.lax.top_k(jnp.einsum("btd,de->bte", x, gate), s.top)
        share = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
        taken = jax.nn.one_hot(chosen, s.experts, dtype=jnp.int32)  # [b, t, top, e]
        flat = taken.reshape(x.shape[0], -1, s.experts)
        count = jnp.cumsum(flat, axis=1) * flat
        count = count.reshape(taken.shape)
        count = count * (count <= places)
        weight = jnp.sum(share[..., None] * (count > 0), axis=2)
        place = jax.nn.one_hot(count.sum(2), places + 1, dtype=jnp.int32)
        combine = (weight[..., None] * place)[..., 1:].astype(x.dtype)
        return combine.astype(bool), combine

    def mlp(x: jax.Array, w: Any) -> jax.Array:
        dispatch, combine = masks(x, w["gate"])
        given = by_expert(jnp.einsum("btd,bten->ebnd", x, dispatch.astype(x.dtype)))
        gate = checkpoint_name(jnp.einsum("ebnd,edf->ebnf", given, w["wi_0"]), "mlpwi_0")
        up = checkpoint_name(jnp.einsum("ebnd,edf->ebnf", given, w["wi_1"]), "mlpwi_1")
        y = jnp.einsum("ebnf,efd->ebnd", jax.nn.silu(by_expert(gate)) * by_expert(up), w["wo"])
        return jnp.einsum("ebnd,bten->btd", checkpoint_name(by_expert(y), "mlpwo"), combine)

    return mlp


def attention_of(recipe: Recipe, mesh: Mesh) -> Callable[..., jax.Array]:
    """Causal splash attention of `[b, t, h, c]` by the recipe's blocks, segments given."""
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": recipe.blocks.get(name, BLOCK) for name in names}
    if recipe.fused:
        sizes |= {"use_fused_bwd_kernel": True, "block_q_dq": None, "block_kv_dq": None}
    t, spec = recipe.length, P(ROWS)
    interpret = mesh.devices.flat[0].platform != "tpu"

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        mask = splash.MultiHeadMask([splash.CausalMask((t, t))] * q.shape[2])
        kernel = splash.make_splash_mha_single_device(
            mask,
            block_sizes=splash.BlockSizes(**sizes),
            residual_checkpoint_name="context",
            interpret=interpret,
        )
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        y = jax.vmap(lambda q, k, v, s: kernel(q, k, v, splash.SegmentIds(s, s)))(q, k, v, ids)
        return jnp.swapaxes(y, 1, 2)

    run = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return run(q, k, v, jnp.ones(q.shape[:2], jnp.int32))

    return attend


def lower(recipe: Recipe, mesh: Mesh) -> jax.stages.Lowered:
    """A step of a recipe: loss, gradients, clip and AdamW."""
    weights, specs = weights_of(recipe), specs_of(recipe)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95, weight_decay=0.1))
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    where = place(specs, is_leaf=lambda x: isinstance(x, P))
    state = jax.eval_shape(tx.init, weights)
    kept = optax.tree_map_params(
        tx, lambda _, s: s, state, where, transform_non_params=lambda _: NamedSharding(mesh, P())
    )
    loss = loss_of(recipe, mesh)

    @functools.partial(
        jax.jit,
        donate_argnums=(0, 1),
        in_shardings=(where, kept, None, None),
        out_shardings=(where, kept, None),
    )
    def step(weights: Any, state: Any, words: Any, targets: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, words, targets)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    shape = (recipe.chips * recipe.rows, recipe.length)
    words = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P(ROWS)))
    with jax.set_mesh(mesh):
        return step.lower(weights, state, words, words)
