"""The attention layer by the kernels of platforms: parity with its formula, choice and errors.

Letters: K stages, M microbatches, b = sequences, t = positions, d = width.
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
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.base.agreed.slices import FixedSlice, SequenceSlice
from pipeline.layers import Attention, attend_slice
from pipeline.models.layers import kernels
from tests.support import chips, models
from tests.support.close import assert_close
from tests.support.grids import covering, effort
from tests.support.group import assert_parity, normal

M, K, B, T, D = 2, 2, 2, 128, 16
OF_TENSOR = {"data": 2, "stage": K, "tensor": 2}
FAMILIES, REMATS = ("gpipe", "1f1b", "zb_h1"), ("stage", None)


class Block(nnx.Module):
    """Attention added to the residual stream; four heads that read two."""

    def __init__(self, rngs: nnx.Rngs, *, implementation: Any = "splash", **options: Any):
        sizes = {"head_dim": 8, "theta": 100.0, **options}
        self.attention = Attention(D, 4, 2, rngs, implementation=implementation, **sizes)

    def __call__(self, x):
        return x + self.attention(x)


def mean(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


@functools.cache
def batch() -> tuple[jax.Array, jax.Array]:
    return normal(2 * M, T, D), normal(2 * M, T, D, seed=1)


@functools.cache
def wanted() -> Any:
    formula = models.build(Block, K, implementation="chunked", query_chunk=32)
    return models.reference(formula, *batch(), mean)


# --- splash attention, interpreted ---


FAST = {("zb_h1", None, "tensor")}
GRID = [*itertools.product(FAMILIES, REMATS, ("plain", "tensor"))]
# Every two values meet.
SLOW = covering(GRID, FAST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "remat", "where"),
    [pytest.param(*case, marks=effort(case, FAST, SLOW)) for case in GRID],
)
def test_splash_attention_in_a_pipeline(family, remat, where):
    """With ``tensor``, each rank has two heads of queries and the one that they read."""
    axes = OF_TENSOR if where == "tensor" else {"data": 2, "stage": K}
    mesh = make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    pipe = Pipeline(
        models.build(Block, K), M, schedule=family, mesh=mesh, loss_fn=mean, remat=remat
    )
    models.assert_matches(pipe, pipe.value_and_grad(*batch()), wanted())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv", "options"),
    [
        (4, 2, {"sequence_parallel": True}),
        (4, 4, {}),
        (6, 2, {}),
        (4, 1, {"replicate_kv": True}),
    ],
)
def test_splash_attention_in_parts(heads, kv, options):
    """Differentiated around shard_map and within it."""
    given = {"head_dim": 8, "theta": 100.0, **options}
    layer = Attention(D, heads, kv, nnx.Rngs(0), implementation="splash", **given)
    sequence = options.get("sequence_parallel", False)
    x = normal(B, T, D)
    assert_parity(layer, lambda m, x: m(x), x, ranks=2, sequence_parallel=sequence)
    formula = Attention(D, heads, kv, nnx.Rngs(0), implementation="chunked", **given)
    assert_close(layer(x), formula(x), tolerance=1e-4)


@pytest.mark.slow
def test_several_blocks_of_positions():
    """256 positions by blocks of 256, 384 by blocks of 128."""
    for t in (256, 384):
        q, k, v = (normal(1, t, heads, 8, seed=s) for s, heads in enumerate((4, 2, 2)))
        found = attend_slice(q, k, v, None, implementation="splash")[0]
        formula = attend_slice(q, k, v, None, implementation="chunked")[0]
        assert_close(found, formula, tolerance=1e-4)


# --- the choice ---


def chosen(devices: Any, *shape: int, dtype: Any = jnp.bfloat16, manual: Any = None) -> str:
    """The kernel that gets a layer's queries of a shape, on a mesh of devices."""
    names = ("stage", "tensor")
    mesh = Mesh(np.array(devices).reshape(-1, 2), names, axis_types=(AxisType.Auto,) * 2)
    found = []

    def body(q):
        found.append(kernels.choose(q))
        return q

    run = jax.shard_map(
        body, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=manual or set(names)
    )
    jax.eval_shape(run, jax.ShapeDtypeStruct(shape, dtype))
    return found[0]


