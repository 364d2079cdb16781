"""A training step: loss scale, clipping, optax, mean weights; skipped if it is not finite.

    step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-3)), clip=1.0, ema=0.999)
    for inputs, targets in batches:
        metrics = step(inputs, targets)

One jit runs the whole step; `fwd_bwd`, `update` and `eval_step` run its parts. A pipeline with
``engine="programs"`` computes gradients by itself, and one jit runs the rest. The step's decisions
(whether it is finite, the next loss scale) are made on the device: nothing waits for the host. The
model is a `pipeline.Pipeline`, or any `nnx.Module` with ``value_and_grad`` or ``loss`` of
``(inputs, targets)``; this module does not know the placement of its arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from collectives.compat import HOST_MEMORY, is_on_host, to_device, to_host
from pipeline.base.arguments import is_whole
from pipeline.base.precision import MOST, TINY
from pipeline.base.tree import shape_text, times
from pipeline.base.variables import Placeholder
from pipeline.base.warn import warn
from pipeline.facade import Attributes, Weighed, as_arrays
from pipeline.layers_view.by_mesh import ByMesh
from pipeline.pipeline import Pipeline
from pipeline.training.compiling import Given as CompilerOptions
from pipeline.training.compiling import resolve_compiler_options
from pipeline.training.experts import balance_of
from pipeline.training.joined import JoinedCalls, joined_calls, warn_of_weights

Tree = Any
Extras = dict[str, Any] | None
_COMPILED = jax.disable_jit(False)  # a step is compiled even under `jax.disable_jit()`
# The last step that accumulated for an optimizer, for `warn_within_update`.
_STEP_OF: weakref.WeakKeyDictionary[Any, weakref.ref[Step]] = weakref.WeakKeyDictionary()


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
      experts: the load balance of mixtures of experts that count choices
        (`pipeline.training.experts`); else None.
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


@dataclass(frozen=True)
class DynamicScale:
    """A loss scale for float16 that falls when gradients overflow and grows when they do not.

    Attributes:
      initial: the first scale.
      factor: the factor of growth; its inverse is the factor of decrease.
      interval: the number of consecutive finite steps after which the scale grows.
      least: the lower bound.
      most: the upper bound.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    interval: int = 2000
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self) -> None:
        if not TINY <= self.least <= self.initial <= self.most <= MOST:
            raise ValueError(
                f"DynamicScale(initial={self.initial}, least={self.least}, most={self.most}): give "
                f"numbers of float32 with 0 < least <= initial <= most"
            )
        if not 1 < self.factor < math.inf or self.interval < 1:
            raise ValueError(
                f"DynamicScale(factor={self.factor}, interval={self.interval}): the factor must be "
                f"a finite number > 1 and the interval >= 1"
            )

    def after(self, scale: jax.Array, good: jax.Array, finite: jax.Array) -> tuple[Any, Any]:
        """Return the next scale, and the number of finite steps since it changed."""
        good = jnp.where(finite, good + 1, 0)
        grows = good >= self.interval
        grown = jnp.minimum(scale * self.factor, self.most)
        fallen = jnp.maximum(scale / self.factor, self.least)
        scale = jnp.where(finite, jnp.where(grows, grown, scale), fallen)
        return scale, jnp.where(grows, 0, good)


class NotFiniteError(RuntimeError):
    """Too many steps in a row were not finite; the message names the first bad stage and leaf."""


