"""The loop of a training run: batches, steps, evaluation, checkpoints, records, and how it ends.

    trainer = Trainer(Step(pipe, optimizer), data, steps=1000, checkpoints=Checkpoints("run"))
    trainer.resume()
    trainer.run()

The host is one step ahead of the devices: a step's metrics are read while the next step runs.
Measured are a step's seconds (from the end of the previous step), the wait for its batch, and
memory. The division into compute, bubble and communication is predicted by the clock that the
pipeline was lowered for. It uses the costs of `Pipeline(costs=)`, or F = I = W and messages that
take no time.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.arguments import is_number, is_whole
from pipeline.base.chips import CHIPS
from pipeline.facade import Weighed, with_microbatches
from pipeline.pipeline import Pipeline
from pipeline.training import accumulation
from pipeline.training.batches import Batch, Resumable, as_batch
from pipeline.training.faults import Watchdog
from pipeline.training.records import Record, Recorder
from pipeline.training.scaling import DynamicScale, NotFiniteError
from pipeline.training.step import Step
from pipeline.training.update import Metrics, mean_like
from schedules import simulate

Hook = Callable[["Trainer", Record], None]
# A runtime's names of chips in the planner's table, in the order of the search.
KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
    "H100": "h100",
    "A100": "a100",
}


@dataclass
class _Running:
    """A step whose metrics have not been read yet."""

    number: int
    metrics: Metrics
    batch: Batch
    tokens: int
    waited: float


class Trainer:
    """A run of training steps.

    Args:
      step: the training step to repeat.
      data: an iterable of batches, as `pipeline.training.batches.as_batch` takes them. Data whose
        iterator has ``get_state`` and ``set_state``, such as grain's, can be resumed.
      steps: the number of updates of the whole run, including updates before it was resumed.
      batches_per_update: the plan of the batch size, {update: number}: from this update on, so many
        batches of the data make one update, such as {0: 1, 1000: 2}. A pipeline runs them as one
        step of so many times its M microbatches; another model accumulates.
      evaluation: batches for evaluation: an iterable that can be iterated again, or a function that
        returns an iterable.
      eval_interval: the number of updates between evaluations; 0: only at the end.
      patience: the number of evaluations in a row without a lower loss after which the run ends
        (early stopping); None trains to the last step. A checkpoint keeps the count.
      min_delta: by how much a loss must be lower than the lowest to count.
      eval_ema: whether the mean of the weights is evaluated in place of the weights.
      checkpoints: the storage of states: `Checkpoints`, or an object with the same ``save``,
        ``restore``, ``close`` and perhaps ``wait``; None saves nothing.
      checkpoint_interval: the number of updates between checkpoints; 0: only when the run ends or
        is stopped.
      recorders: receivers of the record of every step, on process 0.
      hooks: functions of the trainer and a step's record, called as soon as the record is known.
      stop: a function called before each step; a true result ends the run, after a checkpoint.
      flush: whether data that end within an update end with an update of its calls so far
        (`Step.flush`), in place of an error.
      stop_after: the number of consecutive updates that are not finite, after which the run ends.
      stuck_after: the seconds after which a hanging step ends the process with a message
        (`pipeline.training.faults.Watchdog`); None waits for ever.
      flops_per_token: the model's operations per token; by default counted (`count_flops`).
      peak_flops: a device's peak operations a second; by default from the planner's table.

    Attributes:
      is_resumable: whether the data have a position, so that the run can resume from a checkpoint.
      done: the number of updates so far.
      losses: the losses of this process's updates, as far as known.
      seconds: the time of each update.
      eval_loss: the last evaluation's loss; `evaluated` is the number of updates before that
        evaluation.

    Raises:
      ValueError: invalid intervals, or an interval without evaluation or checkpoints; or a model
        that checkpoints cannot save.
    """

    def __init__(
        self,
        step: Step,
        data: Iterable[Any],
        *,
        steps: int,
        batches_per_update: Mapping[int, int] | None = None,
        evaluation: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
        eval_interval: int = 0,
        patience: int | None = None,
        min_delta: float = 0.0,
        eval_ema: bool = False,
        checkpoints: Any = None,
        checkpoint_interval: int = 0,
        recorders: Sequence[Recorder] = (),
        hooks: Sequence[Hook] = (),
        stop: Callable[[], object] | None = None,
        flush: bool = False,
        stop_after: int = 20,
        stuck_after: float | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        for name, value, least in (
            ("steps", steps, 1),
            ("eval_interval", eval_interval, 0),
            ("checkpoint_interval", checkpoint_interval, 0),
            ("stop_after", stop_after, 1),
            ("patience", 1 if patience is None else patience, 1),
        ):
            if not is_whole(value, least):
                raise ValueError(f"{name}={value!r}: must be a whole number >= {least}")
        if stuck_after is not None and not 0 < stuck_after < math.inf:
            raise ValueError(
                f"stuck_after={stuck_after!r}: must be a number of seconds > 0, or None to wait "
                f"for ever"
            )
        if eval_interval and evaluation is None:
            raise ValueError(
                f"eval_interval={eval_interval}: there is no evaluation=; give batches"
            )
        if not is_number(min_delta) or not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta={min_delta!r}: must be a finite number >= 0")
        if patience is not None and not eval_interval:
            raise ValueError(
                f"patience={patience}: it counts evaluations; give evaluation= and eval_interval="
            )
        if checkpoint_interval and checkpoints is None:
            raise ValueError(
                f"checkpoint_interval={checkpoint_interval}: there are no checkpoints=; give "
                f"Checkpoints(folder)"
            )
        if not isinstance(step, Step):
            raise ValueError(
                f"Trainer(step) is a {type(step).__name__}: give the function of a training step, "
                f"Step(pipe, optimizer)"
            )
        if checkpoints is not None and not hasattr(checkpoints, "save"):
            raise ValueError(
                f"checkpoints={checkpoints!r}: give Checkpoints(folder), of pipeline.checkpoints"
            )
        plan = {} if batches_per_update is None else dict(batches_per_update)
        accumulate = 1 if step.joins else step.accumulate  # an earlier trainer has set it
        if plan and (fault := fault_of_plan(plan, accumulate)):
            raise ValueError(f"batches_per_update={batches_per_update!r}: {fault}")
        step.joins = bool(plan) and isinstance(step.model, Pipeline)
        self._plan = plan or {0: step.accumulate}
        self.step, self.steps = step, steps
        self.data: Iterator[Any] = iter(data)
        self.is_resumable = _has_position(self.data)
        self._evaluation, self._eval_interval = evaluation, eval_interval
        self._eval_ema, self._patience, self._min_delta = eval_ema, patience, min_delta
        self._lowest, self._without = math.inf, 0  # of evaluations, and those since without a lower
        self._checkpoints, self._checkpoint_interval = checkpoints, checkpoint_interval
        if hasattr(checkpoints, "check"):  # hours before the first save
            checkpoints.check(step.model, step.optimizer, shaped=step.shaped())
        self._recorders = tuple(recorders) if jax.process_index() == 0 else ()
        self._hooks, self._stop, self._stop_after = tuple(hooks), stop, stop_after
        self._stuck_after, self._flush = stuck_after, flush
        self._watchdog: Watchdog | None = None
        self.done, self.losses, self.seconds = 0, list[float](), list[float]()
        self.eval_loss: float | None = None
        self.evaluated = self._saved = -1
        self._position: Any = None  # the data position at the start of the current update
        self._drawn: Batch | None = None  # a batch that no step has used, because one raised
        self._used: Any = None  # the batch of the last call
        self._ended = 0.0
        self._shares = predicted(step.model)
        counted = count_flops(step.model)
        self._flops = counted if flops_per_token is None else flops_per_token
        leaves = jax.tree.leaves(nnx.state(step.model, nnx.Param))
        devices = sorted({d for x in leaves for d in x.sharding.device_set}, key=lambda d: d.id)
        peak = find_peak_flops(devices[0]) if peak_flops is None else peak_flops
        self._peak = None if peak is None else peak * len(devices)

    # --- the loop

    def resume(self, *, ignore: Collection[str] = (), strict: bool = True) -> int | None:
        """Resume from the newest checkpoint; return its step, or None if there is no checkpoint.

        Args:
          ignore: what of the checkpoint is not restored (`Checkpoints.restore`). A running mean
            that is not restored starts at the restored weights.
          strict: False leaves moments and means that do not fit, and prints them.

        Raises:
          ValueError: no checkpoints to resume from, or data without a position.
        """
        if self._checkpoints is None:
            raise ValueError("resume() has nothing to resume from; give checkpoints=")
        if not self.is_resumable and "data" not in ignore:
            raise ValueError(
                f"resume() cannot say where in the data the run was: {type(self.data).__name__} "
                f"has no get_state() and set_state(); give an iterator that has, as those of "
                f"grain, or ignore=('data',) to begin with its first batch"
            )
        step = self.step
        shaped, plain = step.shaped(), {"step": step.plain()}
        step_number = self._checkpoints.restore(
            step.model,
            step.optimizer,
            shaped=shaped,
            plain=plain,
            data=self.data,
            **({"ignore": ignore} if ignore else {}),
            **({} if strict else {"strict": False}),
        )
        if step_number is not None:
            if "shaped" in ignore and step.ema is not None:
                shaped = {"ema": mean_like(nnx.state(step.model, step.optimizer.wrt))}
            saved = dict(plain["step"])
            self._lowest, self._without = saved.pop("patience", (math.inf, 0))
            step.load(shaped, saved)
            self.done = self._saved = step_number
            self.evaluated, self.eval_loss, self._position, self._drawn = -1, None, None, None
        return step_number

    def run(self) -> bool:
        """Train to the end; return whether the run was finished, not stopped.

        The method returns, or raises, when all checkpoints are on disk. If an exception ends the
        run (from a hook, from the data, Ctrl-C), the last update is saved first. It is not saved if
        the exception came within an update, or if there are several processes, which must save
        together.

        Raises:
          NotFiniteError: too many updates in a row were not finite.
          ValueError: the data ended, or had no batch.
          CheckpointError: the last checkpoint could not be written.
        """
        if self._stuck_after is not None:
            model = self.step.model
            mesh = model.mesh if isinstance(model, Pipeline) else None
            self._watchdog = Watchdog(self._stuck_after, mesh)
        before = self.done - self.step.updates
        try:
            with self._watchdog or contextlib.nullcontext():
                ended = self._run()
        except BaseException as error:
            if isinstance(error, NotFiniteError):  # reported: a resumed run counts from 0
                self.step.load(self.step.shaped(), self.step.plain() | {"in_a_row": 0})
            self.done = before + self.step.updates
            self._save_after(error)
            raise
        self._wait()
        return ended

    def _save_after(self, error: BaseException) -> None:
        """Save a whole state after an exception; note a failed save on the exception."""
        try:
            if self.done > 0 and self.step.is_whole and jax.process_count() == 1:
                self.save()
            self._wait()
        except Exception as failure:  # noqa: BLE001  # the run's own error is the one to raise
            error.add_note(f"the state after update {self.done} is not saved: {failure}")

    def _wait(self) -> None:
        """Wait for the running save; checkpoints that save at once need no method `wait`."""
        try:
            getattr(self._checkpoints, "wait", lambda: None)()
        except BaseException:
            self._saved = -1  # so that `save` tries again
            raise

    def _run(self) -> bool:
        running: _Running | None = None
        self._ended = time.perf_counter()
        while self.done < self.steps and not self._is_patience_over():
            if self._stop is not None and self._stop():
                self._finish(running)
                self.save()
                return False
            if self._watchdog is not None:
                self._watchdog.beat(self.done + 1)
            running = self._next(running)
            if self._is_due(self._eval_interval) or self._is_due(self._checkpoint_interval):
                self._finish(running)
                running = None
                if self._is_due(self._eval_interval) and self.evaluated != self.done:
                    self.evaluate()
                if self._is_due(self._checkpoint_interval):
                    self.save()
                self._ended = time.perf_counter()
        self._finish(running)
        if self._evaluation is not None and self.evaluated != self.done:
            self.evaluate()
        self.save()
        if self._is_patience_over():
            text = f"ended after {self.done} of {self.steps} updates: the held-out loss was not "
            text += f"below {self._lowest:.6g} in {self._without} evaluations"
            self._tell({"step": self.done, "event": "early stopping", "text": text})
        return True

    def _is_patience_over(self) -> bool:
        return self._patience is not None and self._without >= self._patience

    def _finish(self, running: _Running | None) -> None:
        """Wait for the step that is running; the watchdog watches no step after it."""
        self._read(running)
        if self._watchdog is not None:
            self._watchdog.rest()

    def evaluate(self) -> float:
        """Compute the weighted mean loss over all batches of the evaluation.

        Raises:
          ValueError: there is no evaluation, or it has no batch.
        """
        if self._evaluation is None:
            raise ValueError("evaluate() has nothing to evaluate on; give evaluation=")
        batches = self._evaluation() if callable(self._evaluation) else self._evaluation
        self.eval_loss, metrics = means(self.step, batches, ema=self._eval_ema)
        if self.evaluated != self.done:
            is_lower = self.eval_loss < self._lowest - self._min_delta
            self._lowest = self.eval_loss if is_lower else self._lowest
            self._without = 0 if is_lower else self._without + 1
        self.evaluated = self.done
        more = {} if metrics is None else {"eval_metrics": metrics}
        self._tell({"step": self.done, "eval_loss": self.eval_loss, **more})
        return self.eval_loss

    def save(self) -> None:
        """Save the state now, if the trainer has checkpoints and the state is not saved yet."""
        if self._checkpoints is None or self._saved == self.done:
            return
        step = self.step
        known = self.eval_loss if self.evaluated == self.done else None
        unknown = {} if self._evaluation is None else {"eval_loss": math.nan}
        plain = {"step": step.plain()}
        if self._patience is not None and self._lowest < math.inf:
            plain["step"]["patience"] = [self._lowest, self._without]
        # The data position at which the current update began.
        began = self._position
        place = None if began is None else SimpleNamespace(get_state=lambda: began)
        with warnings.catch_warnings():
            if began is not None:  # a resumed run repeats the calls of the update
                warnings.filterwarnings("ignore", "the checkpoint of step .* of an update")
            self._checkpoints.save(
                self.done,
                step.model,
                step.optimizer,
                shaped=step.shaped(),
                plain=plain,
                data=self.data if self.is_resumable and place is None else place,
                metrics=unknown if known is None else {"eval_loss": known},
            )
        self._saved = self.done

    def close(self) -> None:
        """Wait for checkpoints, and close recorders."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        for recorder in self._recorders:
            recorder.close()

    # --- one step

    def _next(self, before: _Running | None) -> _Running:
        """Start an update, and read the metrics of the previous update while it runs."""
        if before is not None and _is_ready(before.metrics.loss):
            self._read(before)  # its seconds must not include the wait for the next batch
            before = None
        waited, tokens, metrics = 0.0, 0, None
        is_first = not self.step.pending and self._drawn is None
        if not self.step.pending:
            count = self._plan[max(start for start in self._plan if start <= self.done)]
            if count != self.step.accumulate:
                self.step.accumulate, self._shares = count, predicted(self.step.model, count)
        if is_first and self._checkpoints is not None and self.is_resumable:
            self._position = copy.deepcopy(cast("Resumable", self.data).get_state())
        while metrics is None:
            start = time.perf_counter()
            batch = self._batch()
            if batch is None:
                metrics = self.step.flush()
                self._position = None
                break
            # A batch that arrives while the devices are busy has cost them no time.
            if before is None or _is_ready(before.metrics.loss):
                waited += time.perf_counter() - start
            tokens += tokens_of(batch)
            metrics = self._use(batch)
        self.done += 1
        self._read(before)
        return _Running(self.done, cast("Metrics", metrics), self._used, tokens, waited)

    def _use(self, batch: Batch) -> Metrics | None:
        """Call the step on the batch that was drawn; a call without an effect keeps the batch."""
        self._used = batch
        is_one_step = self.step.accumulate == 1 or self.step.joins
        weight = None if is_one_step else _weight(self.step, batch)
        updates, pending = self.step.updates, self.step.pending
        try:
            metrics = self.step(batch.inputs, batch.targets, extras=batch.extras, weight=weight)
        except Exception:
            self._drawn = None  # a batch that the step refuses is not tried again
            raise
        finally:  # an interrupt may come while the devices of a finished call are waited for
            if self.step.updates > updates:
                self._drawn = self._position = None
            elif self.step.pending > pending:
                self._drawn = None
        return metrics

    def _batch(self) -> Batch | None:
        """Draw a batch; None if the data end within an update that is to be flushed."""
        if self._drawn is None:
            pending = self.step.pending
            try:
                self._drawn = as_batch(next(self.data))
            except StopIteration:
                if pending and self._flush:
                    return None
                updates = f"{self.done} of {self.steps} updates"
                if pending:
                    updates += (
                        f" and {pending} of {self.step.accumulate} calls of the next, which have "
                        f"no effect without flush=True"
                    )
                raise ValueError(
                    f"the data ended after {updates}; give data that repeats, or fewer steps"
                ) from None
        return self._drawn

    def _read(self, running: _Running | None) -> None:
        """Wait for a step and record it; fail after too many steps that are not finite."""
        if running is None:
            return
        metrics = cast("Metrics", jax.device_get(running.metrics))
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        self.losses.append(float(metrics.loss))
        self.seconds.append(seconds)
        record = self._record(running, metrics, seconds)
        self._tell(record)
        for hook in self._hooks:
            hook(self, record)
        if not metrics.finite:
            self._say_skipped(running, metrics)

    def _record(self, running: _Running, metrics: Metrics, seconds: float) -> dict[str, Any]:
        waited = min(running.waited, seconds)
        rest = seconds - waited
        split = {name: rest * share for name, share in self._shares._asdict().items()}
        record: dict[str, Any] = {
            "step": running.number,
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            "skipped": int(metrics.skipped),
            "seconds": {"step": seconds, "input": waited, **split},
            "predicted": list(split),
            "tokens_per_second": running.tokens / seconds,
        }
        if self.step.has_aux:
            record["metrics"] = jax.tree.map(lambda x: x.item(), metrics.aux)
        if metrics.experts is not None:
            record["experts"] = jax.tree.map(lambda x: x.tolist(), metrics.experts)
        for name in ("learning_rate", "layer_norms"):
            if (value := getattr(metrics, name)) is not None:
                record[name] = jax.tree.map(float, value)
        if self.step.scaling is not None:
            record["loss_scale"] = float(metrics.loss_scale)
        if self._peak:
            record["mfu"] = self._flops * running.tokens / seconds / self._peak
        if (used := memory()) is not None:
            record["memory"] = used
        return record

    def _say_skipped(self, running: _Running, metrics: Metrics) -> None:
        text = "not finite: weights, optimizer and mean stay as they were"
        if isinstance(self.step.scaling, DynamicScale):
            scale = float(metrics.loss_scale)
            fallen = max(scale / self.step.scaling.factor, self.step.scaling.least)
            text += f"; the loss scale falls from {scale:g} to {fallen:g}"
        self._tell({"step": running.number, "event": "skipped", "text": text})
        if metrics.in_a_row < self._stop_after:
            return
        batch = running.batch
        why = self.step.diagnose(batch.inputs, batch.targets, extras=batch.extras)
        count, last = int(metrics.in_a_row), running.number
        which = f"update {last} was not finite"
        if count > 1:
            which = f"updates {last - count + 1} to {last} were not finite, {count} in a row"
        raise NotFiniteError(f"{which}: {why}")

    def _tell(self, record: Record) -> None:
        for recorder in self._recorders:
            recorder.write(record)

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.done % interval == 0


