"""Attention by the kernel of a platform: which one takes what it is given.

A kernel never forms the scores of all pairs of positions. On TPUs it is the splash attention that
comes with JAX, in Pallas, which passes over what a causal mask hides; on NVIDIA GPUs that of cuDNN.

Letters: b = sequences, t = positions, c = width of a head, k = heads of keys and values, g = heads
of queries for each of them, all of them this device's.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from collectives import local
from collectives.compat import has_cudnn, platform

Implementation = Literal["splash", "cudnn", "xla", "chunked"]
NAMES = ("splash", "cudnn", "xla", "chunked")
# What splash attention's backward reads of its forward, to `jax.checkpoint_policies`.
RESIDUALS = "attention_residuals"
BLOCKS = (512, 256, 128)  # positions that splash attention takes at a time; larger ones fill VMEM
WIDEST = 256  # c; beyond, blocks fill a TPU's VMEM, and cuDNN takes none
WIDEST_BEFORE_HOPPER = 128
REMEDY = "or take implementation='chunked', the formula, which takes any"


def check_name(implementation: Any) -> None:
    """Refuse what is no implementation.

    Raises:
      ValueError: so.
    """
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation={implementation!r}: must be one of {', '.join(map(repr, NAMES))}, or "
            f"None for that of the platform"
        )


def choose(q: jax.Array) -> Implementation:
    """The implementation for the platform that is traced for, and for queries `[b, t, k·g, c]`.

    The platform is that of the mesh, which may be of devices that are not there. A compiler cannot
    cut a kernel into parts: with mesh axes left to it, or without a mesh among several devices, it
    is given the formula.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and jax.device_count() > 1:
        return "chunked"
    on, c = platform(), q.shape[-1]
    if on == "tpu" and not _wrong_for_splash(q):
        return "splash"
    # Described GPUs call themselves by their runtime, those that are there do not.
    on_gpu = on in ("gpu", "cuda")
    if on_gpu and c <= WIDEST_BEFORE_HOPPER and not _wrong_for_cudnn(q) and has_cudnn():
        return "cudnn"
    return "chunked"


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by JAX's splash attention, `[b, t, k·g, c]`; interpreted where no TPU is.

    Args:
      q: queries, `[b, t, k·g, c]`.
      k: keys, `[b, t, k, c]`.
      v: values, the same.

    Raises:
      ValueError: sizes that the kernel does not take, or a mesh with axes left to the compiler.
    """
    _check("splash", q, _wrong_for_splash(q))
    interpret = platform() != "tpu"
    _, t, heads, c = q.shape

    def heads_first(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        return [jnp.swapaxes(x, 1, 2) for x in (q * c**-0.5, k, v)]

    # The kernel by itself, so that its backward reads its arguments and what it gives: that is kept
    # once, and a policy of `jax.checkpoint` may spare it a second time (`RESIDUALS`). Its arguments
    # are `local` too: a stage keeps them as they are here, not what they could be made of again.
    arguments = local(heads_first)(q, k, v)
    y = local(jax.vmap(_kernel(heads, t, interpret=interpret)))(*arguments)
    return jnp.swapaxes(y, 1, 2)


def _kernel(heads: int, t: int, *, interpret: bool) -> Any:
    # Pallas takes half a second to import, and only those need it who come here.
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        BlockSizes,
        CausalMask,
        MultiHeadMask,
        make_splash_mha_single_device,
    )

    block = next(size for size in BLOCKS if t % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    return make_splash_mha_single_device(
        MultiHeadMask([CausalMask((t, t))] * heads),
        block_sizes=BlockSizes(**sizes),
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute attention by cuDNN.

    Raises:
      ValueError: as for `splash`, or a dtype other than bfloat16 and float16.
    """
    _check("cudnn", q, _wrong_for_cudnn(q))

    def on_this_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    return local(on_this_device)(q, k, v)


def _check(name: str, q: jax.Array, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(
            f"implementation={name!r} for queries {q.dtype}{list(q.shape)} of [sequences, "
            f"positions, heads, head_dim]: {'; '.join(wrong)}; {REMEDY}"
        )


def _wrong_for_splash(q: jax.Array) -> list[str]:
    t, wrong = q.shape[1], _wrong_for_any(q)
    if t % BLOCKS[-1]:
        wrong.append(
            f"{t} positions are no multiple of {BLOCKS[-1]}: pad sequences to {t + -t % BLOCKS[-1]}"
        )
    return wrong


def _wrong_for_cudnn(q: jax.Array) -> list[str]:
    wrong = _wrong_for_any(q)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        wrong.append(f"{q.dtype} is neither bfloat16 nor float16: give the layer one of these")
    return wrong


def _wrong_for_any(q: jax.Array) -> list[str]:
    mesh, c = jax.sharding.get_abstract_mesh(), q.shape[-1]
    loose = [
        axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1
    ]
    wrong = []
    if c % 8 or c > WIDEST:
        wrong.append(f"head_dim={c} is no multiple of 8 up to {WIDEST}: choose one")
    if loose:
        wrong.append(
            f"the mesh axes {', '.join(map(repr, loose))} are left to the compiler, which cannot "
            f"cut a kernel: make them manual"
        )
    return wrong
