"""The engine: options, placement of arrays, one rank's model, backward passes, the kernel.

This package is private. The modules in `FRONT` assemble a pipeline from the engine's parts, or
re-export its names. Other packages import the names of `pipeline.facade`; the packages in `DOORS`
also import the modules listed there. The engine imports no public package, no `pipeline.insight`,
no `pipeline.layers_view` and no `pipeline.lint`.
"""

FRONT = "pipeline", "pipeline.facade", "pipeline.optimizer", "pipeline.pipeline"
DOORS = {
    "pipeline.insight": """
        autodiff.accumulate autodiff.jaxpr.evaluate autodiff.jaxpr.primitives autodiff.jaxpr.scopes
        model.microbatch model.model model.objects model.stage model.trained model.unlike
        options.checks options.plan placement.meshes programs.run
        programs.runtime programs.traced step.calls.opened step.operands step.runtime
    """,
    "pipeline.layers_view": """
        autodiff.jaxpr.evaluate autodiff.jaxpr.primitives model.chunks model.ends model.overlay
        model.stage model.trained_state model.unlike options.options placement.distribute
        placement.meshes placement.placement
    """,
    "pipeline.lint": """
        autodiff.jaxpr.evaluate autodiff.jaxpr.primitives model.ignored model.loss model.model
        model.objects model.randomness model.stage model.trained model.trained_filters
        options.choose options.plan placement.meshes placement.paths step.calls.activations
        step.calls.declared step.calls.ends step.calls.kind
        step.calls.rank step.calls.slices step.calls.opened step.operands
    """,
    "pipeline.models.decoding": """
        autodiff.outcome model.model model.overlay model.stage options.plan placement.meshes
        step.calls.activations step.calls.declared step.calls.ends step.calls.kind
        step.calls.rank step.jitted step.operands step.ranks step.run.vocabulary step.stores.device
        step.stores.loops
    """,
    "pipeline.models.weights": """
        model.unlike placement.distribute placement.meshes
    """,
}