def means(step: Step, batches: Iterable[Any], *, ema: bool = False) -> tuple[float, Any]:
    """Compute the weighted mean loss over all batches, and the metrics, or None if it has none.

    A batch without a weight has the weight of its loss (see `Step`), or its number of rows. With
    ``ema`` the running mean of the weights is evaluated. Counts in the metrics are added.

    Raises:
      ValueError: there is no batch, or all weights are 0.
    """
    total: Any = None
    for item in batches:
        batch = as_batch(item)
        weight = _weight(step, batch)
        call = step.eval_step(
            batch.inputs, batch.targets, extras=batch.extras, ema=ema, weighed=weight is None
        )
        if weight is not None:
            accumulation.check_weight(weight)
            call = accumulation.with_weight(call, jnp.float32(weight))
        if total is None:
            total = jax.tree.map(jnp.zeros_like, call)
        total = accumulation.plus_weighed(total, call)
    if total is None:
        raise ValueError(
            "the evaluation gave no batch; give a list, or an iterable that can start again: an "
            "iterator ends with the first evaluation"
        )
    loss: Weighed = total[0] if step.has_aux else total
    if not float(loss.weight):
        raise ValueError("the evaluation has no batch in which anything counts")
    mean = jax.tree.map(lambda x: x.item(), jax.device_get(accumulation.mean_weighed(total)))
    return mean if step.has_aux else (mean, None)


