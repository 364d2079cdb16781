"""Time of a recipe's step from its compiled program, beside the published measurement.

`pipeline.insight.calibrate.cycles` counts fusions by the compiler's cycles, collectives by their
bytes, and attention kernels by their operations at an assumed efficiency. Kernels are counted apart
here, so that `fit` can choose the efficiency with which fitted rows have the least error.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.hlo import with_link
from bench.recipes.model import lower, mesh_of
from bench.recipes.table import ALL, HOST_OFFLOAD, Recipe

import jax  # isort: skip

from pipeline.insight.calibrate.compiled import find_slice, machine_of
from pipeline.insight.calibrate.cycles import EFFICIENCY, ONCE, Scope, cycles

_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
# This compiler refuses to fuse all-gathers with products on any chip but v5e. The scheduler's flags
# for host transfers change no cycles of fusions, and with them 8B did not compile in five minutes
# of a core.
REFUSED = ("v6e", "v5p")
FUSING = "xla_tpu_enable_async_collective_fusion"
TRIED = [n / 100 for n in range(20, 101)]


@dataclass(frozen=True)
class Predicted:
    """The parts of a recipe's step by its compiler.

    Attributes:
      name: of the recipe.
      fusions, waits, sent: seconds of fusions, of waits for collectives, and of all collectives.
      kernels: seconds of Pallas kernels at the chip's peak.
      hbm: bytes of a chip; left: flags that this compiler does not take.
    """

    name: str
    fusions: float
    kernels: float
    waits: float
    sent: float
    hbm: int
    left: tuple[str, ...] = ()

    def seconds(self, efficiency: float) -> float:
        """The duration of a step whose kernels reach so much of the peak."""
        return self.fusions + self.waits + self.kernels / efficiency

    def tokens(self, efficiency: float) -> float:
        """Tokens a second and chip."""
        recipe = ALL[self.name]
        return recipe.rows * recipe.length / self.seconds(efficiency)

    def error(self, efficiency: float) -> float:
        """The error relative to the measured tokens a second; NaN where nothing was measured."""
        return self.tokens(efficiency) / ALL[self.name].measured - 1


def predict(name: str, keep: Path | None = None) -> Predicted:
    """Compile a recipe, or read what was found before."""
    file = None if keep is None else keep / f"{name}.json"
    if file is not None and file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        return Predicted(**found | {"left": tuple(found["left"])})
    recipe = ALL[name]
    chip, devices = find_slice(recipe.topology)
    mesh = mesh_of(recipe, devices)
    start = time.perf_counter()
    made, left = compiled(recipe, lower(recipe, mesh))
    if file is not None:
        file.with_suffix(".hlo").write_text(made.as_text() or "", encoding="utf-8")
    print(f"{name} compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    machine = machine_of(chip, mesh, devices)
    one = cycles(made.as_text() or "", machine)[Scope(ONCE)]
    said = made.memory_analysis()
    outside = said.output_size_in_bytes - said.alias_size_in_bytes
    result = Predicted(
        name,
        fusions=one.fusions / machine.clock,
        kernels=one.kernels * EFFICIENCY / machine.clock,
        waits=one.waits / machine.clock,
        sent=one.sent / machine.clock,
        hbm=said.argument_size_in_bytes + outside + said.temp_size_in_bytes,
        left=left,
    )
    if file is not None:
        file.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    return result


def with_copies(one: Predicted, keep: Path, link: float) -> Predicted:
    """Count copies to host memory too, where the compiler put them.

    Args:
      one: what `predict` found.
      keep: the folder in which it left the program.
      link: bytes a second between a chip and its host.
    """
    recipe = ALL[one.name]
    chip, devices = find_slice(recipe.topology)
    machine = with_link(machine_of(chip, mesh_of(recipe, devices), devices), link)
    text = (keep / f"{one.name}.hlo").read_text(encoding="utf-8")
    return replace(one, waits=cycles(text, machine)[Scope(ONCE)].waits / machine.clock)


def compiled(
    recipe: Recipe, lowered: jax.stages.Lowered
) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    """The program by the recipe's flags, and those that this compiler does not take."""
    refuses = recipe.topology.startswith(REFUSED)
    flags = {
        name: value
        for name, value in recipe.flags.items()
        if name not in HOST_OFFLOAD and not (refuses and name.startswith(FUSING))
    }
    while True:
        try:
            made = lowered.compile(compiler_options=flags)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is None:
                raise
            del flags[unknown[1]]
        else:
            return made, tuple(sorted({*recipe.flags} - {*flags}))


def fit(rows: Iterable[Predicted]) -> float:
    """The efficiency of kernels with which the largest error of the rows is the least."""
    fitted = list(rows)
    return min(TRIED, key=lambda e: max(abs(row.error(e)) for row in fitted))
