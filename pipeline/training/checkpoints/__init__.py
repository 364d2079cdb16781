"""Checkpoints of runs: the contents of a checkpoint, its manifest, and the folder of checkpoints.

The package names leaves in layer order, writes and reads them, and finds damage. Steps and loops
are in `pipeline.training`; `pipeline.training.faults` makes processes end together.
"""

from pipeline.training.checkpoints.folder import CheckpointError, Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
