"""Sizes of the blocks in which splash attention takes positions, by length and chip.

No TPU was at hand to time them. The choice follows the sizes that MaxText publishes with measured
steps (bench/notes/tpu.md), and sizes that compile without a flag, whoever compiles the step.

* Large blocks read keys and values from HBM less often and start fewer steps of the grid. But a
  causal mask passes over whole blocks only: blocks of s positions make 1 + s / t of the products
  that a mask without blocks would leave.
* The fused backward makes 5 products where two kernels make 7. It writes t / s parts of the
  queries' gradient, which are then added: cheap with few parts, and dear with many.
* Blocks lie in VMEM, and so do their scores in float32. A v6e gives a kernel 32 MiB by default, the
  other TPUs 16.

Letters: t = positions, c = width of a head, s = positions of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALL = (512, 256, 128)  # compile for every TPU, dtype and width of a head
NARROW = 128  # c, up to which large blocks fit


@dataclass(frozen=True)
class SplashBlocks:
    """Positions of each block.

    Attributes:
      q, kv: queries, and keys and values, that the forward takes at a time.
      q_backward, kv_backward: that the kernels of the backward take.
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
        """The arguments of JAX's `BlockSizes`."""
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


# By a part of the name that JAX gives a kind of device: from how many positions on, which blocks.
# v6e: Llama 3.1 8B and 70B at 8192 positions, and Llama 2 70B and Mixtral at 4096. They form 2048
# scores of a query at a time; half of it needs no flag. v5p and others: small blocks, as in the
# recipe of Llama 2 70B, because nothing larger was measured beside them.
TABLE: dict[str, tuple[tuple[int, SplashBlocks], ...]] = {
    "TPU v6 lite": (
        (8192, SplashBlocks(2048, 2048, 2048, 2048, compute=1024, fused=True)),
        (4096, SplashBlocks(1024, 512, 2048, 512, compute=512)),
    ),
}


def choose_blocks(kind: str, t: int, c: int, bytes_each: int, window: int | None) -> SplashBlocks:
    """The blocks of splash attention for a kind of device.

    Args:
      kind: as JAX names it, such as "TPU v6 lite".
      t: positions, a multiple of the least of `SMALL`.
      c: width of a head.
      bytes_each: bytes of one entry of queries, keys and values.
      window: positions that a query reads, None for all before it. Blocks are small beside one,
        because only whole blocks beyond a window are passed over.
    """
    rows = next((rows for name, rows in TABLE.items() if name in kind), ())
    if c <= NARROW and bytes_each <= 2 and window is None:
        for least, blocks in rows:
            if t >= least and t % max(blocks.q_backward, blocks.kv_backward) == 0:
                return blocks
    s = next(size for size in SMALL if t % size == 0)
    return SplashBlocks(s, s, s, s, compute=s)