class Step:
    """A training step of a model and its optimizer; it updates both in place.

    The constructor copies the arrays of both, one by one, and each step donates these copies: an
    array of the model that you keep from one step to the next is deleted (or give
    ``donate=False``). Variables are looked up once, in the constructor: a model or an optimizer
    with new variables needs another step.

    Args:
      model: a `pipeline.Pipeline`, or an `nnx.Module` with ``value_and_grad(inputs, targets)`` or
        ``loss(inputs, targets)``.
      optimizer: the optimizer of the model's parameters: `pipeline.make_optimizer(pipe, tx)`, or an
        `nnx.Optimizer`.
      clip: the maximum global norm of the gradients, over all parameters.
      ema: the decay of a running mean of the trained parameters, ``decay * mean + (1 - decay) *
        weights`` after each update, in float32 or wider. The mean starts at the weights.
      accumulate: the number of calls for one update, which uses the mean over all rows or tokens
        that count. Losses that stages add count once per microbatch: if the loss is (sum, weight),
        a pipeline runs all calls as one step (`pipeline.training.joined`). The last call writes the
        model's state of all calls and runs a pipeline's ``after_step``; until then the model is
        unchanged since the previous update, and `Checkpoints.save` warns, because a checkpoint
        lacks the sums of these calls.
      loss_scale: a number, or a `DynamicScale`, by which the loss is multiplied before
        differentiation; gradients are divided by the scale before any other use.
      has_aux: whether the model's loss is (loss, metrics), and its methods take ``has_aux=True`` if
        it is a pipeline or has a ``value_and_grad``. Over the calls of one update counts (integers)
        are added up, to 2**31 - 1 at most; other metrics are averaged by weight.
      donate: whether arrays of model, optimizer and mean are donated.
      compiler_options: options of XLA for the step's programs by name, as
        `jax.jit(compiler_options=...)` takes them; "default" takes those of
        `pipeline.training.compiling.DEFAULTS` for the platform, None takes XLA's own.

    Attributes:
      ema: the running mean, laid out as ``nnx.state(model, optimizer.wrt)``; None if there is none.
      weighs: whether the model returns the weight of its loss: its methods take ``weighed=True``,
        as a pipeline's methods do.

    Raises:
      ValueError: options that contradict each other, or a model that cannot be trained.
    """

    @_COMPILED
    def __init__(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer[Any],
        *,
        clip: float | None = None,
        ema: float | None = None,
        accumulate: int = 1,
        loss_scale: float | DynamicScale | None = None,
        has_aux: bool = False,
        donate: bool = True,
        compiler_options: CompilerOptions = "default",
    ) -> None:
        _check_options(clip=clip, ema=ema, accumulate=accumulate, loss_scale=loss_scale)
        _check_model(model, optimizer, scaled=loss_scale is not None, has_aux=has_aux)
        self.model, self.optimizer = model, optimizer
        self.clip, self.decay, self.accumulate = clip, ema or 0.0, accumulate
        self.scaling, self.has_aux = loss_scale, has_aux
        self.weighs, self._attributes = _takes(model, "weighed"), [Attributes(model, Pipeline)]
        self._variables = _variables((model, optimizer))
        _settle(self._variables, copied=donate)
        self._graph, state = nnx.split((model, optimizer))
        self._tree: Any = jax.tree.structure(state)
        self._may_change = [not isinstance(v, nnx.RngState) for v in self._variables]
        self._is_state = [not isinstance(v, nnx.RngState | nnx.Param) for v in self._variables]
        self._everywhere = optimizer.step.get_value().sharding
        # Virtual CPU devices share few threads. Two programs with collectives may then wait for
        # each other for ever. So on such devices a call returns only when its program has ended.
        places = {d for x in jax.tree.leaves(state) for d in x.sharding.device_set}
        self._waits = len(places) > 1 and all(d.platform == "cpu" for d in places)
        self._carry = self._replicated(_start(loss_scale))
        # With `stage_meshes` the arrays are on several meshes, with programs for each.
        device_sets = {frozenset(p.device_set) for p in jax.tree.leaves(_shardings(state))}
        self._by_mesh = len(device_sets) > 1
        jit: Any = ByMesh if self._by_mesh else jax.jit
        weights = nnx.state(model, optimizer.wrt)
        self._places_of_weights = _shardings(weights)
        self.ema = None if ema is None else self._laid(mean_like, weights)
        self._places = [v.get_raw_value().sharding for v in self._variables]
        self._sums: Tree = None
        self._ahead: dict[int, jax.Array] = {}  # leaves written by earlier calls of this update
        self._joined: JoinedCalls | None = None  # of this update, if all its calls are one step
        self._called, self.updates, self._writing = 0, 0, False

        mine = [d for d in places if d.process_index == jax.process_index()] or [*places]
        compiler = resolve_compiler_options(compiler_options, min(mine, key=lambda d: d.id))

        def given(*numbers: int, results: int) -> dict[str, Any]:
            donated = {"donate_argnums": numbers if donate else (), "compiler_options": compiler}
            hosted = {} if self._by_mesh else _places_of_results(self._variables, results)
            return donated | hosted

        self._fused: Any = jax.jit(self._train, **given(0, 1, 2, results=4))
        sums = (1,) if donate else ()
        self._added: Any = jax.jit(self._add, donate_argnums=sums, compiler_options=compiler)
        self._taken: Any = jax.jit(self._take, **given(0, results=4))
        self._updated = jit(self._update, **given(0, 1, 2, 3, results=4))
        self._evaluated: Any = jax.jit(self._evaluate, static_argnums=0, compiler_options=compiler)
        self._plans: dict[Any, Any] = {}
        self._in_parts = _runs_programs(model)
        self._plus, self._means = _plus, _means
        self._if_finite, self._unscaled = _if_finite, _unscaled
        if self._in_parts:
            if isinstance(compiler_options, Mapping):
                raise ValueError(
                    f"compiler_options={compiler_options} with engine='programs': they apply to "
                    f"the step's own program, not to those of the pipeline; leave them out, or use "
                    f"engine='scan'"
                )
            # Such a pipeline cannot be a part of a program: one program runs after its gradients.
            self._fused, self._added = self._train_in_parts, self._add
            self._taken, self._evaluated = self._take, self._evaluate
            self._updated_after = jit(self._update_after, **given(0, 1, 2, results=4))
            self._plus, self._means = jit(_plus), jit(_means)
            self._if_finite, self._unscaled = jit(_if_finite), jit(_unscaled)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Step cannot be copied or pickled: its programs give its own arrays away; copy "
            "model and optimizer together, copy.deepcopy((step.model, step.optimizer)), make "
            "another Step of them, and have it load(copy.deepcopy(step.shaped()), step.plain())"
        )

    # --- methods for users

    @_COMPILED
    def __call__(
        self, inputs: Tree, targets: Tree, *, extras: Extras = None, weight: Any = None
    ) -> Metrics | None:
        """Run one call; return the update's metrics at the last call of ``accumulate``, else None.

        Args:
          inputs: the argument of the model's ``value_and_grad``.
          targets: the argument of the model's ``value_and_grad``.
          extras: the argument of the model's ``value_and_grad``; None gives the model no extras.
          weight: the weight of this call in the mean over the calls of its update, such as its
            number of tokens. A call of weight 0 adds nothing, even if its loss is NaN. By default
            the weight that the model returns with its loss: for a pipeline the sum of the weights
            of a loss (sum, weight), or the number of rows for a mean loss. Calls of a model without
            such a weight have equal weights. Losses that stages add have a given weight too.

        Raises:
          ValueError: the weight is no number >= 0; or calls of one update do not fit, if all of
            them run as one step.
        """
        batch = as_arrays(inputs, targets, extras)
        check_weight(weight)
        self._warn_of_attributes()
        if self.accumulate == 1:
            return self._run_fused(batch, None, None)
        is_last = self._called + 1 == self.accumulate
        if not self._called and weight is None:
            self._joined = joined_calls(self.model, batch, self.accumulate, has_aux=self.has_aux)
        if self._joined is not None:
            self._joined.check(batch, weight)
            if is_last:
                batch = self._ended(self._joined.with_last(batch))
                return self._run_fused(batch, None, None)
            self._joined.keep(batch)
        else:
            is_weighed = weight is not None or self.weighs
            if weight is not None or not self.weighs:
                weight = jnp.asarray(1.0 if weight is None else weight, jnp.float32)
            if is_last:
                return self._run_fused(batch, self._sums, weight)
            if self._sums is None and not self._in_parts:
                self._sums = self._zeros(self._metrics_of(batch, weight))
            self._ahead, self._sums = self._ended(
                self._added(self._leaves_ahead(), self._sums, self._carry, batch, weight)
            )
            if is_weighed and not (self.updates or self._called):
                warn_of_weights(self.model)
        self._called += 1
        _STEP_OF[self.optimizer] = weakref.ref(self)
        return None

    @_COMPILED
    def fwd_bwd(self, inputs: Tree, targets: Tree, *, extras: Extras = None) -> tuple[Any, Tree]:
        """Compute the mean loss and its gradients, unscaled, laid out as ``nnx.state(model, wrt)``.

        With ``has_aux`` it returns ``((loss, metrics), gradients)``.
        """
        batch = as_arrays(inputs, targets, extras)
        self._warn_of_attributes()
        leaves, loss, aux, grads = self._ended(self._taken(self._leaves(), self._carry, batch))
        self._write(leaves)
        return ((loss, aux) if self.has_aux else loss), grads

    @_COMPILED
    def update(self, grads: Tree, *, loss: Any = 0.0) -> Metrics:
        """Clip, update and average: the part of a step after `fwd_bwd`. Gradients are donated.

        Args:
          grads: the gradients from `fwd_bwd`.
          loss: the loss of these gradients; a step whose loss is not finite is skipped too.
        """
        loss = jnp.asarray(loss, jnp.float32)
        done = self._updated(self._leaves(), self.ema, self._carry, grads, loss)
        return self._keep(*done)

    @_COMPILED
    def eval_step(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        extras: Extras = None,
        ema: bool = False,
        weighed: bool = False,
    ) -> Any:
        """Compute the mean loss, forward only; with ``ema`` for the running mean of the weights.

        Modules run as after ``model.eval()``: no dropout, and a batch norm uses its statistics.
        With ``has_aux`` the result is ``(loss, metrics)``. With ``weighed`` the result has the form
        of a pipeline's ``loss(..., weighed=True)``, for a model that `weighs`.
        """
        if ema and self.ema is None:
            raise ValueError("eval_step(ema=True), and there is no mean: make the Step with ema=")
        mean = self.ema if ema else None
        batch = as_arrays(inputs, targets, extras)
        return self._ended(self._evaluated((ema, weighed), self._leaves(), mean, batch))

    @property
    def pending(self) -> int:
        """The number of calls since the last update."""
        return self._called

    @property
    def is_whole(self) -> bool:
        """True if model, optimizer and mean are all from the last update.

        This is False if an exception came during an update, after their arrays were donated.
        """
        arrays = self._leaves(), self.ema, self._carry
        return not self._writing and not any(x.is_deleted() for x in jax.tree.leaves(arrays))

    # --- state for a checkpoint in addition to model and optimizer

    def shaped(self) -> dict[str, Tree]:
        """Return the step's trees that are shaped like the trained parameters, for a checkpoint."""
        return {} if self.ema is None else {"ema": self.ema}

    def plain(self) -> dict[str, Any]:
        """Return the step's numbers for a checkpoint: counts, and the loss scale."""
        return {name: value.item() for name, value in jax.device_get(self._carry).items()}

    @_COMPILED
    def load(self, shaped: dict[str, Tree] | None = None, plain: Any = None) -> None:
        """Load the results of `shaped` and `plain`; drop sums of calls without an update yet.

        A constant loss scale is not loaded; this step's own scale stays.

        Raises:
          ValueError: the names differ.
        """
        shaped = {} if shaped is None else shaped
        for what, given, wanted in (
            ("shaped", shaped, self.shaped()),
            ("plain", self._carry if plain is None else plain, self._carry),
        ):
            if set(given) != set(wanted):
                raise ValueError(
                    f"load({what}=...) has the names {sorted(given)}, and this step has "
                    f"{sorted(wanted)}; make the Step with the options of the saved one"
                )
        if self.ema is not None:
            self.ema = shaped["ema"]
        if plain is not None:
            if not isinstance(self.scaling, DynamicScale):
                plain = plain | {"scale": _start(self.scaling)["scale"]}
            start = {k: jnp.asarray(v, self._carry[k].dtype) for k, v in plain.items()}
            self._carry = self._replicated(start)
        self._begin_update()

    # --- diagnosis

    def diagnose(self, inputs: Tree, targets: Tree, *, extras: Extras = None) -> str:
        """Find the first non-finite value of a step: a weight, or a stage and a gradient."""
        wrt = self.optimizer.wrt
        if bad := self._bad(nnx.state(self.model, wrt)):
            return f"of the weights {bad} is not finite"
        scale = None if self.scaling is None else self._carry["scale"]
        batch = as_arrays(inputs, targets, extras)
        loss, _, grads = self._gradients(self.model, batch, scale)
        said = []
        if bad := self._bad(grads):
            said.append(f"of the gradients {bad} is not finite")
        elif not bool(jnp.isfinite(loss)):
            said.append("the loss is not finite, and its gradients are")
        for watching in (jax.debug_nans, jax.debug_infs):
            try:
                with watching(True):
                    self._gradients(self.model, batch, scale)
            except FloatingPointError as error:
                said.append(str(error))
                break
        return "; ".join(said) or "the same step is finite now"

    def _bad(self, tree: Tree) -> str:
        """Name the first leaf in layer order that is not finite, and the number of such leaves."""
        flat = jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(self.model, "to_layers"):
            layers = self.model.to_layers(tree)
            order = sorted(layers, key=("embed", "stages", "head").index)
            parts = [{name: layers[name]} for name in order]
            flat = [one for part in parts for one in jax.tree_util.tree_leaves_with_path(part)]
        bad = [
            path
            for path, x in flat
            if jnp.issubdtype(x.dtype, jnp.inexact) and not bool(jnp.isfinite(x).all())
        ]
        if not bad:
            return ""
        return f"{_name(bad[0])} (the first of {len(bad)}, of {len(flat)})"

    # --- reading and writing arrays

    def _leaves(self) -> list[jax.Array]:
        return [variable.get_raw_value() for variable in self._variables]

    def _write(self, leaves: Iterable[jax.Array]) -> None:
        for variable, leaf in zip(self._variables, leaves, strict=True):
            variable.set_raw_value(leaf)

    def _leaves_ahead(self) -> list[jax.Array]:
        """List the leaves as the previous calls of the current update have left them."""
        return [self._ahead.get(n, leaf) for n, leaf in enumerate(self._leaves())]

    def _begin_update(self) -> None:
        self._sums, self._ahead, self._joined, self._called = None, {}, None, 0

    def _run_fused(self, batch: Tree, sums: Tree, weight: Any) -> Metrics:
        done = self._fused(self._leaves_ahead(), self.ema, self._carry, sums, batch, weight)
        self._begin_update()
        return self._keep(*done)

    def _keep(self, leaves: Any, mean: Tree, carry: Any, metrics: Metrics) -> Metrics:
        self._writing = True
        self._write(leaves)
        self.ema, self._carry = mean, carry
        self.updates += 1
        self._writing = False
        return self._ended(metrics)

    def _ended(self, found: Any) -> Any:
        return jax.block_until_ready(found) if self._waits else found

    def _replicated(self, tree: Tree) -> Tree:
        """Place scalars like the optimizer's count, so that no step is compiled again for them."""
        return jax.jit(lambda: tree, out_shardings=self._everywhere)()

    def _laid(self, function: Any, weights: Tree) -> Tree:
        """Compute a function of weights, with results sharded like the weights."""
        places = _shardings(weights)
        if not self._by_mesh:
            return jax.jit(function, out_shardings=places)(weights)
        return ByMesh(lambda x: jax.lax.with_sharding_constraint(function(x), places))(weights)

    def _metrics_of(self, batch: Tree, weight: Any) -> Tree:
        """Trace a call to get the types of its metrics."""
        if not self.has_aux:
            return None

        def metrics(leaves: Any, carry: Any, batch: Tree) -> Tree:
            return self._weighed(self._merged(leaves)[0], carry, batch, weight)[1]

        return jax.eval_shape(metrics, self._leaves(), self._carry, batch)

    def _zeros(self, metrics: Tree) -> Tree:
        """Make zero sums for loss and metrics, and for gradients in float32 or wider."""
        weights = nnx.state(self.model, self.optimizer.wrt)

        def zeros(tree: Tree) -> Tree:
            return jax.tree.map(lambda x: jnp.zeros_like(x, _wide(x)), tree)

        grads = self._laid(zeros, weights)
        loss = Weighed(jnp.zeros(()), jnp.zeros(()))
        aux = jax.tree.map(_nothing_of, metrics) if self.has_aux else None
        return *self._replicated((loss, aux)), grads

    # --- compiled functions

    def _merged(self, leaves: Any) -> tuple[Any, Any]:
        merged = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))
        self._merged_attributes = Attributes(merged[0], Pipeline)
        return merged

    def _warn_of_attributes(self) -> None:
        """Warn, once, of an attribute of the model that was set after the step was made."""
        if change := next((attributes.change() for attributes in self._attributes), ""):
            self._attributes = []
            warn(
                f"the model's attribute {change} was set after the Step was made, which runs with "
                f"the value that it had then: make another Step, or keep the value in an "
                f"nnx.Variable, which a step reads anew",
                UserWarning,
            )

    def _split(self, model: Any, optimizer: Any) -> list[Any]:
        self._merged_attributes.check("the model")
        state = nnx.state((model, optimizer))
        structure: Any = jax.tree.structure(state)
        if structure != self._tree:
            raise ValueError(
                "the model made or dropped variables in a step; make all of them in its "
                "constructor, or make the Step after a first call"
            )
        return jax.tree.leaves(state)

    def _gradients(
        self, model: Any, batch: Tree, scale: Any, *, weighed: bool = False
    ) -> tuple[Any, Tree, Tree]:
        """Return the loss, metrics if there are any, and the gradients of the scaled loss."""
        inputs, targets, extras = batch
        options = self._options(model, extras, weighed=weighed)
        if hasattr(model, "value_and_grad"):
            options |= {} if scale is None else {"loss_scale": scale}
            found, grads = model.value_and_grad(inputs, targets, **options)
            loss, aux = found if self.has_aux else (found, None)
            return loss, aux, grads

        def scaled(model: Any) -> tuple[jax.Array, tuple[Any, Tree]]:
            found = model.loss(inputs, targets, **options)
            loss, aux = found if self.has_aux else (found, None)
            mean: jax.Array = loss.mean if weighed else loss
            return (mean if scale is None else mean * scale.astype(mean.dtype)), (loss, aux)

        take = nnx.value_and_grad(
            scaled, argnums=nnx.DiffState(0, self.optimizer.wrt), has_aux=True
        )
        (_, (loss, aux)), grads = take(model)
        return loss, aux, grads

    def _options(self, model: Any, extras: Extras, *, weighed: bool) -> dict[str, Any]:
        """Return the keyword arguments of the model's methods, without unused arguments."""
        has_aux = self.has_aux and hasattr(model, "value_and_grad")
        wanted = {"weighed": weighed, "has_aux": has_aux}
        given = {} if extras is None else {"extras": extras}
        return given | {name: True for name, is_wanted in wanted.items() if is_wanted}

    def _loss_and_grads(
        self, model: Any, carry: Any, batch: Tree, *, weighed: bool = False
    ) -> tuple[Any, Tree, Tree]:
        """Compute loss and gradients of one call, unscaled."""
        scale = None if self.scaling is None else carry["scale"]
        loss, aux, grads = self._gradients(model, batch, scale, weighed=weighed)
        loss = jax.tree.map(lambda x: x.astype(jnp.float32), loss)
        return loss, aux, grads if scale is None else self._unscaled(grads, scale)

    def _weighed(
        self, model: Any, carry: Any, batch: Tree, weight: Any
    ) -> tuple[Weighed, Tree, Tree]:
        """Return the means of one call with their weight: ``weight``, or the loss's own if None."""
        loss, aux, grads = self._loss_and_grads(model, carry, batch, weighed=weight is None)
        if weight is None:
            return loss, aux, grads
        return Weighed(loss, weight), with_weight(aux, weight), grads

    def _train(
        self, leaves: Any, mean: Tree, carry: Any, sums: Tree, batch: Tree, weight: Any
    ) -> Any:
        merged = self._merged(leaves)
        leaves, loss, aux, grads = self._whole(leaves, merged, carry, sums, batch, weight)
        return self._update(leaves, mean, carry, grads, loss, aux, merged)

    def _train_in_parts(
        self, leaves: Any, mean: Tree, carry: Any, sums: Tree, batch: Tree, weight: Any
    ) -> Any:
        """Run `_train` for a model that runs its own programs."""
        merged = self._merged(leaves)
        leaves, loss, aux, grads = self._whole(leaves, merged, carry, sums, batch, weight)
        written = _written(self._split(*merged), leaves)
        return self._updated_after(leaves, mean, carry, grads, loss, aux, written)

    def _update_after(
        self, before: Any, mean: Tree, carry: Any, grads: Tree, loss: Any, aux: Tree, written: Any
    ) -> Any:
        """Run `_update` after a call that has written some leaves, given by leaf number."""
        merged = self._merged([written.get(n, leaf) for n, leaf in enumerate(before)])
        return self._update(before, mean, carry, grads, loss, aux, merged)

    def _whole(
        self, leaves: Any, merged: Any, carry: Any, sums: Tree, batch: Tree, weight: Any
    ) -> tuple[Any, Any, Tree, Tree]:
        """Return leaves before an update, and loss, metrics and gradients of all its calls."""
        model, optimizer = merged
        if sums is None:
            if self._joined is not None:
                model.plan = self._joined.plan
            return leaves, *self._loss_and_grads(model, carry, batch)
        found = self._weighed(model, carry, batch, weight)
        leaves = self._left(leaves, model, optimizer, found[0].mean, found[2])
        (loss, aux), grads = self._means(self._plus(sums, found), found[2])
        return leaves, loss, aux, grads

    def _add(self, leaves: Any, sums: Tree, carry: Any, batch: Tree, weight: Any) -> Any:
        model, optimizer = self._merged(leaves)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, Pipeline) and module.plan.after_step is not None:
                module.plan = self._without_hook(module.plan)
        found = self._weighed(model, carry, batch, weight)
        sums = self._zeros(found[1]) if sums is None else sums
        left = self._left(leaves, model, optimizer, found[0].mean, found[2])
        return _written(left, leaves), self._plus(sums, found)

    def _without_hook(self, plan: Any) -> Any:
        """Return the plan without ``after_step``, made once, because programs belong to a plan."""
        if plan not in self._plans:
            self._plans[plan] = dataclasses.replace(plan, after_step=_no_after_step)
        return self._plans[plan]

    def _take(self, leaves: Any, carry: Any, batch: Tree) -> Any:
        model, optimizer = self._merged(leaves)
        loss, aux, grads = self._loss_and_grads(model, carry, batch)
        return self._left(leaves, model, optimizer, loss, grads), loss, aux, grads

    def _left(
        self, before: Sequence[Any], model: Any, optimizer: Any, loss: Any, grads: Tree
    ) -> list[Any]:
        """Return the state after a call without an update; it is new only if all is finite."""
        after = self._split(model, optimizer)
        written = [
            state and new is not old
            for new, old, state in zip(after, before, self._is_state, strict=True)
        ]
        if not any(written):
            return after
        pairs = {
            n: (new, old)
            for n, (new, old) in enumerate(zip(after, before, strict=True))
            if written[n]
        }
        kept = self._if_finite(pairs, loss, grads)
        return [kept.get(n, new) for n, new in enumerate(after)]

    def _update(
        self,
        before: Sequence[Any],
        mean: Tree,
        carry: dict[str, Any],
        grads: Tree,
        loss: Any,
        aux: Tree = None,
        merged: tuple[Any, Any] | None = None,
    ) -> tuple[Any, Tree, Any, Metrics]:
        """Clip, update and average unless a value is not finite; count, and set the next scale."""
        model, optimizer = merged or self._merged(before)
        norm = global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if self.clip is not None:
            factor = jnp.where(norm > self.clip, self.clip / norm, 1.0)
            grads = jax.tree.map(lambda g: times(g, factor), grads)
        # State in host memory stays on the devices until it is known whether to keep it.
        getattr(optimizer, "update_on_device", optimizer.update)(model, grads)
        if mean is not None:
            weights = nnx.state(model, self.optimizer.wrt)
            found = jax.tree.map(functools.partial(_averaged, self.decay), mean, weights)
            mean = jax.tree.map(functools.partial(jnp.where, finite), found, mean)
        leaves = [
            new if new is old else _kept(finite if may else None, new, old)
            for new, old, may in zip(
                self._split(model, optimizer), before, self._may_change, strict=True
            )
        ]
        if self._by_mesh:  # every array keeps its mesh, scalars too
            leaves = jax.lax.with_sharding_constraint(leaves, self._places)
            if mean is not None:
                mean = jax.lax.with_sharding_constraint(mean, self._places_of_weights)
        scale = carry["scale"]
        after, good = scale, carry["good"]
        if isinstance(self.scaling, DynamicScale):
            after, good = self.scaling.after(scale, good, finite)
        carry = {
            "updates": carry["updates"] + 1,
            "skipped": carry["skipped"] + jnp.where(finite, 0, 1),
            "in_a_row": jnp.where(finite, 0, carry["in_a_row"] + 1),
            "scale": after,
            "good": good,
        }
        if isinstance(self._everywhere, NamedSharding):
            carry = jax.lax.with_sharding_constraint(carry, self._everywhere)
        updates, skipped, in_a_row = (carry[n] for n in ("updates", "skipped", "in_a_row"))
        found = Metrics(loss, norm, finite, scale, updates, skipped, in_a_row, aux)
        return leaves, mean, carry, found._replace(experts=balance_of(model))

    def _evaluate(self, how: tuple[bool, bool], leaves: Any, mean: Tree, batch: Tree) -> Any:
        (of_mean, weighed), (model, _) = how, self._merged(leaves)
        model.eval()
        if of_mean:
            take_mean(model, mean, self.optimizer.wrt)
        inputs, targets, extras = batch
        return model.loss(inputs, targets, **self._options(model, extras, weighed=weighed))


