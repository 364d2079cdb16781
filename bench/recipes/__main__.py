"""Published recipes, predicted beside measured: ``python -m bench.recipes NAME ...``.

Compiles each recipe for its slice, which need not be there (several minutes of a core each), and
prints tokens a second and chip beside the published figure. Needs `libtpu`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from bench import tpu
from bench.measure import table
from bench.recipes.predict import Predicted, fit, predict, with_copies
from bench.recipes.table import ALL, RECIPES

import jax  # isort: skip

from pipeline.base.chips import CHIPS
from pipeline.insight.calibrate.cycles import EFFICIENCY

GB = 10**9
HEADER = [
    "recipe",
    "seconds",
    "fusions",
    "kernels at peak",
    "waits",
    "HBM, GB",
    "tokens/s/chip",
    "measured",
    "error",
    "fitted",
]
PUBLISHED = ["recipe", "mesh", "a chip's batch", "tokens/s/chip", "MFU"]


def row(one: Predicted, efficiency: float) -> list[str]:
    """A row of the table."""
    recipe = ALL[one.name]
    known = not math.isnan(recipe.measured)
    return [
        one.name,
        *(f"{x:.2f}" for x in (one.seconds(efficiency), one.fusions, one.kernels, one.waits)),
        f"{one.hbm / GB:.1f}",
        f"{one.tokens(efficiency):,.0f}",
        f"{recipe.measured:,.0f}" if known else "-",
        f"{one.error(efficiency):+.0%}" if known else "-",
        "yes" if recipe.fitted else "no",
    ]


def chip_of(one: Predicted) -> str:
    """The chip of a recipe; each has an efficiency of its own."""
    return ALL[one.name].topology.partition(":")[0]


def published() -> list[list[str]]:
    """Rows of the measurements; MFU by our count of operations, half of the scores masked."""
    rows = []
    for name, recipe in RECIPES.items():
        peak = CHIPS[recipe.topology.partition(":")[0]].flops
        mfu = recipe.operations() * recipe.measured / peak
        mesh = " x ".join(f"{axis} {size}" for axis, size in recipe.axes.items())
        batch = f"{recipe.rows} x {recipe.length:,}"
        rows.append([f"`{name}`", mesh, batch, f"{recipe.measured:,.0f}", f"{mfu:.1%}"])
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "by default those that were measured"
    parser.add_argument("names", nargs="*", choices=[*ALL, []], help=default)
    parser.add_argument("--keep", type=Path, help="a folder of results, read where they are there")
    parser.add_argument("--published", action="store_true", help="what was measured, no more")
    link = "count copies to host memory, at so many GB a second (with --keep)"
    parser.add_argument("--link", type=float, help=link)
    options = parser.parse_args()
    if options.link is not None and options.keep is None:
        parser.error("--link reads compiled programs again: give a folder for them by --keep")
    if options.published:
        print(table(PUBLISHED, published()))
        return
    if not tpu.is_here():
        print(tpu.ABSENT)
        return
    tpu.prepare()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    found = [predict(name, options.keep) for name in options.names or RECIPES]
    if options.link is not None:
        found = [with_copies(one, options.keep, options.link * GB) for one in found]
    print(f"jax {jax.__version__}")
    for chip in dict.fromkeys(map(chip_of, found)):
        rows = [one for one in found if chip_of(one) == chip]
        fitted = [one for one in rows if ALL[one.name].fitted]
        efficiency = fit(fitted) if fitted else EFFICIENCY
        how = "fitted" if fitted else "assumed"
        print(f"\n{chip}: kernels reach {efficiency:.0%} of the peak, {how}")
        print(table(HEADER, [row(one, efficiency) for one in rows]))


if __name__ == "__main__":
    main()
