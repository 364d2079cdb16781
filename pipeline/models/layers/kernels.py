"""Attention by a platform's kernel: the choice of the kernel, and its calls.

A kernel never forms the scores of all pairs of positions. On TPUs it is JAX's splash attention, in
Pallas, which skips blocks that the causal mask hides. On NVIDIA GPUs it is cuDNN's kernel.

Letters: b = sequences, t = positions, c = width of a head, k = heads of keys and values, g = heads
of queries for each of them; only heads of this device count.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from collectives import local
from collectives.compat import device_kind, has_cudnn, platform
from pipeline.models.layers.attending.blocks import SMALL, SplashBlocks, choose_blocks
from pipeline.models.layers.attending.formula import Implementation

# The name for `jax.checkpoint_policies` of what splash attention's backward reads of its forward.
RESIDUALS = "attention_residuals"
OPERANDS = "attention_operands"  # the name of the kernel's queries, keys and values
LEAST = SMALL[-1]  # splash attention takes multiples of this number of positions
WIDEST = 256  # c; wider blocks fill a TPU's VMEM, and cuDNN refuses them
WIDEST_BEFORE_HOPPER = 128
REMEDY = "or take implementation='chunked', the formula, which takes any"


def choose(q: jax.Array, *, softcap: float | None = None, start: int = 0) -> Implementation:
    """Choose the implementation for the traced platform and for queries `[b, t, k·g, c]`.

    Queries that begin at place ``start``, after the places of earlier keys, can use only splash.

    The platform is the platform of the mesh; the devices of the mesh may be unavailable. A compiler
    cannot cut a kernel into parts. So the formula is chosen if mesh axes are left to the compiler,
    or if there are several devices and no mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and jax.device_count() > 1:
        return "chunked"
    on, c = platform(), q.shape[-1]
    if on == "tpu" and not _wrong_for_splash(q, start):
        return "splash"
    if start:
        return "chunked"
    # Described GPUs have the name of their runtime as platform, real GPUs do not.
    on_gpu = on in ("gpu", "cuda")
    takes = on_gpu and c <= WIDEST_BEFORE_HOPPER and not _wrong_for_cudnn(q, softcap)
    if takes and has_cudnn():
        return "cudnn"
    return "chunked"


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    blocks: SplashBlocks | None = None,
    start: int = 0,
    segments_of_keys: jax.Array | None = None,
) -> jax.Array:
    """Compute causal attention by splash attention, `[b, t, k·g, c]`; interpreted without a TPU.

    Args:
      q: queries, `[b, t, k·g, c]`.
      k: keys, `[b, s, k, c]`, of places 0..s-1.
      v: values, `[b, s, k, c]`.
      segments: `[b, t]` integers; a query reads keys of its own segment.
      window: the number of positions that a query reads; None for all positions before it.
      softcap: the cap of the scores, if any.
      blocks: the blocks of positions; by default the blocks for the length and the chip.
      start: the place of the first query.
      segments_of_keys: `[b, s]`, if keys have other positions than the queries.

    Raises:
      ValueError: sizes that the kernel does not support, or a mesh with axes left to the compiler.
    """
    _check("splash", q, _wrong_for_splash(q, start))
    interpret = platform() != "tpu"
    _, t, heads, c = q.shape
    of_keys = segments if segments_of_keys is None else segments_of_keys

    def heads_first(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        return [jnp.swapaxes(x, 1, 2) for x in (q * c**-0.5, k, v)]

    # `local` contains only the kernel, so that its backward reads the kernel's arguments and
    # results.
    # These are kept once, and a policy of `jax.checkpoint` may keep them (`RESIDUALS`). The
    # arguments
    # are `local` too, so that a stage keeps them and not the values they could be recomputed from.
    arguments = [checkpoint_name(x, OPERANDS) for x in local(heads_first)(q, k, v)]
    sizes = t, k.shape[1], start
    # Blocks of queries and of keys have equal sizes, which divide both numbers of positions.
    common = math.gcd(t, k.shape[1])
    blocks = blocks or choose_blocks(device_kind(), common, c, q.dtype.itemsize, window)
    run = _kernel(heads, *sizes, blocks, window=window, softcap=softcap, interpret=interpret)
    own = () if segments is None else (segments, of_keys)
    y = local(jax.vmap(run))(*arguments, *own)
    return jnp.swapaxes(y, 1, 2)


def _kernel(
    heads: int,
    t: int,
    s: int,
    start: int,
    blocks: SplashBlocks,
    *,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> Any:
    """Make splash attention of one sequence: a function of queries, keys, values and segments."""
    # Importing Pallas takes half a second, so it is imported only here.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        MultiHeadMask,
        SegmentIds,
        make_splash_mha_single_device,
    )

    mask = _mask(t, s, window, start)
    kernel = make_splash_mha_single_device(
        MultiHeadMask([mask] * heads),
        block_sizes=BlockSizes(**blocks.sizes()),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        ids = SegmentIds(*segments) if segments else None
        found: jax.Array = kernel(q, k, v, ids)
        return found

    return run


def _mask(t: int, s: int, window: int | None, start: int) -> Any:
    """Make the causal mask of t queries, the first at place ``start`` of s keys, or a window."""
    whole, near = _quick_masks()
    if window is None:
        return whole((t, s), start)
    return near((t, s), (window - 1, 0), start)


@functools.cache
def _quick_masks() -> tuple[Any, Any]:
    """Make causal and local masks that compare no positions of blocks all visible or all hidden.

    Splash attention reads every block of the mask while it is traced. For 131,072 positions, JAX's
    own masks compare 1.7e10 pairs several times, which takes a minute of a core each.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        CausalMask,
        LocalMask,
    )

    def of_block(mask: Any, index: Any, window: int | None) -> bool | None:
        """Return True if a block is all visible, False if all hidden, else None."""
        rows, columns = (range(n)[part] for n, part in zip(mask.shape, index, strict=True))
        if not rows or not columns:
            return None
        nearest = rows[0] + mask.offset - columns[-1]
        farthest = rows[-1] + mask.offset - columns[0]
        if farthest < 0 or (window is not None and nearest >= window):
            return False
        return True if nearest >= 0 and (window is None or farthest < window) else None

    class Whole(CausalMask):
        def __getitem__(self, index: Any) -> Any:
            seen = of_block(self, index, None)
            return super().__getitem__(index) if seen is None else np.full((1, 1), seen)

        __hash__ = CausalMask.__hash__

    class Near(LocalMask):
        def __getitem__(self, index: Any) -> Any:
            left, _ = self.window_size
            seen = of_block(self, index, None if left is None else left + 1)
            return super().__getitem__(index) if seen is None else np.full((1, 1), seen)

        __hash__ = LocalMask.__hash__

    return Whole, Near


def cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute causal attention by cuDNN; the arguments are those of `splash`.

    Segments become a mask `[b, 1, t, t]`, which cuDNN reads in addition to its causal blocks.

    Raises:
      ValueError: an error of `splash`, a dtype other than bfloat16 and float16, or a soft cap.
    """
    _check("cudnn", q, _wrong_for_cudnn(q, softcap))
    reach: Any = None if window is None else (window - 1, 0)

    def on_this_device(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        mask = None
        if segments:
            (ids,) = segments
            mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=True,
            local_window_size=reach,
            implementation="cudnn",
        )

    return local(on_this_device)(q, k, v, *(() if segments is None else (segments,)))


def _check(name: str, q: jax.Array, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(
            f"implementation={name!r} for queries {q.dtype}{list(q.shape)} of [sequences, "
            f"positions, heads, head_dim]: {'; '.join(wrong)}; {REMEDY}"
        )


def _wrong_for_splash(q: jax.Array, start: int = 0) -> list[str]:
    t, wrong = q.shape[1], _wrong_for_any(q)
    if start % LEAST:
        wrong.append(f"{start} positions before them are no multiple of {LEAST}")
    if t % LEAST:
        wrong.append(f"{t} positions are no multiple of {LEAST}: pad sequences to {t + -t % LEAST}")
    return wrong


def check_softcap(name: str, q: jax.Array, softcap: float | None) -> None:
    """Refuse a soft cap for an implementation that does not support it.

    Raises:
      ValueError: there is a soft cap.
    """
    _check(name, q, _capped(softcap))


def _capped(softcap: float | None) -> list[str]:
    return [] if softcap is None else [f"it caps no scores, and softcap={softcap}"]


def _wrong_for_cudnn(q: jax.Array, softcap: float | None) -> list[str]:
    wrong = _wrong_for_any(q) + _capped(softcap)
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