def global_norm(tree: Tree) -> jax.Array:
    """Compute the norm of all numbers of all leaves, over every mesh axis, as a float32 scalar."""
    squares = [optax.tree.norm(x.astype(_wide(x)), squared=True) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(s.astype(jnp.float32) for s in squares) + jnp.zeros(()))


def warn_within_update(step: int, optimizer: Any) -> None:
    """Warn of a checkpoint that lacks calls of an update under way."""
    reference = None if optimizer is None else _STEP_OF.get(optimizer)
    accumulating = None if reference is None else reference()
    if accumulating is not None and accumulating.pending:
        count = accumulating.accumulate
        warnings.warn(
            f"the checkpoint of step {step} is saved after {accumulating.pending} of {count} calls "
            f"of an update of Step(accumulate={count}): it lacks the gradients of these calls, and "
            f"a run that resumes from it loses them; save after a call that returns metrics",
            stacklevel=3,
        )


def _unscaled(grads: Tree, scale: jax.Array) -> Tree:
    """Divide gradients by the scale of their loss."""

    def unscaled(g: jax.Array) -> jax.Array:
        return (g.astype(_wide(g)) / scale.astype(_wide(g))).astype(g.dtype)

    return jax.tree.map(unscaled, grads)


def _if_finite(
    pairs: dict[int, tuple[jax.Array, jax.Array]], loss: jax.Array, grads: Tree
) -> dict[int, jax.Array]:
    """Return the first of each pair if loss and gradients are finite, else the second."""
    finite = jnp.isfinite(global_norm(grads)) & jnp.isfinite(loss)
    return {n: jnp.where(finite, *pair) for n, pair in pairs.items()}


