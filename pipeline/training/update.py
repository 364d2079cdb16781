"""One update of a step: clip gradients, run the optimizer, average weights, read experts' loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from pipeline.base.tree import times
from pipeline.layers import ExpertState
from pipeline.layers_view.view import key_name, layer_view
from pipeline.optimizer import shard_optimizer
from pipeline.pipeline import Pipeline
from pipeline.training.layer_names import layer_of, number_layers
from pipeline.training.scaling import Scalars, ScaleRule, global_norm, wide
from pipeline.training.state import StepState, with_replaced

Tree = Any
LOAD, DROPPED = "load", "dropped"
MOST_LOADS = 1024  # most numbers of loads in a record


class Metrics(NamedTuple):
    """Metrics of a step: scalar arrays, which may still be under computation.

    Attributes:
      loss: the mean loss before the update, over all accumulated calls.
      grad_norm: the global norm of the gradients, before they are clipped.
      finite: whether loss and norm are finite, so that weights, optimizer and mean were updated.
      loss_scale: the factor of the loss; 1 without scaling.
      updates: the number of updates so far, this update included.
      skipped: the number of updates skipped because a value was not finite.
      in_a_row: the number of updates skipped since the last update that was finite.
      aux: with ``has_aux``, the metrics of the model's loss over all accumulated calls; else None.
      experts: the load balance of mixtures of experts that count choices (`balance_of`); else None.
      learning_rate: the learning rate of this update, if it is known (`Step`); else None.
      layer_norms: with ``layer_norms``, the norm of the gradients of each layer, before they are
        clipped, by the name of the layer; else None.
    """

    loss: jax.Array
    grad_norm: jax.Array
    finite: jax.Array
    loss_scale: jax.Array
    updates: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array
    aux: Tree = None
    experts: Tree = None
    learning_rate: jax.Array | None = None
    layer_norms: dict[str, jax.Array] | None = None


@dataclass(frozen=True)
class Update:
    """An update of a model from its gradients, to be compiled.

    Attributes:
      scale: the rule of the loss scale, which an update sets anew.
      clip: the maximum global norm of the gradients, or None.
      decay: the decay of the running mean of the weights.
      rate: the learning rate, or its schedule, that the optimizer was made with, or None.
      layer_norms: a function of gradients that returns their norms by layer, or None.
    """

    state: StepState
    scale: ScaleRule
    wrt: Any
    clip: float | None
    decay: float
    rate: float | optax.Schedule | None = None
    layer_norms: Callable[[Tree], dict[str, jax.Array]] | None = None

    def update(
        self,
        before: Sequence[Any],
        mean: Tree,
        scalars: Scalars,
        grads: Tree,
        loss: Any,
        aux: Tree = None,
        written: Mapping[int, Any] | None = None,
    ) -> tuple[list[Any], Tree, Scalars, Metrics]:
        """Update, unless loss or gradients are not finite; count, and set the next scale.

        A skipped update restores the leaves ``before`` the last call; ``written`` has the leaves
        that this call has written, by number. Gradients and ``loss`` are unscaled.
        """
        model, optimizer = self.state.merge(with_replaced(before, written or {}))
        norm, applied = global_norm(grads), scalars["updates"] - scalars["skipped"]
        rate = _scheduled_rate(self.rate, optimizer.opt_state, applied)
        layer_norms = None if self.layer_norms is None else self.layer_norms(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if self.clip is not None:
            factor = jnp.where(norm > self.clip, self.clip / norm, 1.0)
            grads = jax.tree.map(lambda g: times(g, factor), grads)
        # State in host memory stays on the devices until it is known whether to keep it.
        getattr(optimizer, "update_on_device", optimizer.update)(model, grads)
        if mean is not None:
            weights = nnx.state(model, self.wrt)
            average = lambda m, w: self.decay * m + (1 - self.decay) * w.astype(m.dtype)  # noqa: E731
            averaged = jax.tree.map(average, mean, weights)
            mean = jax.tree.map(lambda new, old: jnp.where(finite, new, old), averaged, mean)
        leaves = self.state.split_update(before, model, optimizer, finite)
        mean = None if mean is None else self.state.place_like_weights(mean)
        rate = _injected_rate(optimizer.opt_state) if rate is None else rate
        scale, scalars = scalars["scale"], self.scale.after(scalars, finite)
        if isinstance(self.state.everywhere, NamedSharding):
            scalars = jax.lax.with_sharding_constraint(scalars, self.state.everywhere)
        updates, skipped, in_a_row = (scalars[n] for n in ("updates", "skipped", "in_a_row"))
        experts = balance_of(model)
        counts = updates, skipped, in_a_row
        metrics = Metrics(loss, norm, finite, scale, *counts, aux, experts, rate, layer_norms)
        if self.state.is_by_mesh:  # every process reads the metrics
            metrics = jax.lax.with_sharding_constraint(metrics, self.state.everywhere)
        return leaves, mean, scalars, metrics


def _scheduled_rate(
    rate: float | optax.Schedule | None, state: Tree, applied: jax.Array
) -> jax.Array | None:
    """Compute the learning rate of an update from its schedule; None without a schedule.

    Args:
      rate: the argument of `Step`.
      state: the optimizer's state before the update, which has the count of its own schedule.
      applied: the count, if the state has none or several: of updates that were not skipped.
    """
    if rate is None or not callable(rate):
        return None if rate is None else jnp.float32(rate)
    states = optax.tree.get_all_with_path(state, "ScaleByScheduleState")
    count = states[0][1].count[...] if len(states) == 1 else applied
    return jnp.asarray(rate(count), jnp.float32)


def _injected_rate(state: Tree) -> jax.Array | None:
    """Read the rate of `optax.inject_hyperparams` after an update; None if there is not one."""
    injected = optax.tree.get_all_with_path(state, "learning_rate")
    rates: list[jax.Array] = [x[...] for _, x in injected if isinstance(x, nnx.Variable)]
    return rates[0] if len(rates) == 1 else None


def layer_norms_of(model: nnx.Module) -> Callable[[Tree], dict[str, jax.Array]]:
    """Make a function of a model's gradients that returns their norm for each layer.

    Layers have the names that checkpoints give them. Nothing but numbers is sent between ranks: the
    norms of a pipeline are computed as the state of an optimizer, on layers where they are.
    """
    numbers = number_layers(model)

    def norms(layers: Tree) -> dict[str, jax.Array]:
        groups: dict[str, list[jax.Array]] = {}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(layers):
            groups.setdefault(layer_of(tuple(map(key_name, keys)), numbers), []).append(leaf)
        return {name: global_norm(leaves) for name, leaves in groups.items()}

    if not isinstance(model, Pipeline):
        return norms
    keep = optax.GradientTransformation(norms, lambda grads, _, __=None: (grads, norms(grads)))
    sharded = shard_optimizer(keep, model)

    def by_layer(grads: Tree) -> dict[str, jax.Array]:
        return sharded.update(grads, sharded.init(grads))[1]

    return by_layer


def mean_like(weights: Tree) -> Tree:
    """Copy weights, in the dtypes of their running mean."""
    return jax.tree.map(lambda x: jnp.copy(x).astype(wide(x)), weights)


def take_mean(model: nnx.Module, mean: Tree, wrt: Any) -> None:
    """Replace a model's weights by their running mean, in the dtypes of the weights."""
    weights = nnx.state(model, wrt)
    nnx.update(model, jax.tree.map(lambda m, w: m.astype(w.dtype), mean, weights))


