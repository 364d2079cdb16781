"""The engine: options, placement of arrays, one rank's model, backward passes, the kernel.

Private. `DOORS` lists the modules that rooms outside may import, and `GUESTS` who imports them. The
front (`FRONT`) assembles a pipeline of the engine's parts, and the rooms of `WITHIN` read or run
them, so these may import all. Nothing here imports a public room or `pipeline.insight`.
"""

FRONT = "pipeline", "pipeline.optimizer", "pipeline.pipeline"
WITHIN = "pipeline.insight", "pipeline.lint", "pipeline.models.decoding"

DOORS = (
    "pipeline.core.jaxpr.evaluate",  # evaluation of a jaxpr
    "pipeline.core.jaxpr.primitives",  # facts about primitives
    "pipeline.core.layerwise.layout",  # the mark of the order of layers in a state
    "pipeline.core.layerwise.leaf",  # one leaf of a checkpoint
    "pipeline.core.layerwise.leaves",  # all leaves in layer order
    "pipeline.core.layerwise.view",  # the layer view
    "pipeline.core.model.loss",  # a mean with its weight
    "pipeline.core.model.microbatch",  # batches as arrays
    "pipeline.core.options.options",  # the options, for tables of a configuration
    "pipeline.core.sharding.distribute",  # an array from host to devices
    "pipeline.core.sharding.meshes",  # the mesh in force
)
GUESTS = (
    "pipeline.splitting.alone",
    "pipeline.splitting.tracing",
    "pipeline.training.batches",
    "pipeline.training.checkpoints.arrays",
    "pipeline.training.checkpoints.contents",
    "pipeline.training.config.tables",
    "pipeline.training.experts",
    "pipeline.training.step",
    "pipeline.training.trainer",
    "pipeline.models.weights.biases",
    "pipeline.models.weights.load",
    "pipeline.models.weights.save",
)
