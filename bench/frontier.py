"""Plans for a frontier model: 535B parameters, 65,536 positions: ``python -m bench.frontier``.

A mixture of experts of the sizes that marin-community/marin#9277 trained on 192 H100 with 1F1B and
host memory. `pipeline.plan` plans it for 192 H100 of 80 GB and for as many v5p, with stashes in
host memory and without. ``--small`` compiles a model of equal ratios on 8 devices instead, and
holds the compiler's bytes against the forecast's: for CPU devices (XLA_FLAGS=
--xla_force_host_platform_device_count=8), or with ``--topology v5p:2x2x2`` by the TPU compiler,
which takes libtpu and no TPU. What is printed stands in docs/frontier.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench import tpu  # before jax
from bench.hlo import host_copies
from bench.measure import table

import jax  # isort: skip
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, plan
from pipeline.insight.forecast.bytes import predict
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.decoders.decoder import build, next_token_loss
from pipeline.models.decoders.experts import ExpertsConfig
from pipeline.planner.costs import Estimate, mfu
from pipeline.planner.experts import ExpertSizes
from pipeline.planner.memory import host_bytes
from pipeline.planner.models import ModelSizes
from pipeline.planner.plans import DoesNotFitError, Plans, short

GB = 10**9
# 48 layers, width 6144, 384 experts, 8 of a token: published. Its experts are 3072 x 3072 behind
# projections of a token to 3072 columns; ours have as many parameters, 6144 x 1536, and the shared
# columns stand for those projections and its shared expert. Heads and vocabulary are assumed.
MODEL = ModelSizes(
    layers=48,
    width=6144,
    heads=48,
    kv_heads=8,
    hidden=6144,
    vocabulary=128256,
    head_width=128,
    experts=ExpertSizes(number=384, top_k=8, hidden=1536, shared=8192),
)
TOKENS, LENGTH, CHIPS = 384 * 65536, 65536, 192
SCHEDULES = ("1f1b", "interleaved_1f1b")
REMAT = (None, "block", "stage")
CHUNK = 2048  # tokens of a rank that are taken to experts at a time


@dataclass(frozen=True)
class Planned:
    """A job's plans.

    Attributes:
      chip: its name.
      length: of a sequence, or of the pieces that it is cut into.
      offload: as `pipeline.plan` takes it.
      found: the plans, or why there are none.
    """

    chip: str
    length: int
    offload: Literal["auto"] | None
    found: Plans | DoesNotFitError

    def rows(self) -> list[list[str]]:
        """A row of the table for each of the best three."""
        allowed = "offload" if self.offload else "no offload"
        name = f"{CHIPS} {self.chip}, {self.length:,} positions, {allowed}"
        if isinstance(self.found, DoesNotFitError):
            least = self.found.least
            return [[name, short(least.layout), *_remat(least), "-", "-", _gb(least.hbm), "-"]]
        job = self.found.job
        return [
            [
                name,
                short(one.layout),
                *_remat(one),
                f"{one.step:.1f}",
                f"{mfu(job, one.step):.1%}",
                _gb(one.hbm),
                _gb(host_bytes(job, one.layout)),
            ]
            for one in self.found.ranked[:3]
        ]


def _remat(one: Estimate) -> list[str]:
    parts = [] if one.layout.offload is None else [f"{one.layout.offload:.0%} of stashes"]
    parts += ["optimizer"] * one.layout.host_optimizer
    return [one.layout.remat or "none", ", ".join(parts) or "-"]


def _gb(size: float) -> str:
    return f"{size / GB:.1f}"


HEADER = ["job", "layout", "again", "on the host", "seconds", "MFU", "HBM, GB", "host, GB"]


def planned(
    chip: str, length: int, offload: Literal["auto"] | None, schedules: Sequence[str]
) -> Planned:
    """Plan the model for a kind of chip, with as many tokens of any length."""
    start = time.perf_counter()
    given: dict[str, Any] = {
        "schedules": schedules,
        "dispatch": ["capacity"],
        "remat": REMAT,
        "chunk": CHUNK,
        "offload": offload,
    }
    found: Plans | DoesNotFitError
    try:
        batch = TOKENS // length
        found = plan(model=MODEL, devices=CHIPS, chip=chip, batch=batch, seq=length, **given)
    except DoesNotFitError as error:
        found = error
    took = time.perf_counter() - start
    print(f"{chip}, {length} positions, planned in {took:.0f} s", file=sys.stderr)
    return Planned(chip, length, offload, found)


# A sixth of the stages, a quarter of the experts' ranks, a 24th of the width and of an expert's
# columns, a 32nd of the length. An expert still gets a 48th of the tokens, a stage has two layers,
# and there are two microbatches for each stage.
SMALL = DecoderConfig(
    vocabulary=5344,
    width=256,
    layers=8,
    heads=2,
    kv_heads=1,
    head_dim=128,
    hidden=256,
    experts=ExpertsConfig(
        number=96,
        top_k=2,
        hidden=64,
        layers=tuple(range(8)),
        shared_hidden=344,
        dispatch="capacity",
    ),
)
SMALL_AXES, SMALL_LENGTH, SMALL_MICROBATCHES = {"expert": 2, "stage": 4}, 2048, 8
KINDS = {
    "nothing computed again": {"remat": None},
    "half of the stashes on the host": {"remat": None, "offload": 0.5},
    "all stashes on the host": {"remat": None, "offload": "stash"},
    "stages computed again": {"remat": "stage"},
    "stages again, their inputs on the host": {"remat": "stage", "offload": "stash"},
}
MIB = 2**20
SMALL_HEADER = [
    "1f1b",
    "temporaries, MiB",
    "predicted",
    "on the host",
    "predicted",
    "pairs of copies",
    "of them beside work",
]


def small(topology: str | None, names: Sequence[str]) -> list[list[str]]:
    """Rows of the small model, compiled with stashes here and there."""
    if topology is None:
        devices = jax.devices()[:8]
    else:
        tpu.prepare()
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        devices = slice_.devices
    mesh = make_mesh(devices=devices, **SMALL_AXES)
    stages, embed, head = build(SMALL, [2] * 4, activations=jnp.bfloat16)
    words = jax.ShapeDtypeStruct((SMALL_MICROBATCHES * 2, SMALL_LENGTH), jnp.int32)
    rows = []
    for name in names:
        options = KINDS[name]
        pipe = Pipeline(
            stages,
            SMALL_MICROBATCHES,
            schedule="1f1b",
            mesh=mesh,
            embed=embed,
            head=head,
            loss_fn=next_token_loss,
            batch=P(("data", "expert")),
            **options,
        )
        compiled = pipe.lower(words, words).compile()
        said = compiled.memory_analysis()
        found = predict(pipe.plan, *pipe.plan.facts.last)
        own = said.temp_size_in_bytes, found.temporaries
        host = getattr(said, "host_temp_size_in_bytes", 0), found.host
        pairs = host_copies(compiled.as_text() or "")
        rows.append([name, *(f"{n / MIB:.1f}" for n in (*own, *host)), *map(str, pairs)])
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Print the table of plans."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=["h100", "v5p"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[LENGTH])
    parser.add_argument("--offload", nargs="+", choices=["none", "auto"], default=["none", "auto"])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--small", action="store_true", help="compile a model of equal ratios")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--topology", help="of the small model: a slice of 8 chips")
    options = parser.parse_args()
    if options.small:
        print(f"jax {jax.__version__}, {options.topology or 'CPU'}")
        print(table(SMALL_HEADER, small(options.topology, options.kinds)))
        return
    done = [
        planned(chip, length, None if offload == "none" else "auto", options.schedules)
        for length in options.lengths
        for chip in options.chips
        for offload in options.offload
    ]
    rows = [row for one in done for row in one.rows()]
    print(table(HEADER, rows))
    for one in done:
        print()
        print(one.found)


if __name__ == "__main__":
    main()
