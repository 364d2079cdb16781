"""Experts' state in checkpoints: biases of the router's choice, which are not parameters.

A layer view contains either parameters or declared state. Here one tree contains both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from pipeline.layers_view.view import LayerView, LeafPlace, layer_view
from pipeline.models.layers.experts.state import ExpertState
from pipeline.models.weights.tables.patterns import Range, Read

BIAS, LOAD = "bias", "load"


@dataclass(frozen=True)
class Constant:
    """A plan (`pipeline.models.weights.tables.patterns.TensorPlan`) of state that no file holds.

    Attributes:
      value: the value of each number.
      shape: the shape of the leaf.
    """

    value: float
    shape: tuple[int, ...]

    def read(self, read: Read, dtype: Any) -> np.ndarray:
        """Return the whole leaf."""
        del read
        return np.full(self.shape, self.value, dtype)

    def fill(self, out: np.ndarray, index: Sequence[Range], read: Read) -> None:
        """Write a slice of the leaf."""
        del index, read
        out[...] = self.value


def is_bias(path: Sequence[Any], variable: Any) -> bool:
    """Tell whether a variable is state that a checkpoint holds."""
    return isinstance(variable, ExpertState) and path[-1] == BIAS


def state_view(pipe: Any) -> LayerView | None:
    """The layer view of the state of experts; None if there is none."""
    found = list(nnx.to_flat_state(nnx.state(pipe, ExpertState)))
    return layer_view(pipe, state=ExpertState) if found else None


def with_biases(tree: Mapping[str, Any], view: LayerView | None) -> Mapping[str, Any]:
    """Add the leaves of biases to their layers in a view's tree of parameters.

    Args:
      tree: the tree of parameters.
      view: the view of state.
    """
    if view is None:
        return tree
    stages = [_merged(*both) for both in zip(tree["stages"], view.tree["stages"], strict=True)]
    return {**tree, "stages": stages}


def constants(view: LayerView) -> dict[LeafPlace, Constant]:
    """Make plans for state that no file holds.

    The state ``load``, each expert's part of all choices, starts as 1 / (number of experts). All
    other arrays start as zeros.
    """
    return {
        place: Constant(1 / place.shape[0] if path[-1] == LOAD else 0.0, place.shape)
        for path, place in view.places.items()
        if path[0] == "stages"
    }


def _merged(params: Mapping[Any, Any], state: Mapping[Any, Any]) -> dict[Any, Any]:
    found = dict(params)
    for name, below in state.items():
        if isinstance(below, Mapping):
            if held := _merged(params.get(name, {}), below):
                found[name] = held
        elif name == BIAS:
            found[name] = below
    return found
