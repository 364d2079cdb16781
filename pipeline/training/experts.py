"""The load balance of a model's experts in a step, from the state of its mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.layers import ExpertState
from pipeline.layers_view.view import layer_view
from pipeline.pipeline import Pipeline

LOAD, DROPPED = "load", "dropped"
MOST = 1024  # most numbers of loads in a record


def balance_of(model: Any) -> dict[str, jax.Array] | None:
    """Read loads and drops of the last step that a model has counted.

    Args:
      model: a pipeline, or any module.

    Returns:
      imbalance: the largest load of all layers over the mean; 1 if all experts get equally many
      tokens. dropped: the largest part of choices that a layer has dropped. load: [layers,
      experts], if all layers have equally many experts and there are at most `MOST` numbers. None
      for a model that counts nothing.
    """
    found = dict(_of_layers(model))
    loads = [x for path, x in found.items() if path[-1] == LOAD]
    if not loads:
        return None
    drops = [x for path, x in found.items() if path[-1] == DROPPED]
    each = [load.max() * load.shape[-1] for load in loads]
    balance = {"imbalance": jnp.stack(each).max(), DROPPED: jnp.stack(drops).max()}
    if len({load.shape for load in loads}) == 1 and sum(load.size for load in loads) <= MOST:
        balance[LOAD] = jnp.stack(loads)
    return balance


def _of_layers(model: Any) -> Iterator[tuple[tuple[Any, ...], jax.Array]]:
    """Yield the arrays of state of each layer, in layer order."""
    state = dict(nnx.to_flat_state(nnx.state(model, ExpertState)))
    if not isinstance(model, Pipeline) or not state:
        yield from ((path, leaf[...]) for path, leaf in state.items())
        return
    view = layer_view(model, state=ExpertState)
    for path, place in sorted(view.places.items(), key=_in_order):
        if path[0] == "stages":
            yield path[1:], place.read(state[place.path][...][place.row])


def _in_order(item: tuple[tuple[Any, ...], Any]) -> list[Any]:
    """Return a sort key of paths: numbers before names."""
    names = [str(name) for name in item[0]]
    return [(not n.isdecimal(), int(n) if n.isdecimal() else 0, n) for n in names]
