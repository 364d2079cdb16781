"""Pipeline-parallel training of Flax NNX models in one jit."""

from typing import TYPE_CHECKING

from pipeline.base.imports import check_neighbours, check_releases, exports

if TYPE_CHECKING:
    from pipeline.base.added import add_loss as add_loss
    from pipeline.base.agreed.vocabulary import CrossEntropy as CrossEntropy
    from pipeline.config import ParallelConfig as ParallelConfig
    from pipeline.insight.calibrate.calibration import Calibration as Calibration
    from pipeline.insight.calibrate.conclude import CalibrationError as CalibrationError
    from pipeline.lint.sharding import check_sharding as check_sharding
    from pipeline.lint.sharding import describe_sharding as describe_sharding
    from pipeline.losses import with_losses as with_losses
    from pipeline.models.decoding.generate import generate as generate
    from pipeline.models.decoding.sampling import sample as sample
    from pipeline.optimizer import make_optimizer as make_optimizer
    from pipeline.optimizer import shard_optimizer as shard_optimizer
    from pipeline.pipeline import Pipeline as Pipeline
    from pipeline.planner.plans import DoesNotFitError as DoesNotFitError
    from pipeline.planner.plans import Plans as Plans
    from pipeline.planner.search import plan as plan
    from pipeline.processes.batch import local_rows as local_rows
    from pipeline.processes.batch import shard_batch as shard_batch
    from pipeline.processes.start import initialize as initialize
    from pipeline.splitting.split import Parts as Parts
    from pipeline.splitting.split import split as split

check_neighbours(__file__)  # before another package of the same name is imported
check_releases()  # before flax is used with a jax that it does not know

__version__ = "0.4.0"

_ROOMS = "decoders", "layers", "planner", "processes", "vocabulary", "weights"

__getattr__, _names, __all__ = exports(__name__, _ROOMS)


def __dir__() -> list[str]:
    # Every module that was ever imported is an attribute too.
    return [*_names(), "__version__"]
