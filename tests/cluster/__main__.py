"""A cluster on this machine: python -m tests.cluster slurm|mpi|hosts|faults|random [--times 2]

It needs root, for namespaces and daemons, and installs Debian's packages where they are missing.
Exit codes: 0 all went well, 1 something did not, 77 this machine cannot (one line says why).
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.cluster.hosts import MissingError, need

SKIPPED = 77
LANES = {
    "hosts": "tests.cluster.links:lane",
    "mpi": "tests.cluster.mpi:lane",
    "slurm": "tests.cluster.slurm:lane",
    "faults": "tests.cluster.faults:table",
    "random": "tests.cluster.faults:random_faults",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lanes", nargs="+", choices=LANES)
    parser.add_argument("--times", type=int, default=1, help="how often, each from nothing (1)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken down
    summary, failed = [], False
    for name in options.lanes * options.times:
        module, _, function = LANES[name].partition(":")
        began = time.monotonic()
        try:
            need()
            with tempfile.TemporaryDirectory(prefix=f"shardpipe-{name}-") as folder:
                for line in getattr(importlib.import_module(module), function)(Path(folder)):
                    print(line, flush=True)
            result = "passed"
        except MissingError as error:
            print(f"{name}: skipped: {error}")
            return SKIPPED
        except Exception:
            traceback.print_exc()
            result, failed = "FAILED", True
        summary.append(f"{name}: {result} in {(time.monotonic() - began) / 60:.1f} minutes")
    print("\n".join(summary))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
