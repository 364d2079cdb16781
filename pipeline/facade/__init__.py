"""The names of the engine that other packages may use, listed name by name.

`training` and `splitting` import `pipeline.core` here only; users import `pipeline`. A name that a
public function or a method of `Pipeline` can replace is not listed.
"""

from pipeline.core.autodiff.jaxpr.evaluate import bind, forwarded
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of, makes_ref
from pipeline.core.model.loss import Weighed
from pipeline.core.model.microbatch import as_arrays
from pipeline.core.model.objects import Attributes
from pipeline.core.options.options import Options
from pipeline.core.options.resolve import with_microbatches
from pipeline.core.placement.meshes import entered

__all__ = [
    "Attributes",  # a module's attributes at one moment, to find one that is set later
    "Options",  # the arguments of `Pipeline` as a dataclass: the table [pipeline] of a run's file
    "Weighed",  # a mean with its weight, as `Pipeline.loss(weighed=True)` returns it
    "as_arrays",  # the inputs, targets and extras of a batch with NumPy's or JAX's arrays
    "bind",  # evaluate one equation of a jaxpr
    "entered",  # a context in which a pipeline's mesh is in force
    "forwarded",  # the operands that a jaxpr returns unchanged
    "jaxprs_of",  # those within an equation
    "makes_ref",  # whether a jaxpr makes a mutable array
    "with_microbatches",  # a pipeline's plan for another number of microbatches
]