def with_weight(found: Tree, weight: jax.Array) -> Tree:
    """Attach the call's weight to its means; counts have no weight."""
    return jax.tree.map(lambda x: x if is_count(x) else Weighed(x, weight), found)


def plus_weighed(sums: Tree, found: Tree) -> Tree:
    """Add one call to the sums (Σ mean * weight, Σ weight); counts are added.

    Counts are added as int64 even if JAX has no 64 bits otherwise, so that they do not wrap.
    """

    def plus(t: Any, x: Any) -> Any:
        if not isinstance(x, Weighed):
            with jax.enable_x64(True):
                return t + x.astype(jnp.int64)
        return Weighed(_plus_part(t.mean, x.mean, x.weight), t.weight + x.weight)

    return jax.tree.map(plus, sums, found, is_leaf=_is_weighed)


def mean_weighed(sums: Tree) -> Tree:
    """Compute the means of the sums of `plus_weighed`; 0 if the weight is 0."""

    def mean(t: Any) -> Any:
        return _over(t.mean, t.weight) if isinstance(t, Weighed) else t

    return jax.tree.map(mean, sums, is_leaf=_is_weighed)


def _runs_programs(model: nnx.Module) -> bool:
    """Tell whether a call of the model runs programs, and so cannot be a part of a program."""
    parts = (part for _, part in nnx.iter_modules(model))
    return any(isinstance(part, Pipeline) and part.plan.engine == "programs" for part in parts)


