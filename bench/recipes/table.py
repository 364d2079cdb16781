"""The published recipes and what was measured with them.

Values come from AI-Hypercomputer/tpu-recipes at c8cfe2f (README files of the recipes, with their
logs) and AI-Hypercomputer/maxtext (benchmarks/maxtext_trillium_model_configs.py and
maxtext_v5p_model_configs.py, docs/reference/models/tiering.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Groups of compiler flags that recipes combine.
VMEM = {"xla_tpu_scoped_vmem_limit_kib": "98304"}
VMEM_EXPERTS = {"xla_tpu_scoped_vmem_limit_kib": "81920"}
FUSED_GATHERS = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}
SCATTER_LAYOUT = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    "xla_tpu_assign_all_reduce_scatter_layout": "true",
}
DATA_OVERLAP = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "xla_tpu_data_parallel_opt_different_sized_ops": "true",
}
SPARSECORE_REDUCE = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "false",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_all_reduce_offload_tracing": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disjoint_spmem": "false",
    "xla_sc_disable_megacore_partitioning": "true",
}
HOST_OFFLOAD = {
    "xla_tpu_enable_all_experimental_scheduler_features": "true",
    "xla_tpu_enable_scheduler_memory_pressure_tracking": "true",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_tpu_aggressive_opt_barrier_removal": "ENABLED",
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_enable_ag_backward_pipelining": "true",
    "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
    "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    "xla_max_concurrent_host_send_recv": "100",
    "xla_tpu_scheduler_percent_shared_memory_limit": "100",
    "xla_latency_hiding_scheduler_rerun": "2",
}
NO_COLLECTIVE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}

QKV = ("query_proj", "key_proj", "value_proj")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder with RMSNorm, rotary positions, grouped queries and SwiGLU.

    Attributes:
      width: d; layers: their number; hidden: columns of an MLP or of an expert; vocab: words.
      heads: of queries, each `head` wide; groups: heads of keys and values.
      experts: per layer, 0 for a dense MLP; top: experts of a token.
    """

    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocab: int
    head: int = 128
    experts: int = 0
    top: int = 1

    @property
    def active(self) -> int:
        """Weights that multiply a token: without the lookup, with `top` experts."""
        projections = self.width * self.head * 2 * (self.heads + self.groups)
        mlp = 3 * self.width * self.hidden * self.top + self.width * self.experts
        return self.layers * (projections + mlp) + self.vocab * self.width


@dataclass(frozen=True)
class Recipe:
    """A published training recipe and its measurement.

    Attributes:
      sizes: of the model; length: positions of a sequence.
      topology: of the slice; axes: of the mesh, "data" and "expert".
      rows: sequences of a chip.
      measured: tokens a second and chip, as published; NaN where nothing was.
      saved, offloaded: names of activations that are kept on the chip or in host memory. All others
        are computed again. ``dots``: all products without batch dims are kept.
      blocks: of splash attention, `BlockSizes` by name; fused: one kernel for all gradients.
      flags: of the compiler.
      weights: dtype of parameters and of Adam's first moment.
      capacity: factor of a capacity dispatch.
      fitted: whether the kernels' efficiency was fitted with this row.
    """

    sizes: Sizes
    topology: str
    axes: Mapping[str, int]
    rows: int
    length: int
    measured: float
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    dots: bool = False
    blocks: Mapping[str, int] = field(default_factory=dict)
    fused: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)
    weights: str = "float32"
    capacity: float = 1.25
    fitted: bool = False

    @property
    def chips(self) -> int:
        """Chips of the slice."""
        return self.axes["data"] * self.axes.get("expert", 1)

    def operations(self) -> float:
        """Operations of a token's loss and gradient, half of the scores masked."""
        s = self.sizes
        attention = 2 * s.layers * self.length * s.heads * s.head
        return 3.0 * (2 * s.active + attention)


LLAMA_8B = Sizes(4096, 32, 32, 8, 14336, 128256)
LLAMA_70B = Sizes(8192, 80, 64, 8, 28672, 128256)
LLAMA_405B = Sizes(16384, 126, 128, 8, 53248, 128256)
LLAMA2_70B = Sizes(8192, 80, 64, 8, 28672, 32000)
MIXTRAL_8X7B = Sizes(4096, 32, 32, 8, 14336, 32000, experts=8, top=2)
MIXTRAL_8X22B = Sizes(6144, 56, 48, 8, 16384, 32768, experts=8, top=2)

