"""A test of whether one module is a stack of stages, or a model whose arrays look like one.

A stack has a leading axis of length K on every array, as `nnx.vmap` makes it. Arrays of one module
may have equal leading axes by chance: four ``nnx.Linear(8, 8)`` in an `nnx.Sequential` all have 8.
For layers of flax the number of axes is known; other modules are tested when they are called.
"""

from __future__ import annotations

from typing import Any, Literal

from flax import nnx

from pipeline.base.tree import shape_text

# Arrays of flax's layers, and the number of their axes.
_AXES: dict[type[nnx.Module], tuple[str, Any]] = {
    nnx.Linear: ("kernel", lambda _: 2),
    nnx.LinearGeneral: (
        "kernel",
        lambda layer: len(layer.in_features) + len(layer.out_features) + len(layer.batch_axis),
    ),
    nnx.Einsum: ("kernel", lambda layer: len(layer.kernel_shape)),
    nnx.Conv: ("kernel", lambda layer: len(layer.kernel_shape)),
    nnx.ConvTranspose: ("kernel", lambda layer: len(layer.kernel_shape)),
    nnx.Embed: ("embedding", lambda _: 2),
    nnx.LayerNorm: ("scale", lambda _: 1),
    nnx.RMSNorm: ("scale", lambda _: 1),
    nnx.GroupNorm: ("scale", lambda _: 1),
    nnx.BatchNorm: ("mean", lambda _: 1),
}

REMEDY = (
    "one module is taken for stages that are stacked on a leading axis, as nnx.vmap makes them; "
    "give a list of modules, or let pipeline.split(model, K, inputs) cut the model: "
    "Pipeline(**parts, num_microbatches=M)"
)


def check_stack(stages: nnx.Module) -> Literal["stacked", "unknown"]:
    """Tell whether layers of flax, or random streams, show that a module is a stack.

    Raises:
      ValueError: the layers or streams show that the module is no stack.
    """
    found: Literal["stacked", "unknown"] = "unknown"
    for path, node in nnx.iter_graph(stages):
        if isinstance(node, nnx.RngState):  # without a stack it has no axis
            found = "stacked"
        kinds = (_AXES[kind] for kind in _AXES if isinstance(node, kind))
        for name, axes in kinds:
            array = getattr(node, name, None)
            if array is None:
                continue
            if array.ndim == axes(node):
                where = ".".join(map(str, (*path, name)))
                raise ValueError(
                    f"stages is one {type(stages).__name__}, whose {where} is "
                    f"{shape_text(array[...])}, without an axis for stages: {REMEDY}"
                )
            found = "stacked"
    return found