def _written(after: Sequence[Any], before: Sequence[Any]) -> dict[int, Any]:
    """Return the leaves that a call has replaced, by their numbers."""
    pairs = enumerate(zip(after, before, strict=True))
    return {n: new for n, (new, old) in pairs if new is not old}


def _no_after_step(stage: nnx.Module) -> None:
    """Do nothing: ``after_step`` runs at the last call of an update."""


def _nothing_of(x: Any) -> jax.Array:
    """Make a zero of a mean's dtype, or of a count's sum."""
    with jax.enable_x64(True):
        return jnp.zeros(x.shape, jnp.int64 if is_count(x) else x.dtype)


def _is_weighed(x: Any) -> bool:
    return isinstance(x, Weighed)


def _plus(sums: Tree, found: tuple[Weighed, Tree, Tree]) -> Tree:
    """Add loss, metrics and gradients of one call to the sums."""
    *means, grads = found
    *totals, total = sums
    weight = means[0].weight
    added = jax.tree.map(lambda t, g: _plus_part(t, g, weight), total, grads)
    return *plus_weighed(totals, means), added


def _plus_part(total: jax.Array, part: jax.Array, weight: jax.Array) -> jax.Array:
    """Add a part to a sum; a part of weight 0 may be NaN."""
    part = part.astype(total.dtype) * weight.astype(total.dtype)
    return total + jnp.where(weight == 0, jnp.zeros_like(part), part)


