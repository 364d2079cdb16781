"""A training step: loss scale, clipping, optax, mean weights; skipped if it is not finite.

    step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-3)), clip=1.0, ema=0.999)
    for inputs, targets in batches:
        metrics = step(inputs, targets)

One jit runs the whole step; `fwd_bwd`, `update` and `eval_step` run its parts. A pipeline with
``engine="programs"`` computes gradients by itself, and one jit runs the rest. The step's decisions
(whether it is finite, the next loss scale) are made on the device: nothing waits for the host. The
model is a `pipeline.Pipeline`, or any `nnx.Module` with ``value_and_grad`` or ``loss`` of
``(inputs, targets)``; this module does not know the placement of its arrays.

The parts are modules of their own: the arrays of model and optimizer (`pipeline.training.state`),
one update (`update`), sums over the calls of an update (`accumulation`), and the loss scale with
what is skipped (`scaling`).
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from pipeline.base.arguments import is_number, is_whole, names_extras
from pipeline.base.precision import MOST, TINY
from pipeline.base.warn import warn
from pipeline.facade import Attributes, Weighed, as_arrays
from pipeline.layers_view.by_mesh import ByMesh
from pipeline.pipeline import Pipeline
from pipeline.training import accumulation, scaling
from pipeline.training.accumulation import Accumulation, Sums, check_weight, zero_sums
from pipeline.training.compiling import Given as CompilerOptions
from pipeline.training.compiling import resolve_compiler_options
from pipeline.training.scaling import DynamicScale, NotFiniteError, Scalars, ScaleRule
from pipeline.training.state import StepState, pipelines_of, replaced
from pipeline.training.update import Metrics, Update, layer_norms_of, mean_like, take_mean

__all__ = ["DynamicScale", "Metrics", "NotFiniteError", "Step"]

Tree = Any
Extras = dict[str, Any] | None
_COMPILED = jax.disable_jit(False)  # a step is compiled even under `jax.disable_jit()`
# The last step that accumulated for an optimizer, for `warn_within_update`.
_STEP_OF: weakref.WeakKeyDictionary[Any, weakref.ref[Step]] = weakref.WeakKeyDictionary()


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
        a pipeline runs all calls as one step (`pipeline.training.accumulation`). The last call
        writes the model's state of all calls and runs a pipeline's ``after_step``; until then the
        model is unchanged since the previous update, and `Checkpoints.save` warns, because a
        checkpoint lacks the sums of these calls. `flush` makes an update of fewer calls.
      loss_scale: a number, or a `DynamicScale`, by which the loss is multiplied before
        differentiation; gradients are divided by the scale before any other use.
      has_aux: whether the model's loss is (loss, metrics), and its methods take ``has_aux=True`` if
        it is a pipeline or has a ``value_and_grad``. Over the calls of one update counts (integers)
        are added up, to 2**31 - 1 at most; other metrics are averaged by weight.
      donate: whether arrays of model, optimizer and mean are donated.
      learning_rate: the number or the optax schedule that the optimizer was made with, for
        `Metrics.learning_rate`. Without it the rate of `optax.inject_hyperparams` is found in the
        optimizer's state; that of any other optimizer is not known.
      layer_norms: whether `Metrics.layer_norms` has the norms of gradients by layer.
      compiler_options: options of XLA for the step's programs by name, as
        `jax.jit(compiler_options=...)` takes them; "default" takes the platform's options in
        `pipeline.training.compiling.DEFAULTS`, None takes XLA's own.

    Attributes:
      ema: the running mean, laid out as ``nnx.state(model, optimizer.wrt)``; None if there is none.
      joins: whether a pipeline runs all calls of an update as one step, whatever its loss
        (`Trainer` sets it for ``batches_per_update``).
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
        learning_rate: float | optax.Schedule | None = None,
        layer_norms: bool = False,
        compiler_options: CompilerOptions = "default",
    ) -> None:
        given = {"clip": clip, "ema": ema, "accumulate": accumulate, "loss_scale": loss_scale}
        _check_options(**given, learning_rate=learning_rate)
        _check_model(model, optimizer, scaled=loss_scale is not None, has_aux=has_aux)
        self.model, self.optimizer = model, optimizer
        self.clip, self.decay, self.accumulate = clip, ema or 0.0, accumulate
        self.scaling, self.has_aux = loss_scale, has_aux
        losses = [getattr(model, name, None) for name in ("value_and_grad", "loss")]
        takes = [inspect.signature(f).parameters for f in losses if f is not None]
        self.weighs = all("weighed" in parameters for parameters in takes)
        self._attributes = [Attributes(model, Pipeline)]
        self._state = StepState(model, optimizer, copied=donate)
        self._loss_scale, self._calls = ScaleRule(loss_scale), Accumulation(self._state)
        weakref.finalize(self, self._calls.tell_dropped)
        norms = layer_norms_of(model) if layer_norms else None
        options = optimizer.wrt, clip, self.decay, learning_rate, norms
        self._update = Update(self._state, self._loss_scale, *options)
        self._scalars = self._state.replicate(self._loss_scale.start())
        self.ema = None if ema is None else self._state.of_weights(mean_like)
        self.updates, self._writing, self.joins = 0, False, False
        self._plans: dict[Any, Any] = {}
        # Virtual CPU devices share few threads. Two programs with collectives may then wait for
        # each other for ever. So on such devices a call returns only when its program has ended.
        devices = self._state.devices
        self._waits = len(devices) > 1 and all(d.platform == "cpu" for d in devices)
        self._runs_programs = any(p.plan.engine == "programs" for p in pipelines_of(model))
        self._compile(donate, compiler_options)

    def _compile(self, donate: bool, options: CompilerOptions) -> None:
        """Make the compiled functions.

        A pipeline that runs programs of its own cannot be a part of a program. Then functions that
        call the model are not compiled, but the functions that these call.
        """
        devices = self._state.devices
        mine = [d for d in devices if d.process_index == jax.process_index()] or [*devices]
        compiler = resolve_compiler_options(options, min(mine, key=lambda d: d.id))
        if self._runs_programs and isinstance(options, Mapping):
            raise ValueError(
                f"compiler_options={options} with engine='programs': they apply to the step's own "
                f"program, not to those of the pipeline; leave them out, or use engine='scan'"
            )
        jit: Any = ByMesh if self._state.is_by_mesh else jax.jit

        def donated(*numbers: int) -> dict[str, Any]:
            return {"donate_argnums": numbers if donate else (), "compiler_options": compiler}

        def whole(function: Any, **options: Any) -> Any:
            return function if self._runs_programs else jax.jit(function, **options)

        def part(function: Any, **options: Any) -> Any:
            return jit(function, **options) if self._runs_programs else function

        shardings = self._state.result_shardings(4)
        self._fused = whole(self._train, **donated(0, 1, 2), **shardings)
        self._flushed = whole(self._update_of_sums, **donated(0, 1, 2), **shardings)
        self._added = whole(self._add, **donated(1))
        self._taken = whole(self._take, **donated(0), **shardings)
        self._evaluated = whole(self._evaluate, static_argnums=0, compiler_options=compiler)
        self._updated = jit(self._update.update, **donated(0, 1, 2, 3), **shardings)
        self._end_update = part(self._update.update, **donated(0, 1, 2), **shardings)
        self._add_call, self._mean_of_calls = (
            part(accumulation.add_call),
            part(accumulation.mean_of_calls),
        )
        self._select_if_finite, self._unscale = (
            part(scaling.select_if_finite),
            part(scaling.unscale),
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Step cannot be copied or pickled: its programs give its own arrays away; copy "
            "model and optimizer together, copy.deepcopy((step.model, step.optimizer)), make "
            "another Step of them, and have it load(copy.deepcopy(step.shaped()), step.plain())"
        )

    # --- methods for users

    @names_extras
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
        calls = self._calls
        is_last = calls.calls + 1 == self.accumulate
        if not calls.calls and weight is None:
            calls.joined = accumulation.joined_calls(
                self.model, batch, self.accumulate, has_aux=self.has_aux, always=self.joins
            )
        if calls.joined is not None:
            calls.joined.check(batch, weight)
            if is_last:
                batch = self._ended(calls.joined.with_last(batch))
                return self._run_fused(batch, None, None)
            calls.joined.keep(batch)
        else:
            is_weighed = weight is not None or self.weighs
            if weight is not None or not self.weighs:
                weight = jnp.asarray(1.0 if weight is None else weight, jnp.float32)
            if is_last:
                return self._run_fused(batch, calls.sums, weight)
            if calls.sums is None and not self._runs_programs:
                calls.sums = zero_sums(self._state, self._metrics_of(batch, weight))
            calls.keep(
                *self._ended(self._added(calls.read(), calls.sums, self._scalars, batch, weight))
            )
            if is_weighed and not (self.updates or calls.calls):
                accumulation.warn_of_weights(self.model)
        calls.calls += 1
        _STEP_OF[self.optimizer] = weakref.ref(self)
        return None

    @_COMPILED
    def flush(self) -> Metrics | None:
        """Update with the calls since the last update, fewer than ``accumulate``; None without any.

        It is for the end of the data: the update uses the mean over these calls.

        Raises:
          ValueError: the pipeline has an ``after_step``, which runs in the last call of an update.
        """
        calls, model = self._calls, cast("Any", self.model)
        if not calls.calls:
            return None
        if calls.joined is not None:
            return self._run_fused(self._ended(calls.joined.end(model.plan)), None, None)
        if any(pipe.plan.after_step is not None for pipe in pipelines_of(model)):
            raise ValueError(
                f"flush() after {calls.calls} of {self.accumulate} calls: the pipeline's "
                f"after_step runs in the last call of an update; give accumulate= a divisor of the "
                f"number of batches"
            )
        done = self._flushed(calls.read(), self.ema, self._scalars, calls.sums)
        calls.begin()
        return self._keep(*done)

    @names_extras
    @_COMPILED
    def fwd_bwd(self, inputs: Tree, targets: Tree, *, extras: Extras = None) -> tuple[Any, Tree]:
        """Compute the mean loss and its gradients, unscaled, laid out as ``nnx.state(model, wrt)``.

        With ``has_aux`` it returns ``((loss, metrics), gradients)``.
        """
        batch = as_arrays(inputs, targets, extras)
        self._warn_of_attributes()
        done = self._taken(self._state.read(), self._scalars, batch)
        leaves, loss, aux, grads = self._ended(done)
        self._state.write(leaves)
        return ((loss, aux) if self.has_aux else loss), grads

    @_COMPILED
    def update(self, grads: Tree, *, loss: Any = 0.0) -> Metrics:
        """Clip, update and average: the part of a step after `fwd_bwd`. Gradients are donated.

        Args:
          grads: the gradients from `fwd_bwd`.
          loss: the loss of these gradients; a step whose loss is not finite is skipped too.
        """
        loss = jnp.asarray(loss, jnp.float32)
        done = self._updated(self._state.read(), self.ema, self._scalars, grads, loss)
        return self._keep(*done)

    @names_extras
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
        return self._ended(self._evaluated((ema, weighed), self._state.read(), mean, batch))

    @property
    def pending(self) -> int:
        """The number of calls since the last update."""
        return self._calls.calls

    @property
    def is_whole(self) -> bool:
        """True if model, optimizer, running mean and the step's scalars have usable arrays.

        It is False after an exception between the donation of their arrays to an update and the end
        of the write of the new ones.
        """
        arrays = self._state.read(), self.ema, self._scalars
        return not self._writing and not any(x.is_deleted() for x in jax.tree.leaves(arrays))

    # --- state for a checkpoint in addition to model and optimizer

    def shaped(self) -> dict[str, Tree]:
        """Return the step's trees that are shaped like the trained parameters, for a checkpoint."""
        return {} if self.ema is None else {"ema": self.ema}

    def plain(self) -> dict[str, Any]:
        """Return the step's numbers for a checkpoint: counts, and the loss scale."""
        return {name: value.item() for name, value in jax.device_get(self._scalars).items()}

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
            ("plain", self._scalars if plain is None else plain, self._scalars),
        ):
            if set(given) != set(wanted):
                raise ValueError(
                    f"load({what}=...) has the names {sorted(given)}, and this step has "
                    f"{sorted(wanted)}; make the Step with the options of the saved one"
                )
        if self.ema is not None:
            self.ema = shaped["ema"]
        if plain is not None:
            loaded = self._loss_scale.loaded(plain, self._scalars)
            self._scalars = self._state.replicate(loaded)
        self._calls.begin()

    def diagnose(self, inputs: Tree, targets: Tree, *, extras: Extras = None) -> str:
        """Find the first non-finite value of a step: a weight, or a stage and a gradient."""
        batch, scale = as_arrays(inputs, targets, extras), self._loss_scale.factor(self._scalars)
        wrt, has_aux = self.optimizer.wrt, self.has_aux
        return scaling.diagnose(
            self.model,
            self._state.weights(),
            lambda: scaling.scaled_gradients(self.model, batch, scale, wrt=wrt, has_aux=has_aux),
        )

    # --- running compiled functions

    def _run_fused(self, batch: Tree, sums: Sums | None, weight: Any) -> Metrics:
        done = self._fused(self._calls.read(), self.ema, self._scalars, sums, batch, weight)
        self._calls.begin()
        return self._keep(*done)

    def _keep(self, leaves: Any, mean: Tree, scalars: Scalars, metrics: Metrics) -> Metrics:
        self._writing = True
        self._state.write(leaves)
        self.ema, self._scalars = mean, scalars
        self.updates += 1
        self._writing = False
        return self._ended(metrics)

    def _ended(self, results: Any) -> Any:
        return jax.block_until_ready(results) if self._waits else results

    def _metrics_of(self, batch: Tree, weight: Any) -> Tree:
        if not self.has_aux:
            return None

        def metrics(leaves: Any, scalars: Scalars, batch: Tree) -> Tree:
            return self._weighed(self._state.merge(leaves)[0], scalars, batch, weight)[1]

        return jax.eval_shape(metrics, self._state.read(), self._scalars, batch)

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

    # --- compiled functions

    def _train(
        self,
        leaves: Any,
        mean: Tree,
        scalars: Scalars,
        sums: Sums | None,
        batch: Tree,
        weight: Any,
    ) -> Any:
        """Run the last call of an update, then update with the means over all its calls."""
        model, optimizer = self._state.merge(leaves)
        if sums is None:
            if self._calls.joined is not None:
                model.plan = self._calls.joined.plan
            loss, aux, grads = self._gradients(model, scalars, batch)
        else:
            call = self._weighed(model, scalars, batch, weight)
            leaves = self._split(leaves, model, optimizer, call[0].mean, call[2])
            (loss, aux), grads = self._mean_of_calls(self._add_call(sums, call), call[2])
        written = replaced(self._state.split(model, optimizer), leaves)
        return self._end_update(leaves, mean, scalars, grads, loss, aux, written)

    def _update_of_sums(self, leaves: Any, mean: Tree, scalars: Scalars, sums: Sums) -> Any:
        """Update with the mean over the calls so far."""
        weights = nnx.state(self._state.merge(leaves)[0], self.optimizer.wrt)
        (loss, aux), grads = self._mean_of_calls(sums, weights)
        return self._end_update(leaves, mean, scalars, grads, loss, aux)

    def _add(
        self, leaves: Any, sums: Sums | None, scalars: Scalars, batch: Tree, weight: Any
    ) -> tuple[dict[int, Any], Sums]:
        """Run a call before the last call of an update; return written leaves, and the sums."""
        model, optimizer = self._state.merge(leaves)
        for pipe in pipelines_of(model):
            if pipe.plan.after_step is not None:
                pipe.plan = self._without_hook(pipe.plan)
        call = self._weighed(model, scalars, batch, weight)
        sums = zero_sums(self._state, call[1]) if sums is None else sums
        after = self._split(leaves, model, optimizer, call[0].mean, call[2])
        return replaced(after, leaves), self._add_call(sums, call)

    def _take(self, leaves: Any, scalars: Scalars, batch: Tree) -> Any:
        model, optimizer = self._state.merge(leaves)
        loss, aux, grads = self._gradients(model, scalars, batch)
        return self._split(leaves, model, optimizer, loss, grads), loss, aux, grads

    def _evaluate(self, how: tuple[bool, bool], leaves: Any, mean: Tree, batch: Tree) -> Any:
        (of_mean, weighed), (model, _) = how, self._state.merge(leaves)
        model.eval()
        if of_mean:
            take_mean(model, mean, self.optimizer.wrt)
        inputs, targets, extras = batch
        options = scaling.loss_options(model, extras, has_aux=self.has_aux, weighed=weighed)
        return model.loss(inputs, targets, **options)

    # --- one call within a compiled function

    def _gradients(
        self, model: Any, scalars: Scalars, batch: Tree, *, weighed: bool = False
    ) -> tuple[Any, Tree, Tree]:
        scale = self._loss_scale.factor(scalars)
        loss, aux, grads = scaling.scaled_gradients(
            model, batch, scale, wrt=self.optimizer.wrt, has_aux=self.has_aux, weighed=weighed
        )
        loss = jax.tree.map(lambda x: x.astype(jnp.float32), loss)
        return loss, aux, grads if scale is None else self._unscale(grads, scale)

    def _weighed(self, model: Any, scalars: Scalars, batch: Tree, weight: Any) -> Sums:
        """Return the means of one call with their weight: ``weight``, or the loss's own if None."""
        loss, aux, grads = self._gradients(model, scalars, batch, weighed=weight is None)
        if weight is None:
            return loss, aux, grads
        return Weighed(loss, weight), accumulation.with_weight(aux, weight), grads

    def _split(
        self, before: Any, model: Any, optimizer: Any, loss: jax.Array, grads: Tree
    ) -> list[Any]:
        """List the leaves after a call without an update; state is new only if all is finite."""
        select = lambda pairs: self._select_if_finite(pairs, loss, grads)  # noqa: E731
        return self._state.split_if_finite(before, model, optimizer, select)

    def _without_hook(self, plan: Any) -> Any:
        """Return the plan without ``after_step``, made once, because programs belong to a plan."""
        if plan not in self._plans:
            self._plans[plan] = dataclasses.replace(plan, after_step=_no_after_step)
        return self._plans[plan]