WIDE = dict.fromkeys(
    ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"), 2048
)
TALL = {"q": 1024, "q_dkv": 2048, "q_dq": 2048}  # the others are 512
TALLER = {"q": 2048, "q_dkv": 2048, "q_dq": 2048}
DENSE_FLAGS = {**VMEM, **SCATTER_LAYOUT, **DATA_OVERLAP, **FUSED_GATHERS}
EXPERT_FLAGS = {**VMEM_EXPERTS, **FUSED_GATHERS, **DATA_OVERLAP}
_8B = Recipe(
    LLAMA_8B,
    "v6e:16x16",
    {"data": 256},
    rows=4,
    length=8192,
    measured=7207.3,
    offloaded=("decoder_layer_input", "out_proj", *QKV),
    blocks=WIDE,
    fused=True,
    flags={**DENSE_FLAGS, **SPARSECORE_REDUCE, **HOST_OFFLOAD},
    fitted=True,
)
_70B = Recipe(
    LLAMA_70B,
    "v6e:16x16",
    {"data": 256},
    rows=5,
    length=8192,
    measured=960.2,
    offloaded=("decoder_layer_input", *QKV),
    blocks=WIDE,
    fused=True,
    flags={**DENSE_FLAGS, **HOST_OFFLOAD},
)
RECIPES = {
    "llama3.1-8b-v6e-256": _8B,
    "llama3.1-70b-v6e-256": _70B,
    "llama3.1-405b-v6e-256": Recipe(
        LLAMA_405B,
        "v6e:16x16",
        {"data": 256},
        rows=1,
        length=8192,
        measured=123,
        offloaded=("decoder_layer_input",),
        blocks=TALL,
        flags={**VMEM, **FUSED_GATHERS, **HOST_OFFLOAD},
    ),
    "llama2-70b-v5p-512": Recipe(
        LLAMA2_70B,
        "v5p:8x8x8",
        {"data": 512},
        rows=4,
        length=4096,
        measured=692,
        saved=(*QKV, "out_proj", "mlpwo"),
        flags={**DATA_OVERLAP, **FUSED_GATHERS},
        fitted=True,
    ),
    "llama2-70b-v6e-256": Recipe(
        LLAMA2_70B,
        "v6e:16x16",
        {"data": 256},
        rows=3,
        length=4096,
        measured=905.0,
        offloaded=QKV,
        blocks=TALL,
        flags={**VMEM, **FUSED_GATHERS, **SPARSECORE_REDUCE},
    ),
    "llama3.1-405b-v5p-512": Recipe(
        LLAMA_405B,
        "v5p:8x8x8",
        {"data": 512},
        rows=2,
        length=8192,
        measured=124.6,
        offloaded=("context", "mlpwo"),
        blocks=WIDE,
        flags={**VMEM, **FUSED_GATHERS, **HOST_OFFLOAD},
    ),
    "llama3.1-8b-v6e-64": dataclasses.replace(
        _8B, topology="v6e:8x8", axes={"data": 64}, rows=5, measured=7247.1, fitted=False
    ),
    "llama3.1-8b-v6e-8": dataclasses.replace(
        _8B,
        topology="v6e:2x4",
        axes={"data": 8},
        rows=3,
        measured=7138.9,
        flags={**_8B.flags, **NO_COLLECTIVE_PRODUCTS},
        fitted=False,
    ),
    "llama3.1-70b-v6e-128": dataclasses.replace(
        _70B, topology="v6e:8x16", axes={"data": 128}, rows=4, measured=942.0
    ),
    "llama3.1-70b-v6e-64": dataclasses.replace(
        _70B, topology="v6e:8x8", axes={"data": 64}, rows=2, measured=876.7
    ),
    "llama3.1-70b-v6e-32": dataclasses.replace(
        _70B,
        topology="v6e:4x8",
        axes={"data": 32},
        rows=2,
        measured=921.0,
        flags={**_70B.flags, **NO_COLLECTIVE_PRODUCTS},
        weights="bfloat16",
    ),
    "mixtral-8x7b-v6e-256": Recipe(
        MIXTRAL_8X7B,
        "v6e:16x16",
        {"data": 256},
        rows=12,
        length=4096,
        measured=3645.2,
        offloaded=("decoder_layer_input", "out_proj", *QKV),
        blocks=TALLER,
        flags=EXPERT_FLAGS,
    ),
    "mixtral-8x22b-v6e-256": Recipe(
        MIXTRAL_8X22B,
        "v6e:16x16",
        {"data": 64, "expert": 4},
        rows=8,
        length=4096,
        measured=1326.3,
        offloaded=("decoder_layer_input", "out_proj", *QKV),
        blocks=TALLER,
        flags=EXPERT_FLAGS,
        weights="bfloat16",
    ),
}

_V5P = RECIPES["llama2-70b-v5p-512"]


def _job(recipe: Recipe, topology: str, chips: int, rows: int, **changes: Any) -> Recipe:
    """A recipe on a job that was not measured."""
    given = {"topology": topology, "axes": {"data": chips}, "rows": rows, "length": 8192}
    given |= {"measured": math.nan, "fitted": False}
    return dataclasses.replace(recipe, **given, **changes)


# The jobs of the tables of steps in docs/tpu.md, with the freedom of the recipes. On 64 v5p there
# is room for attention's results too, and for the gate of the MLP.
_KEPT = (*_V5P.saved, "context", "mlpwi_0")
JOBS = {
    "8B-v5p-job": _job(_V5P, "v5p:4x4x4", 64, 4, sizes=LLAMA_8B, saved=_KEPT),
    "70B-v5p-job": _job(_V5P, "v5p:8x8x8", 512, 2, sizes=LLAMA_70B),
    "8B-v6e-job": _job(_8B, "v6e:8x8", 64, 4),
    "70B-v6e-job": _job(_70B, "v6e:16x16", 256, 4),
}
ALL = {**RECIPES, **JOBS}
