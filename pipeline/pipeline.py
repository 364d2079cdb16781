"""The public object: K NNX stages that train as one module."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from pipeline.base.agreed.pieces import check_pieces
from pipeline.base.arguments import ConstructorSignature, described, names_extras, takes
from pipeline.base.precision import check_dtype, keep_params_in
from pipeline.base.stacks import check_stack
from pipeline.base.tree import Tree, is_abstract, leaves_by_name
from pipeline.base.warn import ModelWarning
from pipeline.core.model.chunks import make_chunks, make_ends, variables_of
from pipeline.core.model.ignored import ignoring
from pipeline.core.model.loss import check_has_aux
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.model.randomness import counting, with_counts
from pipeline.core.model.shared_variables import unshared
from pipeline.core.model.stage import check_kinds, count_stages, is_stacked, take_stage
from pipeline.core.model.trained import Trained
from pipeline.core.model.trained_filters import count_parameters, trained_by, trained_lines
from pipeline.core.model.trained_state import check_order, check_state, keep_state
from pipeline.core.model.unlike import static_stage
from pipeline.core.options.checks import check_scale
from pipeline.core.options.compiled import PlanOfPipeline
from pipeline.core.options.options import Arguments, Measured, ModelParts, Options
from pipeline.core.options.plan import Plan
from pipeline.core.options.resolve import make_plan, with_microbatches
from pipeline.core.placement import meshes
from pipeline.core.placement.paths import Asked
from pipeline.core.placement.placement import Placement
from pipeline.core.step import differentiable, runtime
from pipeline.core.step.operands import Operands, check_arrays, device_limit, make_operands, types
from pipeline.core.step.ranks import gradient_specs
from pipeline.core.step.results import StateLeaves
from pipeline.layers_view.layout import Layout, PipelineOrigin, check_layout, mark, types_of
from pipeline.lint import Lint
from pipeline.processes.replicas import check_replicas
from schedules.core.arguments import need
from schedules.core.schedule import Schedule

if TYPE_CHECKING:
    from pipeline.insight.calibrate.calibration import Calibration
    from pipeline.insight.calibrate.efficiency import Efficiency
    from schedules.clocks.report import Report


class Pipeline(nnx.Module):
    """A deep model whose stages live on different devices and work at the same time.

    Letters: S ranks on the mesh axis ``stage``, K stages, V = K // S chunks per rank, M
    microbatches, D data shards, N rows of a batch.

    Calls take ``extras``, a dict of side inputs with [N, ...] leaves, such as masks and positions.
    Each stage is called as ``stage(x, **extras)`` on the rows of its microbatch; embed, head and
    loss_fn receive no extras.

    Attributes:
      chunks: [V] modules with leaves of leading length S, sharded over ``stage``; index r of chunk
        v is the v-th stage of rank r. With V = 1 this is layer order. A chunk of stages that differ
        is a `pipeline.core.model.unlike.Overlaid`; `stages()` returns the stages themselves.
      ends: embed, head and, if it is a module, loss_fn, on every rank. A table that all ranks share
        has its rows sharded over ``stage``, and may have rows of zeros after its last word.

    Raises:
      ValueError: options that contradict each other; the message names them and the remedy.
    """

    __signature__ = ConstructorSignature()
    plan = PlanOfPipeline()

    @takes(Arguments, "Pipeline()")
    def __init__(self, arguments: Arguments) -> None:
        from pipeline.insight.calibrate.signature import signature_of
        from pipeline.lint import construction as checks
        from pipeline.lint.copies import Copies
        from pipeline.lint.outside import warn_of_parameters_read_from_outside
        from pipeline.lint.sharding import warn_of_undivided_weights

        options, stages = arguments.options, arguments.stages
        embed, head, loss_fn = arguments.embed, arguments.head, arguments.loss_fn
        was_made = hasattr(self, "plan")  # `replace` lays a pipeline out anew
        check_kinds(stages, embed=embed, head=head, loss_fn=loss_fn)
        given_stages, count, lint = stages, count_stages(stages), Lint()
        checks.check_nested(
            Pipeline, [stages] if is_stacked(stages) else stages, embed=embed, head=head
        )
        param_dtype = check_dtype("param_dtype", options.param_dtype)
        dtypes = {
            "compute_dtype": check_dtype("compute_dtype", options.compute_dtype),
            "param_dtype": param_dtype,
        }
        model = signature_of(stages, embed, head, remat=options.remat, **dtypes)
        costs, costs_from = options.costs, "the costs given"
        if isinstance(costs, Measured):
            costs, costs_from = costs.costs_for(model)
        self.plan = plan = make_plan(
            options,
            count,
            embed=embed,
            head=head,
            loss_fn=loss_fn,
            costs=costs,
            costs_from=costs_from,
            signature=model,
            lint=lint,
            entries=_entries_of(options.engine),
            stack=count if is_stacked(stages) and check_stack(stages) == "unknown" else 0,
        )
        has_mesh = options.mesh is not None or options.stage_meshes is not None
        if not (was_made or has_mesh) and meshes.default_mesh() is None:
            checks.warn_of_idle_devices(options.schedule, plan.mesh, count)
        warn_of_parameters_read_from_outside(
            [stages] if is_stacked(stages) else stages, embed=embed, head=head, loss_fn=loss_fn
        )
        stages, ends = unshared(stages, embed, head, loss_fn)
        stages, self.ignored = ignoring(stages, options.ignore)
        lint.ignored = self.ignored
        checks.check_stages(stages)
        given = [*([stages] if is_stacked(stages) else stages), ends.embed, ends.head, loss_fn]
        for mesh in plan.stage_meshes or (plan.mesh,):  # a stage is traced on each
            check_pieces(given, mesh, plan.auto_axes)
        named, asked = options.sharding, None
        if named is not None:
            asked = Asked(named, variables_of(stages, ends))
        if not was_made:
            checks.warn_of_no_names(asked)
        of_ranks = [Placement(of.home, of.axes, plan.data_parallel, asked) for of in plan.of_ranks]
        by_stage = [of_ranks[rank] for rank in plan.schedule.placement]
        self.chunks = nnx.List(make_chunks(stages, by_stage, plan.stages_of))
        self.ends = make_ends(ends, by_stage[0], by_stage[-1], plan.shared)
        keep_params_in(self, param_dtype)
        check_replicas(leaves_by_name(nnx.state(self)), plan.devices)
        warn_of_undivided_weights(self, plan, given)
        mark(self.chunks, plan.stages_of)
        types = is_abstract(nnx.state(self.chunks))
        self.layout = Layout(plan.stages_of, plan.mesh, types=types)
        if plan.state is not None:
            check_order(plan.schedule)
        check_state(plan, self.chunks, self.ends)
        checks.warn_of_frozen_parts(self.trained, self.chunks, plan.stages_of)
        watched = {} if was_made else {"embed": embed, "head": head, "loss_fn": loss_fn}
        copies = Copies(self, [] if was_made else given_stages, **watched)
        self.origin = PipelineOrigin(types_of(self.chunks), copies)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS:
            from pipeline.layers_view.replace import refusal

            raise AttributeError(refusal(name))
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {"plan": state["plan"], **state}  # the plan says why a pipeline is not pickled

    def __nnx_repr__(self) -> Iterator[Any]:
        """Fields that `print` shows, here or within another module; `describe` shows more."""
        from pipeline.insight.forecast.describe import summary

        count = count_parameters(self.chunks, self.ends, self.plan.stages_of)
        yield nnx.reprlib.Object(type(self), comment=f"  # {count:,} parameters")
        for name, text in summary(self).items():
            yield nnx.reprlib.Attr(name, text, use_raw_value=True)

    @property
    def schedule(self) -> Schedule:
        """The timetable that runs."""
        return self.plan.schedule

    @property
    def mesh(self) -> Mesh:
        """The mesh, with Auto axes, or with the types of the mesh in force at construction."""
        return self.plan.home

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches M."""
        return self.plan.schedule.num_microbatches

    @property
    def wrt(self) -> nnx.filterlib.Filter:
        """The trained variables, as a filter of the pipeline's own state.

        For ``nnx.Optimizer(pipe, tx, wrt=pipe.wrt)`` and ``nnx.DiffState(0, pipe.wrt)``. With
        stages of one chunk that are not trained alike use `make_optimizer`.
        """
        return self._filter(self.plan.wrt)

    @property
    def embed(self) -> Any:
        """The module that makes the first stage's input."""
        return self.ends.embed

    @property
    def head(self) -> Any:
        """The module after the last stage."""
        return self.ends.head

    @names_extras
    def __call__(
        self,
        inputs: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        num_microbatches: int | None = None,
    ) -> Tree:
        """Run forward only: [N, ...] outputs, on every rank of ``stage``.

        The call can be differentiated with respect to parameters and inputs; the backward pass runs
        the schedule. Gradients include the losses that stages add by `add_loss`, once, as without a
        pipeline: they are the gradients of the loss of the outputs plus the mean of the added
        losses. The outputs do not contain added losses; `loss` does.

        Args:
          inputs: [N, ...] leaves.
          extras: [N, ...] leaves, by name, for every stage.
          num_microbatches: M of this call; by default the pipeline's M. An evaluation batch may
            have another size than a training batch. Each M is compiled separately.
        """
        plan = with_microbatches(self.plan, num_microbatches)
        operands = self._operands(inputs, (), extras, plan=plan)
        with self._step("pipe", operands) as (model, *arrays):
            found, kept = differentiable.outputs(plan, model, _warn_of_memory, *arrays)
        self._keep(plan, model, kept)
        given, mesh = (inputs, extras), self.plan.mesh
        shared = "head" in self.plan.shared
        specs = meshes.outputs_specs(mesh, plan.axes, found, given, shared=shared)
        return meshes.typed(found, meshes.mesh_of_results(mesh, given), specs)

    @names_extras
    def logprobs(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        num_microbatches: int | None = None,
    ) -> jax.Array:
        """Compute the log-probability of every target: float32, on every rank of ``stage``.

        The result has the shape of ``targets``. Logits are not sent: the logits of a microbatch are
        on the last rank, or, with ``vocabulary="stage"``, split over all ranks. Differentiate
        `loss` instead.

        Args:
          inputs: [N, ...] leaves, for which the model returns [N, ..., words] logits.
          targets: [N, ...] integers; the result is 0 for a target of -100, which does not count.
          extras: the argument of a call.
          num_microbatches: the argument of a call.

        Raises:
          ValueError: targets of another shape; or the call is differentiated.
        """
        plan = with_microbatches(self.plan, num_microbatches)
        operands = self._operands(inputs, targets, extras, plan=plan)
        what = "logprobs() was differentiated, and it has no gradient: differentiate loss()"
        with self._step("logprobs", operands) as (model, *arrays):
            run = functools.partial(
                plan.lint.run, plan.entries.logprobs, plan, model, takes_loss=False
            )
            found, kept = differentiable.without_gradient(run, what)(*arrays)
        self._keep(plan, operands[0], kept)
        mesh = self.plan.mesh
        specs = meshes.outputs_specs(mesh, plan.axes, found, (inputs, extras), shared=False)
        return meshes.typed(found, meshes.mesh_of_results(mesh, (inputs, extras)), specs)

    @names_extras
    def loss(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        has_aux: bool = False,
        weighed: bool = False,
        num_microbatches: int | None = None,
    ) -> Any:
        """Compute the mean loss, a float32 scalar on every rank; with ``has_aux`` (loss, metrics).

        Under differentiation the whole schedule runs once, otherwise only forward actions. If a
        step computes in float16, forward actions run first and then the schedule, because the
        schedule must know the loss scale, the factor of the loss before differentiation.

        Args:
          inputs: [N, ...] leaves.
          targets: [N, ...] leaves.
          extras: [N, ...] leaves, by name, for every stage.
          has_aux: the option of `value_and_grad`; metrics have no gradient.
          weighed: the option of `value_and_grad`; weights have no gradient.
          num_microbatches: M of this call, if not the pipeline's.
        """
        plan = with_microbatches(self.plan, num_microbatches)
        operands = self._operands(
            inputs, targets, extras, "loss", has_aux=has_aux, weighed=weighed, plan=plan
        )
        with self._step("loss", operands) as (model, *arrays):
            found, kept = differentiable.loss(plan, model, _warn_of_memory, *arrays)
        self._keep(plan, model, kept)
        return meshes.typed(found, meshes.mesh_of_results(self.plan.mesh), PartitionSpec())

    @names_extras
    def value_and_grad(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        wrt: nnx.filterlib.Filter | None = None,
        loss_scale: Any = None,
        has_aux: bool = False,
        weighed: bool = False,
    ) -> tuple[Any, nnx.State[Any, Any]]:
        """Compute the mean loss and its gradients, laid out as ``nnx.state(pipe, pipe.wrt)``.

        With ``has_aux`` the result is ``((loss, metrics), gradients)``.

        Args:
          inputs: [N, ...] leaves.
          targets: [N, ...] leaves.
          extras: [N, ...] leaves, by name, for every stage.
          wrt: a filter of the variables that have gradients, like the option of `Pipeline`; by
            default all variables that the pipeline trains.
          loss_scale: a scalar, perhaps traced, by which the loss is multiplied before
            differentiation, so that small gradients do not vanish in float16. The returned
            gradients are multiplied by the scale; the returned loss is not. The caller divides the
            gradients by the scale, in float32, after a check for infinities and NaN, which mean
            that the scale was too large.
          has_aux: whether loss_fn returns (loss, metrics), where metrics are any tree whose entries
            have the forms that a loss may have. A pair (sum, weight) is returned as Σ sum / Σ
            weight over all microbatches and data shards; a float as the mean over microbatches with
            the weights of the loss; an integer is a count and is added up. Metrics are float32
            (counts int32) scalars on every rank, without gradients.
          weighed: whether the loss, and each metric that is not a count, is returned as `Weighed`
            (mean, weight). The mean over several batches is Σ mean * weight / Σ weight. Gradients
            of several batches are averaged in the same way, with the weights of their losses.

        Raises:
          ValueError: a batch, filter or scale that does not fit; a loss_fn that contradicts
            ``has_aux``; or the call is differentiated.
        """
        wrt, scale = self.plan.wrt if wrt is None else wrt, check_scale(loss_scale)
        operands = self._operands(
            inputs, targets, extras, "value_and_grad", wrt, has_aux, weighed=weighed
        )
        with (
            self._step("value_and_grad", operands) as operands,
            differentiable.refusing_twice(
                "value_and_grad() was differentiated, and it returns gradients itself: "
                "differentiate loss(), or call value_and_grad() alone"
            ),
        ):
            _warn_of_memory(self.plan, *operands)
            value, grads, _, kept = self.plan.lint.run(
                self.plan.entries.train, self.plan, *operands, scale=scale
            )
        self._keep(self.plan, operands[0], kept)
        value = meshes.typed(value, meshes.mesh_of_results(self.plan.mesh), PartitionSpec())
        grads = meshes.typed(grads, self.plan.home, jax.tree.leaves(gradient_specs(operands[0])))
        layout = jax.tree.structure(nnx.state(self, self._filter(wrt)))
        return value, jax.tree.unflatten(layout, jax.tree.leaves(grads))

    @names_extras
    def lower(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        optimizer: nnx.Optimizer[Any] | None = None,
    ) -> jax.stages.Lowered | list[jax.stages.Lowered]:
        """Trace the training step without compiling it, to see its memory or its HLO.

        Leaves of the batch and of the stages may be `jax.ShapeDtypeStruct`: nothing is run. With an
        optimizer the step includes its update, and weights and state are donated. With
        ``engine="programs"`` the result is a list with each program once: what ranks run before
        their first action, each kind of action, and the end of the step.

        Raises:
          ValueError: a batch or an optimizer that does not fit; an optimizer with
            ``stage_meshes=``.
        """
        from pipeline.insight.forecast.ahead import lower_programs, lower_step

        operands = self._untyped(self._operands(inputs, targets, extras, "lower"))
        if self.plan.engine == "programs":
            with self._entered():
                return lower_programs(self, optimizer, operands)
        if optimizer is not None:
            return lower_step(self, optimizer, inputs, targets, extras)
        with self._entered():
            _warn_of_memory(self.plan, *operands, runs=False)
            return runtime.train.lower(self.plan, *operands)

    @names_extras
    def trace(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        steps: int = 3,
        directory: str | os.PathLike[str] | None = None,
    ) -> Report:
        """Time each action of each rank, in seconds, in steps that run under `jax.profiler`.

        The result is a report of the clock "measured", which `schedules.drawing` can draw. Its
        costs are the mean durations of the actions of each stage, so that
        `schedules.differences(report)` explains the rest of the step's time. The step is compiled
        anew, and runs once before it is measured. Weights and random streams do not change.

        Args:
          inputs: the argument of `value_and_grad`.
          targets: the argument of `value_and_grad`.
          extras: the argument of `value_and_grad`.
          steps: the number of measured steps; the report is the median.
          directory: the folder for the profile, to open in XProf or Perfetto; by default the
            profile is deleted.

        Raises:
          ValueError: a batch that does not fit; plain accumulation on one rank, or a mesh of
            several processes; or a profile that does not show the actions.
        """
        from pipeline.insight.profile.run import trace

        operands = self._untyped(self._operands(inputs, targets, extras, "trace"))
        check_arrays("trace", operands)
        with self._entered():
            _warn_of_memory(self.plan, *operands)
            return trace(self.plan, operands, steps, directory)

    @names_extras
    def calibrate(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        rounds: int = 5,
        repeats: int = 16,
        split: bool = True,
        topology: None = None,
    ) -> Calibration:
        """Measure the durations of actions on the devices of the first rank, for ``costs``.

        Each action (F, B, I, W) of each distinct stage, the first with embed and the last with head
        and loss, is timed within the kernel, on microbatches of the size that these rows give. On a
        mesh of several ranks an exchange is timed too, and with ``offload`` a copy over the host
        link. Distinct stages are copied to these devices; weights do not change. With ``slices=``
        an action covers all slices of a microbatch, and ``costs.slices`` has the ratio of the
        slices.

        Args:
          inputs: arrays, the argument of `value_and_grad`.
          targets: arrays, the argument of `value_and_grad`.
          extras: arrays, the argument of `value_and_grad`.
          rounds: the number of times that each step is timed. Results are medians.
          repeats: the number of runs of an action within a step; short actions need more.
          split: whether I and W are measured too, which compiles a second program. Otherwise the
            result assumes that splitting gains nothing: I takes as long as B, and W no time.
          topology: removed; measure on devices of that kind, or give ``costs=``.

        Raises:
          TypeError: a topology.
          ValueError: arguments that do not fit, or a mesh of several processes or one that is in
            force.
          CalibrationError: contradictory times (the message names them and the remedy), or times
            whose spread is too large for a result.
        """
        from pipeline.insight.calibrate.measure import calibrate
        from pipeline.insight.forecast.bytes import predict
        from pipeline.insight.forecast.traffic import predict_traffic

        if topology is not None:
            raise TypeError(
                f"calibrate(topology={topology!r}) was removed: seconds from a compiler's text "
                f"were up to 22% wrong; call calibrate(inputs, targets) on devices of that kind, "
                f"or give Pipeline(costs=Costs(...))"
            )
        if self.plan.stage_meshes is not None:
            raise ValueError(
                "calibrate() runs all stages on the devices of one rank, and stage_meshes= gives "
                "each rank other devices: measure stages by pipe.trace(inputs, targets), whose "
                "report has costs, or calibrate pipe.replace(stage_meshes=None, mesh=mesh)"
            )
        given = inputs, targets, extras
        operands = self._operands(*given, "calibrate")
        check_arrays("calibrate", operands)

        def message() -> int:
            with self._entered():
                return predict_traffic(self.plan, *self._untyped(operands)).message

        def moved() -> int:
            if not self.plan.offload:
                return 0
            with self._entered():
                held = predict(self.plan, *self._untyped(operands))
            return max(held.host_stashes.each, held.host_crossings.each)

        timed = functools.partial(calibrate, rounds=rounds, repeats=repeats, split=split)
        return timed(self, type(self), *given, message=message, moved=moved)

    @names_extras
    def measure(
        self,
        inputs: Tree,
        targets: Tree,
        *,
        steps: int = 10,
        extras: dict[str, Tree] | None = None,
    ) -> Efficiency:
        """Measure the efficiency of a training step on the pipeline's devices, and its lost time.

        Steps without an optimizer are timed alternately with the actions of each rank alone. The
        result has ``step`` and ``ideal`` in seconds, ``efficiency`` = ideal / step, ``bubble`` and
        ``rest``; ``print`` shows each with its definition and spread. On a busy machine it still
        returns numbers, and adds a note. Weights and state stay as they are.

        Args:
          inputs: arrays, the argument of `value_and_grad`.
          targets: arrays, the argument of `value_and_grad`.
          steps: the number of timed steps.
          extras: arrays, the argument of `value_and_grad`.

        Raises:
          ValueError: arguments that do not fit.
        """
        from pipeline.insight.calibrate.efficiency import measure

        operands = self._operands(inputs, targets, extras, "measure")
        check_arrays("measure", operands)
        return measure(self.plan, self._untyped(operands), steps=steps)

    @names_extras
    def check(
        self, inputs: Tree, targets: Tree, *, extras: dict[str, Tree] | None = None
    ) -> list[str]:
        """List suspected mistakes of the model on such a batch; no step is compiled or run.

        The loss is tried on random numbers, to see whether it is a mean over rows; with split
        positions or slices also the other parts (`mixes_positions`). The list has parameters that
        no part reads or that a part reads from outside, parts that mix split positions, a loss that
        is no mean over rows, statistics that include padding, state that no code advances, mesh
        axes without work, weights that an axis does not divide, callbacks that make ranks of
        programs run one at a time, and too little memory. The constructor and the first step warn
        of these too. Warnings that only the constructor gives, such as devices without a stage, are
        not listed.

        Args:
          inputs: the argument of `value_and_grad`; leaves may be `jax.ShapeDtypeStruct`.
          targets: the argument of `value_and_grad`; leaves may be types too.
          extras: the argument of `value_and_grad`; leaves may be types too.

        Raises:
          ValueError: a batch or a model that `value_and_grad` refuses; or no loss.
        """
        from pipeline.lint.added import trace_step
        from pipeline.lint.outside import warn_of_parameters_read_from_outside
        from pipeline.lint.sharding import warn_of_undivided_weights

        # A new plan has given no warning yet, and has no trace.
        plan = self.plan.anew()
        _programs = plan.programs.make()  # keeps it alive: a plan has a weak reference
        ends = {"embed": self.embed, "head": self.head}
        loss_fn = getattr(self.ends, "loss_fn", None) or self.plan.loss_fn
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operands = self._operands(inputs, targets, extras, "check", plan=plan)
            model, *arrays = operands
            # Stages that are alike share their chunk's module, of which only the code is read.
            modules = self._by_stage(static_stage, self.chunks)
            warn_of_parameters_read_from_outside(modules, **ends, loss_fn=loss_fn)
            given = [*self.chunks, *ends.values(), loss_fn]
            warn_of_undivided_weights(self, plan, given)
            with self._entered():
                weights, batch = meshes.untyped(types(arrays), plan.mesh)
                _warn_of_memory(plan, model, weights, batch, runs=False)
                with plan.lint.trying_declared():
                    trace_step(plan, model, weights, batch)
        for one in caught:
            if not issubclass(one.category, ModelWarning):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        ours = [str(one.message) for one in caught if issubclass(one.category, ModelWarning)]
        return list(dict.fromkeys(ours))

    def _by_stage(self, take: Callable[[Any, int], Any], chunks: Iterable[Any]) -> list[Any]:
        """[K] results of ``take(chunk, rank)``, in layer order."""
        results = {
            k: take(chunk, rank)
            for rank, held in enumerate(self.plan.stages_of)
            for chunk, k in zip(chunks, held, strict=True)
        }
        return [results[k] for k in range(len(results))]

    def stages(self) -> list[nnx.Module]:
        """Return copies of the K whole stages in layer order.

        A write to a copy does not change the pipeline. To write weights in layer order, call
        ``nnx.update(pipe, pipe.from_layers(layers))``, with ``layers`` from `to_layers`.
        """
        is_typed = bool(self.plan.home.explicit_axes)
        with self._entered():
            chunks = list(self.chunks)
            if is_typed:
                chunks = [_with_state(chunk, meshes.untyped, self.plan.mesh) for chunk in chunks]
            whole = self._by_stage(take_stage, chunks)
        stages = [self.ignored.give_back(stage, k) for k, stage in enumerate(whole)]
        if is_typed:
            home = self.plan.home
            stages = [_with_state(stage, meshes.typed_as_they_lie, home) for stage in stages]
        self.origin.copies.returned(stages)
        return stages

    def replace(self, **options: Any) -> Self:
        """Make another pipeline of the same stages and weights, with other options.

        Other options are as given to the constructor; options that were left open are chosen anew.
        Weights are the current weights; later updates of one pipeline do not reach the other. An
        array that keeps its place is not copied, so do not donate the arrays of one pipeline and
        then use both. State of an optimizer is laid out like the weights: make a new optimizer if
        mesh, placement or ``data_parallel`` change, or convert its moments by `to_layers` and
        `from_layers`.

        Args:
          options: any argument of the constructor but ``stages``, such as ``num_microbatches=8``,
            ``schedule="zb_v"``, ``mesh=mesh`` or ``head=head``.

        Raises:
          TypeError: ``stages``, or an unknown option.
          ValueError: as the constructor.
        """
        from pipeline.layers_view.replace import check_changes, replaced

        check_changes(options)
        return replaced(self, options, Pipeline.__init__)

    @names_extras
    def offload_within(
        self,
        budget: int,
        inputs: Tree,
        targets: Tree,
        *,
        extras: dict[str, Tree] | None = None,
        optimizer: nnx.Optimizer[Any] | None = None,
    ) -> Self:
        """Make a pipeline with the fewest stashes in host memory that a device budget allows.

        Its ``offload`` is the smallest share with which a step fits, or None if a step fits without
        offload. Bytes are the compiler's: the step is compiled with no offload, and then for each
        share that is tried. Nothing is run. Weights are shared as by `replace`.

        Args:
          budget: bytes of each device that a step may take, arguments included.
          inputs: the argument of `value_and_grad`; leaves may be `jax.ShapeDtypeStruct`.
          targets: the argument of `value_and_grad`; leaves may be types too.
          extras: the argument of `value_and_grad`; leaves may be types too.
          optimizer: an optimizer whose state and update count too.

        Raises:
          ValueError: a budget below the bytes that must stay on the devices (the message has their
            number and the remedy); devices without host memory; or an optimizer of other
            parameters.
        """
        from pipeline.insight.forecast.step_memory import share_within

        operands = self._untyped(self._operands(inputs, targets, extras, "offload_within"))
        given = inputs, targets, extras
        return self.replace(offload=share_within(self, budget, optimizer, given, operands))

    def to_layers(self, tree: Tree) -> dict[str, Any]:
        """Convert a tree shaped like the parameters to the layer view.

        The result is ``{"stages": [K trees], "embed": tree, "head": tree}`` in layer order, as in
        the model without a pipeline. It does not depend on S, V or the placement; stages may
        differ.

        Args:
          tree: ``nnx.state(pipe, nnx.Param)``, gradients, an optimizer's moments; arrays (or types)
            with a leading axis of length S where the parameters have one, or labels. If the tree
            lacks the variables that ``wrt`` freezes, the layers lack them too.

        Raises:
          ValueError: a tree of another shape.
        """
        from pipeline.layers_view.convert import to_layers

        with self._entered():
            layers = to_layers(self, meshes.untyped(tree, self.plan.mesh))
        return meshes.typed_as_they_lie(layers, self.plan.home)

    def from_layers(self, layers: dict[str, Any]) -> nnx.State[Any, Any]:
        """Convert layers to a tree laid out as ``nnx.state(pipe, nnx.Param)`` or ``pipe.wrt``.

        This undoes `to_layers`. Arrays are placed like the parameters, so ``nnx.update(pipe,
        pipe.from_layers(layers))`` loads weights of the same model from any pipeline, or from a
        model without one. It also repairs a pipeline that received the state of a pipeline with
        another placement or other ranks.

        Raises:
          ValueError: other layers, or labels that differ between layers that share an array.
        """
        from pipeline.layers_view.convert import from_layers

        with self._entered():
            return from_layers(self, meshes.untyped(layers, self.plan.mesh))

    @names_extras
    def describe(
        self,
        inputs: Tree = None,
        targets: Tree = None,
        *,
        extras: dict[str, Tree] | None = None,
        optimizer: nnx.Optimizer[Any] | None = None,
        compiled: bool = False,
    ) -> str:
        """Describe the program, its placement, and its predicted cost.

        Bytes are those that types and timetable fix, for the given batch, whose leaves may be
        `jax.ShapeDtypeStruct`, or for the last training batch; without a batch only the bytes of
        weights and gradients are known. With an optimizer they include its state (`lower`). With
        ``compiled=True`` the step is compiled, and the compiler's bytes are shown next to them.
        These include the temporaries within an action, which only the compiler knows. Nothing is
        run.

        Raises:
          ValueError: ``compiled=True`` or an optimizer without a known batch; or an optimizer of
            other parameters.
        """
        from pipeline.insight.forecast.describe import check_targets, describe
        from pipeline.insight.forecast.describe_memory import describe_memory
        from pipeline.insight.forecast.step_memory import describe_step

        operands = None
        if inputs is not None:
            check_targets(self.plan, targets)
            operands = self._untyped(self._operands(inputs, targets, extras, "describe"))
        operands = operands or self.plan.facts.last
        if self.plan.engine == "programs" and operands is not None:
            from pipeline.insight.forecast.by_rank import describe_ranks

            with self._entered():
                memory = describe_ranks(self, operands, optimizer, compiled=compiled)
        elif optimizer is not None:
            memory = describe_step(self, optimizer, operands, compiled=compiled)
        else:
            state, trained = (self.chunks, self.ends), self.trained
            with self._entered():
                memory = describe_memory(
                    self.plan, *state, operands, trained=trained, compiled=compiled
                )
        lines = trained_lines(self.trained, self.chunks, self.ends, self.plan.stages_of)
        return describe(self.plan, self.chunks, [*lines, *memory])

    def _entered(self) -> AbstractContextManager[None]:
        """A context in which the kernel's mesh is in force, or none with programs."""
        programs = self.plan.engine == "programs"
        mesh = None if self.plan.stage_meshes else self.plan.mesh
        return meshes.entered(mesh, self.plan.home, programs=programs)

    @contextlib.contextmanager
    def _step(self, name: str, operands: Operands) -> Iterator[Operands]:
        """Return the operands of a call that computes; advance random streams and set the mesh."""
        check_arrays(name, operands)
        self.origin.copies.warn(self)
        with counting(self) as counts:
            model, weights, batch = operands
            if counts:  # the operands may hold copies of what counts
                rests = tuple(map(with_counts, weights.chunks_rest, self.chunks))
                of_ends = with_counts(weights.ends_rest, self.ends)
                weights = Weights(weights.chunks, weights.ends, rests, of_ends)
            operands = self._untyped((model, weights, batch))
            with self._entered():
                yield operands

    def _untyped(self, operands: Operands) -> Operands:
        """The operands as the kernel takes them: copies, where the weights have types."""
        model, weights, batch = operands
        return model, meshes.untyped(weights, self.plan.mesh), batch

    def _operands(
        self,
        inputs: Tree,
        targets: Tree,
        extras: Any,
        loss_for: str = "",
        wrt: Any = None,
        has_aux: bool | None = None,
        *,
        weighed: bool = False,
        plan: Plan | None = None,
    ) -> Operands:
        plan = self.plan if plan is None else plan
        if has_aux is not None:
            check_has_aux(has_aux, shared_head="head" in self.plan.shared)
        need("weighed", weighed, bool, "give True, for means with their weights, or False")
        if loss_for:
            from pipeline.lint.construction import warn_of_untyped_weights

            warn_of_untyped_weights(self.plan.home, plan.compiled.warned)
        flat = nnx.to_flat_state(nnx.state(self.chunks))
        check_layout("the pipeline", self.plan.stages_of, self.layout, flat)
        state, wrt = (self.chunks, self.ends), self.plan.wrt if wrt is None else wrt
        given = inputs, targets, extras, loss_for
        return make_operands(plan, *state, *given, wrt=wrt, has_aux=has_aux, weighed=weighed)

    def _keep(self, plan: Plan, model: Model, kept: StateLeaves) -> None:
        """Store the state that a step has written, if any, in the pipeline."""
        if (model.stages, model.ends) in plan.compiled.writes:
            specs = jax.tree.leaves(model.state_specs)
            kept = meshes.typed(kept, self.plan.home, specs)
            chunks, ends = kept
            keep_state([*self.chunks, self.ends], model.declared, [*chunks, ends])

    @property
    def trained(self) -> Trained:
        """The parameter leaves that have gradients."""
        return self._trained_by(self.plan.wrt)[0]

    def _trained_by(self, wrt: Any) -> tuple[Trained, nnx.filterlib.Filter]:
        """Resolve a filter to the trained leaves, and to a filter of the pipeline's own state."""
        stages, known = self.plan.stages_of, self.plan.compiled.trained
        return trained_by(wrt, self.chunks, self.ends, stages, known)

    def _filter(self, wrt: Any) -> nnx.filterlib.Filter:
        """Convert a filter of the plain model to a filter of the pipeline's own state."""
        if isinstance(wrt, type) and issubclass(wrt, nnx.Param):
            return wrt
        return self._trained_by(wrt)[1]


_ARGUMENTS = described(ModelParts, Options)
Pipeline.__doc__ = inspect.cleandoc(Pipeline.__doc__ or "").replace(
    "\n\nAttributes:", "\n".join(["\n\nArgs:", *_ARGUMENTS.values(), "\nAttributes:"])
)


def _entries_of(engine: str) -> Any:
    """The entry points of an engine."""
    if engine == "scan":
        return runtime
    from pipeline.core.programs import runtime as programs

    return programs


def _warn_of_memory(
    plan: Plan, model: Model, weights: Weights, batch: Batch, *, runs: bool = True, **wanted: bool
) -> None:
    """Remember a step's types; compare its memory only where a limit is known."""
    plan.facts.last = (model, *types((weights, batch)))
    if (limit := device_limit(plan)) is not None:
        from pipeline.insight.forecast.limit import warn_of_memory

        warn_of_memory(plan, limit, weights, batch, runs=runs, **wanted)


def _with_state(module: nnx.Module, change: Callable[..., Tree], *given: Any) -> nnx.Module:
    """A copy of a module whose state a function has changed."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, change(state, *given), copy=True)
