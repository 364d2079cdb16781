"""Checkpoints of runs: what is in one, its manifest, the folder that keeps several.

What lives here names leaves in layer order, writes and reads them, and finds what is damaged. What
never does is a step or a loop; and that processes end together is `pipeline.training.faults`.
"""

from pipeline.training.checkpoints.folder import CheckpointError, Checkpoints

__all__ = ["CheckpointError", "Checkpoints"]
