"""The options that only the scan has."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.options.options import Options


def check(options: Options, num_slices: int, shared: Sequence[str]) -> None:
    """Check the options beside ``engine="programs"``.

    Args:
      options: as the user gave them.
      num_slices: N of the timetable.
      shared: which of embed and head all ranks share.

    Raises:
      ValueError: one that only the scan has.
    """
    only_of_scan = {
        f"slices={options.slices!r} (a timetable with slices)": num_slices > 1,
        f"vocabulary={options.vocabulary!r}": bool(shared),
        f"offload={options.offload!r}": options.offload is not None,
        f"gather={options.gather!r}": options.gather == "repeat",
        f"pattern={options.pattern!r}": options.pattern is not None,
        f"delayed={options.delayed!r}": bool(options.delayed),
    }
    for option, is_used in only_of_scan.items():
        if is_used:
            raise ValueError(
                f"engine='programs' with {option}, which only the scan has: leave it out, "
                f"or use engine='scan'"
            )