def _means(sums: Tree, like: Tree) -> tuple[Tree, Tree]:
    """Compute means from sums of `_plus`: (loss, metrics), and gradients in given dtypes."""
    *means, grads = sums
    weight = means[0].weight
    grads = jax.tree.map(lambda g, w: _over(g, weight).astype(w.dtype), grads, like)
    return jax.tree.map(lambda x: _bounded(x) if is_count(x) else x, mean_weighed(means)), grads


def _bounded(count: jax.Array) -> jax.Array:
    """Convert a count to an integer of JAX's width, clipped to its range."""
    kind = jax.dtypes.canonicalize_dtype(np.int64)
    least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    with jax.enable_x64(True):
        return jnp.clip(count, least, most).astype(kind)


def _over(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / jnp.where(weight == 0, 1, weight).astype(total.dtype)


def is_count(x: Any) -> bool:
    """Tell whether a metric is a count, which is summed and not averaged."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def mean_like(weights: Tree) -> Tree:
    """Copy weights, in the dtypes of their running mean."""
    return jax.tree.map(lambda x: jnp.copy(x).astype(_wide(x)), weights)


def take_mean(model: nnx.Module, mean: Tree, wrt: Any) -> None:
    """Replace a model's weights by their running mean, in the dtypes of the weights."""
    weights = nnx.state(model, wrt)
    nnx.update(model, jax.tree.map(lambda m, w: m.astype(w.dtype), mean, weights))


def _averaged(decay: float, mean: jax.Array, weight: jax.Array) -> jax.Array:
    return decay * mean + (1 - decay) * weight.astype(mean.dtype)


def _wide(x: Any) -> Any:
    """Return the wider of a value's dtype and float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _start(scaling: float | DynamicScale | None) -> dict[str, Any]:
    scale = scaling.initial if isinstance(scaling, DynamicScale) else scaling or 1.0
    counts = {name: jnp.int32(0) for name in ("updates", "skipped", "in_a_row", "good")}
    return {**counts, "scale": jnp.float32(scale)}


def _variables(node: Any) -> list[nnx.Variable[Any]]:
    """Return the variables of models in the order of the leaves of their state."""
    found = nnx.state(node)
    variables = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # Unlike stages have placeholders without values; their values are in shared cells.
    variables = [variable for variable in variables if not isinstance(variable, Placeholder)]
    leaves = jax.tree.leaves(found)
    values = [v.get_raw_value() for v in variables]
    if len(values) != len(leaves) or any(a is not b for a, b in zip(values, leaves, strict=True)):
        raise ValueError(
            "a variable of the model holds a tree or nothing; give each variable one array"
        )
    return variables


def _settle(variables: Sequence[nnx.Variable[Any]], *, copied: bool) -> None:
    """Commit each variable's array to its sharding; with ``copied``, copy the array first.

    A compiled step treats an uncommitted array as another type than a committed array, such as a
    checkpoint or the previous step returns. Uncommitted numbers outside the mesh of the other
    arrays, such as the count of an `nnx.Optimizer`, are replicated over the mesh.
    """
    values = [jnp.asarray(variable.get_raw_value()) for variable in variables]
    meshes = [v.sharding.mesh for v in values if isinstance(v.sharding, NamedSharding)]
    for variable, value in zip(variables, values, strict=True):
        place = value.sharding
        if meshes and not value.committed and not isinstance(place, NamedSharding):
            place = NamedSharding(meshes[0], PartitionSpec())
        if copied and place.memory_kind == HOST_MEMORY:
            variable.set_raw_value(jax.device_put(value, place, may_alias=False))
        else:
            variable.set_raw_value(jax.device_put(jnp.copy(value) if copied else value, place))


def _kept(finite: Any, new: Any, old: Any) -> Any:
    """Select the new array if the step is finite or None; keep the old array's memory kind."""
    hosted = is_on_host(old)
    if finite is not None:
        new = jnp.where(finite, new, to_device(old) if hosted else old)
    return to_host(new) if hosted else new


def _places_of_results(variables: Sequence[nnx.Variable[Any]], results: int) -> dict[str, Any]:
    """Make jit options with the shardings of results, if some variables are in host memory.

    The function's first result is the list of all variables' arrays. A donated array's memory is
    reused for a result of the same shape only in the same kind of memory, so jax needs the
    shardings of these arrays.
    """
    places = [variable.get_raw_value().sharding for variable in variables]
    if all(place.memory_kind != HOST_MEMORY for place in places):
        return {}
    return {"out_shardings": (places, *[None] * (results - 1))}


def _shardings(tree: Tree) -> Tree:
    """Return the named shardings of arrays; None for any other sharding."""
    places = jax.tree.map(lambda x: x.sharding, tree)
    return jax.tree.map(lambda p: p if isinstance(p, NamedSharding) else None, places)


def _name(path: Any) -> str:
    """Write a path of the layer view as text, such as stages[2].up."""
    names = [name for key in path if (name := jax.tree_util.keystr((key,), simple=True)) != "value"]
    return "".join(f"[{n}]" if n.isdecimal() else f".{n}" for n in names).removeprefix(".")


def _check_model(model: Any, optimizer: Any, *, scaled: bool, has_aux: bool) -> None:
    if isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            "optimizer is an optax transformation; give make_optimizer(pipe, tx), or, if the model "
            "is no Pipeline, nnx.Optimizer(model, tx, wrt=nnx.Param)"
        )
    methods = [name for name in ("value_and_grad", "loss") if hasattr(model, name)]
    if not methods:
        raise ValueError(
            f"a {type(model).__name__} cannot be trained: it has neither value_and_grad(inputs, "
            f"targets) nor loss(inputs, targets); give a Pipeline, or add one of them"
        )
    asked = {"loss_scale": scaled, "has_aux": has_aux}
    for name in [name for name, wanted in asked.items() if wanted and "value_and_grad" in methods]:
        if name not in inspect.signature(model.value_and_grad).parameters:
            raise ValueError(
                f"{name}= needs {type(model).__name__}.value_and_grad(..., {name}=), which it has "
                f"not; add it, or leave value_and_grad out and give the model a loss"
            )


