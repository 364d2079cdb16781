"""Many processes: how they start, meet, agree, share a batch, and end when one of them dies."""

from pipeline.processes.batch import local_rows, shard_batch
from pipeline.processes.cluster import Cluster
from pipeline.processes.initialize import initialize

__all__ = ["Cluster", "initialize", "local_rows", "shard_batch"]
