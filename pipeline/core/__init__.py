"""The engine: options, placement of arrays, one rank's model, backward passes, the kernel.

Private. The front (`FRONT`) assembles a pipeline of the engine's parts, or hands its names on, and
the rooms of `WITHIN` read or run them: these may import all. Rooms outside import the names of
`pipeline.facade`. `GUESTS` are the other modules that import the engine, and `DOORS` the modules
that they import. Nothing here imports a public room or `pipeline.insight`.
"""

FRONT = "pipeline", "pipeline.facade", "pipeline.optimizer", "pipeline.pipeline"
WITHIN = "pipeline.insight", "pipeline.lint", "pipeline.models.decoding"

DOORS = (
    "pipeline.core.layers_view.layout",  # the mark of the order of layers in a state
    "pipeline.core.layers_view.view",  # the layer view
    "pipeline.core.placement.distribute",  # an array from host to devices
    "pipeline.core.placement.meshes",  # the mesh in force
)
GUESTS = (
    "pipeline.models.weights.biases",
    "pipeline.models.weights.load",
    "pipeline.models.weights.save",
)
