"""Pipeline-parallel training of Flax NNX models in one jit."""

# ruff: noqa: E402

from collectives.compat import check_releases

check_releases()  # before flax is used with a jax that it does not know

from pipeline.added_losses import add_loss, with_losses
from pipeline.calibrate.calibration import Calibration
from pipeline.calibrate.conclude import CalibrationError
from pipeline.config import ParallelConfig
from pipeline.decoding.generate import generate
from pipeline.decoding.sampling import sample
from pipeline.optimizer import make_optimizer, shard_optimizer
from pipeline.pipeline import Pipeline
from pipeline.planner import DoesNotFitError, Plans, plan
from pipeline.processes import initialize, local_rows, shard_batch
from pipeline.sharding.report import check_sharding, describe_sharding
from pipeline.splitting.split import Parts, split
from pipeline.vocabulary import CrossEntropy

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "CalibrationError",
    "CrossEntropy",
    "DoesNotFitError",
    "ParallelConfig",
    "Parts",
    "Pipeline",
    "Plans",
    "add_loss",
    "check_sharding",
    "describe_sharding",
    "generate",
    "initialize",
    "local_rows",
    "make_optimizer",
    "plan",
    "sample",
    "shard_batch",
    "shard_optimizer",
    "split",
    "with_losses",
]


def __dir__() -> list[str]:
    # Every module that was ever imported is an attribute too.
    return [*__all__, "__version__", "layers", "processes", "vocabulary"]