def _weight(step: Step, batch: Batch) -> float | None:
    """Return the weight of a batch; None if the model's loss returns a weight."""
    return batch.weight if step.weighs else batch.counts


def _has_position(data: Any) -> bool:
    """Tell whether data have a position; derived batches have one only if their source does."""
    if not isinstance(data, Resumable):
        return False
    try:
        data.get_state()
    except ValueError:
        return False
    return True


def _is_ready(array: Any) -> bool:
    return bool(array.is_ready())


class Shares(NamedTuple):
    """Predicted shares of a step on all ranks; their sum is 1.

    Attributes:
      compute: the share in which ranks work.
      bubble: the share in which ranks wait for work of other ranks.
      communication: the share in which ranks wait for messages.
    """

    compute: float
    bubble: float
    communication: float


def fault_of_plan(plan: Mapping[Any, Any], accumulate: int) -> str:
    """Say what is wrong with a plan of batches for each update; "" if nothing is."""
    if accumulate != 1:
        return f"and accumulate={accumulate}; give one of the two"
    is_fitting = all(is_whole(start, 0) and is_whole(plan[start], 1) for start in plan)
    if not is_fitting or 0 not in plan:
        return "must be {update: number}, whole numbers >= 0 and >= 1, with an entry for update 0"
    return ""


