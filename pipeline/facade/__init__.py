"""The names of the engine that other packages may use, listed name by name.

`training` and `splitting` import the engine here only; users import `pipeline`. A name that a
public function or a method of `Pipeline` can replace is not listed.
"""

from pipeline.core.autodiff.jaxpr.evaluate import bind, forwarded
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of, makes_ref
from pipeline.core.layers_view.by_mesh import ByMesh
from pipeline.core.layers_view.leaf import LayerLeaf, replicated
from pipeline.core.layers_view.leaves import (
    optimizer_leaves,
    pipeline_leaves,
    plain_leaves,
    shaped_leaves,
    tree_leaves,
)
from pipeline.core.layers_view.view import layer_view
from pipeline.core.model.loss import Weighed
from pipeline.core.model.microbatch import as_arrays
from pipeline.core.model.objects import Attributes
from pipeline.core.options.options import Options
from pipeline.core.options.resolve import with_microbatches
from pipeline.core.placement.meshes import entered

__all__ = [
    "Attributes",  # a module's attributes at one moment, to find one that is set later
    "ByMesh",  # a function as jax.jit makes it, of arrays of several meshes
    "LayerLeaf",  # one leaf of a checkpoint: its path, shape, and reads and writes of its array
    "Options",  # the arguments of `Pipeline` as a dataclass: the table [pipeline] of a run's file
    "Weighed",  # a mean with its weight, as `Pipeline.loss(weighed=True)` returns it
    "as_arrays",  # the inputs, targets and extras of a batch with NumPy's or JAX's arrays
    "bind",  # evaluate one equation of a jaxpr
    "entered",  # a context in which a pipeline's mesh is in force
    "forwarded",  # the operands that a jaxpr returns unchanged
    "jaxprs_of",  # those within an equation
    "layer_view",  # the place of every layer's leaf in a pipeline's arrays, also of its state
    "makes_ref",  # whether a jaxpr makes a mutable array
    "optimizer_leaves",  # the leaves of a pipeline's optimizer, in layer order
    "pipeline_leaves",  # the leaves of a pipeline's whole state, in layer order
    "plain_leaves",  # the leaves of any module's state
    "replicated",  # a global array of a value that every process has
    "shaped_leaves",  # the leaves of a tree shaped like a pipeline's parameters, in layer order
    "tree_leaves",  # the leaves of any tree
    "with_microbatches",  # a pipeline's plan for another number of microbatches
]