def test_the_choice_follows_the_mesh(monkeypatch):
    tpu = chips.tpu(chips.V5E, 2, 2)
    assert chosen(tpu, 1, 256, 4, 64) == "splash"
    assert chosen(tpu, 1, 256, 4, 64, dtype=jnp.float32) == "splash"
    assert chosen(tpu, 1, 250, 4, 64) == "chunked"
    assert chosen(tpu, 1, 256, 4, 12) == "chunked"
    assert chosen(tpu, 1, 256, 4, 512) == "chunked"
    assert chosen(tpu, 1, 256, 4, 64, manual={"stage"}) == "chunked"
    assert chosen(chips.hosts(4), 1, 256, 4, 64) == "chunked"
    gpu = [chips.Device(n, platform="gpu", device_kind="NVIDIA H100") for n in range(4)]
    assert chosen(gpu, 1, 250, 4, 64) == "chunked"  # cuDNN is not installed
    monkeypatch.setattr(kernels, "has_cudnn", lambda: True)
    assert chosen(gpu, 1, 250, 4, 64) == "cudnn"
    assert chosen(gpu, 1, 250, 4, 64, dtype=jnp.float32) == "chunked"
    assert chosen(gpu, 1, 250, 4, 256) == "chunked"


def test_the_choice_without_a_mesh(monkeypatch):
    q = jnp.zeros((1, 256, 4, 64))
    monkeypatch.setattr(kernels, "platform", lambda: "tpu")
    assert kernels.choose(q) == "chunked"  # who knows how eight devices share it
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert kernels.choose(q) == "splash"


