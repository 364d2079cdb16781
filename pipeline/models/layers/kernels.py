"""Attention by a platform's kernel: the choice of the kernel, and its calls.

A kernel never forms the scores of all pairs of positions. On TPUs it is JAX's splash attention, in
Pallas, which skips blocks that the causal mask hides. On NVIDIA GPUs it is cuDNN's kernel.

No TPU was available to time sizes of splash attention's blocks. The choice follows the sizes that
MaxText publishes with measured steps (bench/notes/tpu.md), as far as they compile without a
compiler flag.

* Large blocks read keys and values from HBM less often and start fewer steps of the grid. But a
  causal mask skips whole blocks only: with blocks of s positions, 1 + s / t of the products of a
  mask without blocks are computed.
* The fused backward makes 5 products, two kernels make 7. It writes t / s parts of the queries'
  gradient, which are then added: cheap with few parts, expensive with many.
* Blocks are in VMEM, and so are their scores in float32. A v6e gives a kernel 32 MiB by default,
  the other TPUs 16.

Letters: b = sequences, t = positions, c = width of a head, k = heads of keys and values, g = heads
of queries for each of them, s = positions of a block; only heads of this device count.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from collectives import local
from collectives.compat import device_kind, has_cudnn, platform
from pipeline.models.layers.attending.formula import Implementation

SMALL = (512, 256, 128)  # these compile for every TPU, dtype and width of a head
NARROW = 128  # the largest c for which large blocks fit


@dataclass(frozen=True)
class SplashBlocks:
    """The number of positions in each block.

    Attributes:
      q, kv: queries, and keys and values, in a block of the forward.
      q_backward, kv_backward: queries, and keys and values, in a block of the backward's kernels.
      compute: the most keys whose scores are formed at a time.
      fused: whether one kernel makes all gradients.
    """

    q: int
    kv: int
    q_backward: int
    kv_backward: int
    compute: int
    fused: bool = False

    def sizes(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {
            "block_q": self.q,
            "block_kv": self.kv,
            "block_kv_compute": min(self.kv, self.compute),
            "block_q_dkv": self.q_backward,
            "block_kv_dkv": self.kv_backward,
            "block_kv_dkv_compute": min(self.kv_backward, self.compute),
            "use_fused_bwd_kernel": self.fused,
        }
        if self.fused:
            return sizes
        return {**sizes, "block_q_dq": self.q_backward, "block_kv_dq": self.kv_backward}


# By a part of JAX's name for the kind of device: the least number of positions, and its blocks.
# v6e: Llama 3.1 8B and 70B at 8192 positions, and Llama 2 70B and Mixtral at 4096. They form 2048
# scores of a query at a time; half as many need no flag. v5p and others: small blocks, as in the
# recipe of Llama 2 70B, because no larger blocks were measured there.
TABLE: dict[str, tuple[tuple[int, SplashBlocks], ...]] = {
    "TPU v6 lite": (
        (8192, SplashBlocks(2048, 2048, 2048, 2048, compute=1024, fused=True)),
        (4096, SplashBlocks(1024, 512, 2048, 512, compute=512)),
    )
}


def choose_blocks(kind: str, t: int, c: int, bytes_each: int, window: int | None) -> SplashBlocks:
    """Choose the blocks of splash attention for a kind of device.

    Args:
      kind: JAX's name, such as "TPU v6 lite".
      t: positions, a multiple of the smallest size in `SMALL`.
      c: width of a head.
      bytes_each: bytes of one entry of queries, keys and values.
      window: positions that a query reads, None for all. With a window blocks are small, because
        only whole blocks outside of the window are skipped.
    """
    rows = next((rows for name, rows in TABLE.items() if name in kind), ())
    if c <= NARROW and bytes_each <= 2 and window is None:
        for least, blocks in rows:
            if t >= least and t % max(blocks.q_backward, blocks.kv_backward) == 0:
                return blocks
    s = next(size for size in SMALL if t % size == 0)
    return SplashBlocks(s, s, s, s, compute=s)


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
    # Blocks of queries and of keys have equal sizes, which divide both numbers of positions.
    common = math.gcd(t, k.shape[1])
    blocks = blocks or choose_blocks(device_kind(), common, c, q.dtype.itemsize, window)
    # Importing Pallas takes half a second, so it is imported only here.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    causal, near = _quick_masks()
    sizes = t, k.shape[1]
    mask = causal(sizes, start) if window is None else near(sizes, (window - 1, 0), start)
    kernel = pallas.make_splash_mha_single_device(
        pallas.MultiHeadMask([mask] * heads),
        block_sizes=pallas.BlockSizes(**blocks.sizes()),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=RESIDUALS,
        interpret=interpret,
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
        y: jax.Array = kernel(q, k, v, pallas.SegmentIds(*segments) if segments else None)
        return y

    own = () if segments is None else (segments, of_keys)
    y = local(jax.vmap(run))(*arguments, *own)
    return jnp.swapaxes(y, 1, 2)


@functools.cache
def _quick_masks() -> tuple[Any, Any]:
    """Make causal and local masks that compare no positions of blocks all visible or all hidden.

    Splash attention reads every block of the mask while it is traced. For 131,072 positions, JAX's
    own masks compare 1.7e10 pairs several times, which takes a minute of a core each.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask, LocalMask

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
    """Compute causal attention by cuDNN; `splash` explains the arguments.

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
            q, k, v, mask=mask, is_causal=True, local_window_size=reach, implementation="cudnn"
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
    """Refuse a soft cap for an implementation that does not support it."""
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
