"""The names of layers: numbers across all stages, whatever the number of stages.

A stage whose parameters are all in one list of modules (a stage of several blocks) counts as that
many layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
from flax.nnx.traversals import flatten_mapping

from pipeline.layers_view.view import Path, layer_view
from pipeline.pipeline import Pipeline


def number_layers(model: Any) -> dict[Path, int]:
    """Number the layers of a model: (stage, *path in the stage) to the number of the layer.

    Args:
      model: a pipeline, a module with a list ``stages``, or a dictionary of modules.
    """
    stages = enumerate(_parameters_of_stages(model))
    layers = [(k, *path) for k, paths in stages for path in _layers_among(paths)]
    return {layer: number for number, layer in enumerate(layers)}


def name_layer(path: Path, numbers: Mapping[Path, int]) -> Path:
    """Replace the stage in a path, if there is one, by the layer's number."""
    first = path.index("stages") if "stages" in path else len(path)
    rest = path[first + 1 :]
    for n in range(1, len(rest) + 1):
        if (layer := numbers.get(rest[:n])) is not None:
            return (*path[:first], "layers", layer, *rest[n:])
    return path


def layer_of(path: Path, numbers: Mapping[Path, int]) -> str:
    """Name the layer of a parameter, such as ``layers.3``, ``embed`` or ``head``.

    In a model without stages a layer is a module in a list, or else an attribute of the model.
    """
    path = name_layer(path, numbers)
    count = next((n for n, key in enumerate(path) if isinstance(key, int)), 0)
    return ".".join(map(str, path[: count + 1]))


def _parameters_of_stages(model: Any) -> list[list[Path]]:
    if isinstance(model, Pipeline):
        return [[*map(tuple, flatten_mapping(stage))] for stage in layer_view(model).tree["stages"]]
    if isinstance(model, nnx.Module):
        flat: list[Path] = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
        held = [path[1:] for path in flat if path[0] == "stages" and isinstance(path[1], int)]
        count = 1 + max((path[0] for path in held), default=-1)
        return [[path[1:] for path in held if path[0] == k] for k in range(count)]
    stages = model.get("stages", ()) if isinstance(model, Mapping) else ()
    return [
        [tuple(path) for path, _ in nnx.to_flat_state(nnx.state(stage, nnx.Param))]
        for stage in stages
    ]


def _layers_among(paths: list[Path]) -> list[Path]:
    """Return the paths of a stage's layers; () if the stage is one layer."""
    if not paths:
        return [()]
    n = 0
    while all(len(path) > n and path[n] == paths[0][n] for path in paths):
        if isinstance(paths[0][n], int):
            break
        n += 1
    if not all(len(path) > n + 1 and isinstance(path[n], int) for path in paths):
        return [()]
    found = []
    for number in sorted({path[n] for path in paths}):
        inner = [path[n + 1 :] for path in paths if path[n] == number]
        found += [(*paths[0][:n], number, *prefix) for prefix in _layers_among(inner)]
    return found