def test_cudnn_is_traced_beside_a_tensor_axis(monkeypatch):
    """Nothing here can run it: the kernel's call stands in both directions."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    mesh = make_mesh(**OF_TENSOR)
    stages = models.build(Block, K, implementation="cudnn", dtype=jnp.bfloat16)
    pipe = Pipeline(stages, M, schedule="zb_h1", mesh=mesh, loss_fn=mean)
    x, t = (a.astype(jnp.bfloat16) for a in batch())
    text = str(jax.make_jaxpr(pipe.value_and_grad)(x, t))
    assert "dot_product_attention_fwd" in text
    assert "dot_product_attention_bwd" in text


# --- errors ---


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_what_kernels_do_not_take():
    q = normal(2, 100, 4, 12)
    assert message(attend_slice, q, q, q, None, implementation="splash") == (
        "implementation='splash' for queries float32[2, 100, 4, 12] of [sequences, positions, "
        "heads, head_dim]: head_dim=12 is no multiple of 8 up to 256: choose one; 100 positions "
        "are no multiple of 128: pad sequences to 128; or take implementation='chunked', the "
        "formula, which takes any"
    )
    q = normal(2, 100, 4, 8)
    assert message(attend_slice, q, q, q, None, implementation="cudnn") == (
        "implementation='cudnn' for queries float32[2, 100, 4, 8] of [sequences, positions, "
        "heads, head_dim]: float32 is neither bfloat16 nor float16: give the layer one of these; "
        "or take implementation='chunked', the formula, which takes any"
    )


def test_axes_left_to_the_compiler():
    mesh = make_mesh(**OF_TENSOR)
    run = jax.shard_map(
        lambda q: attend_slice(q, q, q, None, implementation="splash")[0],
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"stage"},
    )
    assert message(jax.eval_shape, run, normal(2, 128, 4, 8)) == (
        "implementation='splash' for queries float32[2, 128, 4, 8] of [sequences, positions, "
        "heads, head_dim]: the mesh axes 'data', 'tensor' are left to the compiler, which cannot "
        "cut a kernel: make them manual; or take implementation='chunked', the formula, which "
        "takes any"
    )


def test_an_unknown_implementation():
    assert message(Attention, 16, 4, 2, nnx.Rngs(0), implementation="flash") == (
        "implementation='flash': must be one of 'splash', 'cudnn', 'xla', 'chunked', or None for "
        "that of the platform"
    )


# --- slices of given lengths ---


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 200])
def test_splash_attention_of_a_slice(window):
    """Slices read the keys of earlier ones; segments cross their borders; two heads read one."""
    lengths, T = (256, 128), 384
    make = np.random.default_rng(0)
    q, k, v, ct = (
        jnp.asarray(make.normal(size=(1, T, heads, 8)), jnp.float32) for heads in (2, 1, 1, 2)
    )
    segments = jnp.asarray(np.repeat([1, 2, 3], (100, 200, 84))[None], jnp.int32)

    def whole(q, k, v):
        options = {"window": window, "implementation": "chunked", "query_chunk": 128}
        y, _ = attend_slice(q, k, v, None, segments=segments, **options)
        return jnp.vdot(y, ct), y

    def sliced(q, k, v):
        parts, earlier, start = [], None, 0
        for n, length in enumerate(lengths):
            own = [x[:, start : start + length] for x in (q, k, v, segments)]
            y, left = attend_slice(
                *own[:3],
                earlier,
                FixedSlice(n, 2, lengths),
                segments=own[3],
                window=window,
                implementation="splash",
            )
            parts.append(y)
            earlier = jax.tree.map(lambda x: jnp.stack([x, jnp.zeros_like(x)]), left)
            start += length
        y = jnp.concatenate(parts, axis=1)
        return jnp.vdot(y, ct), y

    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        for f in (sliced, whole)
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(a, b)


def test_kernels_refuse_slices_whose_number_is_traced():
    x = jnp.zeros((1, 128, 2, 8))
    with pytest.raises(ValueError) as caught:
        attend_slice(x, x, x, None, SequenceSlice(0, 2), implementation="splash")
    assert str(caught.value) == (
        "implementation='splash' with slices of sequences: which keys a query reads depends on the "
        "slice, and the kernel's mask is the same for all; take implementation=None, 'chunked' or "
        "'xla', or for 'splash' slices of given lengths, slices=(t0, t1, ...), whose positions no "
        "axis splits in attention"
    )
    fixed, left = FixedSlice(1, 2, (64, 128)), jnp.zeros((2, *x.shape))
    earlier = {"keys": left, "values": left}
    with pytest.raises(ValueError) as caught:
        attend_slice(x, x, x, earlier, fixed, implementation="splash")
    assert str(caught.value) == (
        "implementation='splash' for queries float32[1, 128, 2, 8] of [sequences, positions, "
        "heads, head_dim]: 64 positions before them are no multiple of 128; or take "
        "implementation='chunked', the formula, which takes any"
    )


@pytest.mark.parametrize("window", [None, 1, 200, 256, 257, 600])
def test_masks_by_blocks_are_those_of_jax(window):
    """Blocks that are all seen or all hidden are told without comparing their positions."""
    splash = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention")
    info = splash.splash_attention_mask_info
    for t, s, start in (1024, 1024, 0), (512, 1024, 512), (256, 768, 300):
        kinds = kernels._quick_masks(), (splash.CausalMask, splash.LocalMask)
        if window is None:
            quick, given = (causal((t, s), start) for causal, _ in kinds)
        else:
            quick, given = (near((t, s), (window - 1, 0), start) for _, near in kinds)
        for process in info.process_mask, info.process_mask_dkv:
            for block in (128, 128), (256, 256):
                found, wanted = (
                    process(splash.MultiHeadMask([mask] * 2), block)[0] for mask in (quick, given)
                )
                for name, mine, theirs in zip(found._fields, found, wanted, strict=True):
                    assert (mine is None) == (theirs is None), name
                    assert mine is None or np.array_equal(mine, theirs), name


def test_chunks_that_do_not_divide_a_slice():
    x = jnp.zeros((1, 6, 2, 8))
    with pytest.raises(ValueError) as caught:
        attend_slice(x, x, x, None, FixedSlice(0, 2, (6, 4)), query_chunk=4)
    assert str(caught.value) == "query_chunk=4: must divide the 6 positions of a slice"