def balance_of(model: Any) -> dict[str, jax.Array] | None:
    """Read loads and drops of the last step that a model's mixtures of experts have counted.

    Returns:
      imbalance: the largest load of all layers over the mean; 1 if all experts get equally many
      tokens. dropped: the largest part of choices that a layer has dropped. load: [layers,
      experts], if all layers have equally many experts and there are at most `MOST_LOADS` numbers.
      None for a model that counts nothing.
    """
    counts = dict(_expert_state(model))
    loads = [x for path, x in counts.items() if path[-1] == LOAD]
    if not loads:
        return None
    drops = [x for path, x in counts.items() if path[-1] == DROPPED]
    each = [load.max() * load.shape[-1] for load in loads]
    balance = {"imbalance": jnp.stack(each).max(), DROPPED: jnp.stack(drops).max()}
    if len({load.shape for load in loads}) == 1 and sum(load.size for load in loads) <= MOST_LOADS:
        balance[LOAD] = jnp.stack(loads)
    return balance


def _expert_state(model: Any) -> Iterator[tuple[tuple[Any, ...], jax.Array]]:
    """Yield the arrays of state of each layer, in layer order."""
    state = dict(nnx.to_flat_state(nnx.state(model, ExpertState)))
    if not isinstance(model, Pipeline) or not state:
        yield from ((path, leaf[...]) for path, leaf in state.items())
        return
    places = layer_view(model, state=ExpertState).places

    def sort_key(path: tuple[Any, ...]) -> list[Any]:  # numbers before names
        names = [str(name) for name in path]
        return [(not n.isdecimal(), int(n) if n.isdecimal() else 0, n) for n in names]

    for path in sorted(places, key=sort_key):
        if path[0] == "stages":
            place = places[path]
            yield path[1:], place.read(state[place.path][...][place.row])
