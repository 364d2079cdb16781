"""Sizes of the blocks of positions in splash attention, by length and chip.

No TPU was available to time them. The choice follows the sizes that MaxText publishes with measured
steps (bench/notes/tpu.md), as far as they compile without a compiler flag.

* Large blocks read keys and values from HBM less often and start fewer steps of the grid. But a
  causal mask skips whole blocks only: with blocks of s positions, 1 + s / t of the products of a
  mask without blocks are computed.
* The fused backward makes 5 products, two kernels make 7. It writes t / s parts of the queries'
  gradient, which are then added: cheap with few parts, expensive with many.
* Blocks are in VMEM, and so are their scores in float32. A v6e gives a kernel 32 MiB by default,
  the other TPUs 16.

Letters: t = positions, c = width of a head, s = positions of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        """Return the arguments of JAX's `BlockSizes`."""
        found: dict[str, Any] = {
            "block_q": self.q,
            "block_kv": self.kv,
            "block_kv_compute": min(self.kv, self.compute),
            "block_q_dkv": self.q_backward,
            "block_kv_dkv": self.kv_backward,
            "block_kv_dkv_compute": min(self.kv_backward, self.compute),
            "use_fused_bwd_kernel": self.fused,
        }
        if self.fused:
            return found
        return {**found, "block_q_dq": self.q_backward, "block_kv_dq": self.kv_backward}


# By a part of JAX's name for the kind of device: the least number of positions, and its blocks.
# v6e: Llama 3.1 8B and 70B at 8192 positions, and Llama 2 70B and Mixtral at 4096. They form 2048
# scores of a query at a time; half as many need no flag. v5p and others: small blocks, as in the
# recipe of Llama 2 70B, because no larger blocks were measured there.
TABLE: dict[str, tuple[tuple[int, SplashBlocks], ...]] = {
    "TPU v6 lite": (
        (8192, SplashBlocks(2048, 2048, 2048, 2048, compute=1024, fused=True)),
        (4096, SplashBlocks(1024, 512, 2048, 512, compute=512)),
    ),
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