def predicted(model: Any, calls: int = 1) -> Shares:
    """Predict the shares of a pipeline's step by its clock; other models have only compute.

    Args:
      calls: the number of batches that the step runs, each of M microbatches.
    """
    if not isinstance(model, Pipeline):
        return Shares(1.0, 0.0, 0.0)
    plan = with_microbatches(model.plan, calls * model.num_microbatches)
    report = simulate(plan.schedule, **plan.clock)
    whole = report.makespan * len(report.work)
    sent = sum(part["communication"] for part in report.explain().parts) / whole
    compute = min(1.0, sum(report.work) / whole)
    return Shares(compute, max(0.0, 1.0 - compute - sent), sent)


def tokens_of(batch: Batch) -> int:
    """Count the tokens of an integer input [N, t], or the rows of any other input."""
    leaves = jax.tree.leaves(batch.inputs)
    shape = np.shape(leaves[0]) if leaves else ()
    is_words = len(shape) > 1 and jnp.issubdtype(leaves[0].dtype, jnp.integer)
    return math.prod(shape) if is_words else batch.rows


def count_flops(model: Any) -> float:
    """Count 6 operations for each number of each matrix: products of forward and backward.

    Matrices are the parameters with two axes or more in the model without a pipeline; a pipeline's
    embed is a lookup and does not count. Attention scores and recomputation do not count.
    """
    weights = nnx.state(model, nnx.Param)
    layers: Any = weights
    if isinstance(model, Pipeline):
        layers = jax.eval_shape(model.to_layers, weights)
        layers = {name: part for name, part in layers.items() if name != "embed"}
    return 6.0 * sum(x.size for x in jax.tree.leaves(layers) if x.ndim > 1)


def find_peak_flops(device: jax.Device) -> float | None:
    """Return a device's peak bfloat16 operations a second; None for a device not in the table."""
    name = next((chip for kind, chip in KINDS.items() if kind in device.device_kind), None)
    return None if name is None else CHIPS[name].flops


def memory() -> int | None:
    """Return the most bytes that a device of this process holds, or else the process's bytes.

    The result is None if neither is known.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [one["bytes_in_use"] for one in stats if "bytes_in_use" in one]
    return max(used) if used else resident()


def resident() -> int | None:
    """Return the bytes of this process in main memory; None if the system does not report them."""
    if sys.platform != "linux":
        return None
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    memory_lines = [line.split() for line in lines if line.startswith("VmRSS:")]
    return 1024 * int(memory_lines[0][1]) if memory_lines else None
