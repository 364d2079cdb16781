"""Many processes: how they start, agree, share a batch, and end together.

`jax.distributed` connects the processes, notices which one dies and ends the others; `service` is
the interface to it. This package adds the rest: which process this is, whether all run the same
program, which process has which rows, and a launcher for one machine. It does not depend on
pipelines.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.processes.batch import local_rows as local_rows
    from pipeline.processes.batch import shard_batch as shard_batch
    from pipeline.processes.cluster import Cluster as Cluster
    from pipeline.processes.start import initialize as initialize

__getattr__, __dir__, __all__ = exports(__name__)
