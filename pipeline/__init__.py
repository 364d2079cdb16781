"""Pipeline-parallel training of Flax NNX models in one jit."""

from typing import TYPE_CHECKING

from pipeline.base.imports import check_neighbours, check_releases, exports

if TYPE_CHECKING:
    from pipeline.base.added import add_loss
    from pipeline.base.agreed.vocabulary import CrossEntropy
    from pipeline.config import ParallelConfig
    from pipeline.insight.calibrate.calibration import Calibration
    from pipeline.insight.calibrate.conclude import CalibrationError
    from pipeline.lint.sharding import check_sharding, describe_sharding
    from pipeline.losses import with_losses
    from pipeline.models.decoding.generate import generate
    from pipeline.models.decoding.sampling import sample
    from pipeline.optimizer import make_optimizer, shard_optimizer
    from pipeline.pipeline import Pipeline
    from pipeline.planner.plans import DoesNotFitError, Plans
    from pipeline.planner.search import plan
    from pipeline.processes.batch import local_rows, shard_batch
    from pipeline.processes.start import initialize
    from pipeline.splitting.split import Parts, split

check_neighbours(__file__)  # before another package of the same name is imported
check_releases()  # before flax is used with a jax that it does not know

__version__ = "0.3.0"

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

_HOMES = {
    "pipeline.base.added": "add_loss",
    "pipeline.config": "ParallelConfig",
    "pipeline.lint.sharding": "check_sharding describe_sharding",
    "pipeline.losses": "with_losses",
    "pipeline.models.decoding.generate": "generate",
    "pipeline.models.decoding.sampling": "sample",
    "pipeline.insight.calibrate.calibration": "Calibration",
    "pipeline.insight.calibrate.conclude": "CalibrationError",
    "pipeline.optimizer": "make_optimizer shard_optimizer",
    "pipeline.pipeline": "Pipeline",
    "pipeline.planner.plans": "DoesNotFitError Plans",
    "pipeline.planner.search": "plan",
    "pipeline.processes.batch": "local_rows shard_batch",
    "pipeline.processes.start": "initialize",
    "pipeline.splitting.split": "Parts split",
    "pipeline.base.agreed.vocabulary": "CrossEntropy",
}
_ROOMS = "decoders", "layers", "planner", "processes", "vocabulary", "weights"

__getattr__, _names = exports(__name__, _HOMES, _ROOMS)


def __dir__() -> list[str]:
    # Every module that was ever imported is an attribute too.
    return [*_names(), "__version__"]