def _takes(model: Any, name: str) -> bool:
    """Tell whether all methods of a model that compute a loss have an argument."""
    methods = [getattr(model, name, None) for name in ("value_and_grad", "loss")]
    return all(name in inspect.signature(f).parameters for f in methods if f is not None)


def check_weight(weight: Any) -> None:
    """Check a weight; only the shape of a device array, so that no code waits for the value."""
    if weight is None:
        return
    if isinstance(weight, jax.Array):
        fits = weight.shape == ()
    else:
        array = np.asarray(weight)
        fits = array.shape == () and array.dtype.kind in "uif"
        fits = fits and (float(array) == 0 or TINY <= float(array) <= MOST)
    if not fits:
        given = shape_text(weight) if isinstance(weight, jax.Array) else repr(weight)
        raise ValueError(
            f"weight={given}: must be one finite number >= 0 of float32, the weight of this call "
            f"relative to other calls"
        )


def _check_options(*, clip: Any, ema: Any, accumulate: Any, loss_scale: Any) -> None:
    if clip is not None and not TINY <= clip <= MOST:
        raise ValueError(
            f"clip={clip!r}: must be a finite number > 0 of float32, or None to clip nothing"
        )
    if ema is not None and not (ema >= TINY and float(np.float32(ema)) < 1):
        raise ValueError(
            f"ema={ema!r}: must be a decay between 0 and 1 in float32, or None for no mean"
        )
    if not is_whole(accumulate, 1):
        raise ValueError(f"accumulate={accumulate!r}: must be a whole number >= 1")
    if isinstance(loss_scale, DynamicScale) or loss_scale is None:
        return
    if not isinstance(loss_scale, int | float) or not TINY <= loss_scale <= MOST:
        raise ValueError(
            f"loss_scale={loss_scale!r}: must be a finite number > 0 of float32, DynamicScale(), "
            f"or None"
        )