def warn_within_update(step: int, optimizer: Any) -> None:
    """Warn if a checkpoint is saved between the calls of an update: it lacks their gradients."""
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


def _no_after_step(stage: nnx.Module) -> None:
    """Do nothing: ``after_step`` runs at the last call of an update."""


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


def _check_options(
    *, clip: Any, ema: Any, accumulate: Any, loss_scale: Any, learning_rate: Any
) -> None:
    positive = "a finite number > 0 of float32"
    has_number = isinstance(loss_scale, int | float) and TINY <= loss_scale <= MOST
    has_scale = loss_scale is None or isinstance(loss_scale, DynamicScale) or has_number
    is_decay = ema is None or (ema >= TINY and float(np.float32(ema)) < 1)
    for name, value, fits, rule in (
        (
            "clip",
            clip,
            clip is None or TINY <= clip <= MOST,
            f"{positive}, or None to clip nothing",
        ),
        ("ema", ema, is_decay, "a decay between 0 and 1 in float32, or None for no mean"),
        ("accumulate", accumulate, is_whole(accumulate, 1), "a whole number >= 1"),
        ("loss_scale", loss_scale, has_scale, f"{positive}, DynamicScale(), or None"),
        (
            "learning_rate",
            learning_rate,
            learning_rate is None or callable(learning_rate) or is_number(learning_rate),
            "a number, an optax schedule (a function of the count), or None",
        ),
    ):
        if not fits:
            raise ValueError(f"{name}={value!r}: must be {rule}")
