"""Runs of a configuration by ``python -m pipeline``: train, evaluate, generate.

A configuration is checked completely before a device is used. Then the model is made, and only then
a folder.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import optax
from flax import nnx

from pipeline.base.chips import CHIPS
from pipeline.base.files import read_json
from pipeline.optimizer import make_optimizer
from pipeline.pipeline import Pipeline
from pipeline.training.batches import as_batch, masked, padded
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.config import Config, RunConfigError, load
from pipeline.training.faults import stop_on_signals
from pipeline.training.generation import continue_prompt
from pipeline.training.records import JsonLines, Progress, Recorder, TensorBoard
from pipeline.training.step import DynamicScale, NotFiniteError, Step
from pipeline.training.trainer import Trainer, means
from pipeline.training.update import mean_like, take_mean
from schedules.core.files import replace
from schedules.tools.text import say

PARTS = {"stages", "embed", "head", "loss_fn", "sharding", "ignore", "wrt", "costs", "read"}
PARTS |= {"batch", "state", "after_step"}
EXITS = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}
NO_POSITION = "the data have no get_state() and set_state(), as the iterators of grain have"
NOT_FINITE = 1


def make_model(config: Config) -> Any:
    """Make a pipeline of the parts that the model's function returns; a module stays as it is."""
    source = config.source
    made, name = source.call(), source.function
    if config.parallel is None:
        if isinstance(made, nnx.Module):
            return made
        raise RunConfigError(
            f"model.function={name!r} returned a {type(made).__name__}; without [parallel] it "
            f"returns an nnx.Module with a loss(inputs, targets)"
        )
    if not isinstance(made, dict) or not {"stages", "loss_fn"} <= set(made) <= PARTS:
        keys = f" of {', '.join(map(str, made))}" if isinstance(made, dict) else ""
        raise RunConfigError(
            f"model.function={name!r} returned a {type(made).__name__}{keys}; with [parallel] it "
            f"returns a dict of stages, loss_fn and what else there is of "
            f"{', '.join(sorted(PARTS - {'stages', 'loss_fn'}))}"
        )
    if config.data.pad:
        made = made | {"loss_fn": masked(made["loss_fn"])}
    rest = {key: value for key, value in made.items() if key not in ("stages", "read")}
    pipe = Pipeline(made["stages"], **config.arguments(others=rest))
    if "read" in made:
        made["read"](pipe)
    return pipe


def make_trainer(
    config: Config,
    *,
    checkpoints: Checkpoints | None = None,
    recorders: Sequence[Recorder] = (),
    **options: Any,
) -> Trainer:
    """Prepare the run of a configuration, without starting it."""
    model, own, run = make_model(config), config.optimizer, config.run
    tx: Any = own.transformation()
    if isinstance(model, Pipeline):
        optimizer: Any = make_optimizer(model, tx)
    else:
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = Step(
        model,
        optimizer,
        clip=own.clip,
        ema=own.ema,
        accumulate=own.accumulate,
        loss_scale=DynamicScale() if own.loss_scale == "dynamic" else own.loss_scale,
        has_aux=_has_metrics(model),
        learning_rate=own.rate(),
        layer_norms=own.layer_norms,
        compiler_options=None if run.compiler_options == "none" else run.compiler_options,
    )
    evaluation = config.evaluation
    return Trainer(
        step,
        _data(config, model, config.data.call()),
        steps=run.steps,
        evaluation=None if evaluation is None else lambda: _data(config, model, evaluation.call()),
        eval_interval=0 if evaluation is None else evaluation.interval,
        eval_ema=evaluation is not None and evaluation.ema,
        patience=None if evaluation is None else evaluation.patience,
        min_delta=0.0 if evaluation is None else evaluation.min_delta,
        checkpoints=checkpoints,
        checkpoint_interval=run.checkpoint_interval if checkpoints is not None else 0,
        recorders=recorders,
        batches_per_update=own.plan(),
        flush=own.flush,
        stop_after=run.stop_after,
        stuck_after=run.stuck_after,
        flops_per_token=run.flops_per_token,
        peak_flops=None if run.chip is None else CHIPS[run.chip].flops,
        **options,
    )


def train(config: Config, *, resume: bool, how: str, measure: bool = False) -> int:
    """Train to the end, or until a signal; print ``how`` to resume; return the exit code."""
    folder, checkpoints = _open(config, resume=resume, measure=measure)
    text = json.dumps(config.to_dict(), indent=1, default=str)

    def keep(trainer: Trainer, _: Any) -> None:
        """Write the configuration after the first update, in place of the previous one."""
        if len(trainer.losses) == 1:
            replace(f"{text}\n", folder / "config.json")

    recorders: list[Recorder] = [JsonLines(folder / "log.jsonl"), Progress(config.run.steps)]
    if config.run.tensorboard:
        recorders.append(TensorBoard(folder / "tensorboard"))
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        for recorder in recorders:
            stack.callback(recorder.close)
        stack.enter_context(checkpoints)
        watching: dict[str, Any] = {"recorders": recorders, "hooks": [keep], "stop": stop}
        trainer = make_trainer(config, checkpoints=checkpoints, **watching)
        if resume and (step := trainer.resume()) is not None:
            _say(f"going on after update {step}, from {checkpoints.folder}")
        elif resume:
            _say(f"nothing to resume in {checkpoints.folder}: starting with update 1")
        if not trainer.is_resumable:
            _say(f"a run that is stopped cannot go on: {NO_POSITION}")
        try:
            ended = trainer.run()
        except NotFiniteError as error:
            _say(f"stopped: {error}; {checkpoints.folder} holds the weights before them")
            return NOT_FINITE
    if not ended:
        done = f"after update {trainer.done} of {config.run.steps}"
        rest = f"go on with: {how}" if trainer.is_resumable else f"it cannot go on: {NO_POSITION}"
        _say(f"stopped by {stop.reason} {done}; {rest}")
        return EXITS.get(stop.reason, EXITS["SIGTERM"])
    if trainer.eval_loss is not None:
        _report(f"held-out loss {trainer.eval_loss:.4f}")
    if measure:
        _report(_measured(config, trainer.step.model))
    return 0


def _open(config: Config, *, resume: bool, measure: bool) -> tuple[Path, Checkpoints]:
    config.check_functions()
    if measure and config.parallel is None:
        raise RunConfigError("--measure is for pipelines, and the configuration has no [parallel]")
    folder = Path(config.run.folder)
    path = folder / "config.json"
    if path.exists() and not (folder / "checkpoints").exists() and not _is_run_config(path):
        raise RunConfigError(
            f"run.folder={str(folder)!r} holds a config.json of something else, which the run "
            f"would replace: name another folder"
        )
    checkpoints = Checkpoints(folder / "checkpoints", config.run.keep, config.run.best)
    if checkpoints.steps and not resume:
        raise RunConfigError(
            f"run.folder={str(folder)!r} holds a run of {checkpoints.steps[-1]} updates: go on "
            f"with --resume, or name another folder"
        )
    return folder, checkpoints


def _is_run_config(path: Path) -> bool:
    try:
        return "run" in read_json(path)
    except ValueError:
        return False


def _measured(config: Config, model: Any) -> str:
    """Measure a step on the first batch of the data; a failure does not change the exit code."""
    try:
        batch = as_batch(next(iter(_data(config, model, config.data.call()))))
        return str(model.measure(batch.inputs, batch.targets, extras=batch.extras))
    except StopIteration:
        return "not measured: the data have no batch"
    except Exception as error:  # noqa: BLE001  # errors of the user's data, of devices or of the clock
        return f"not measured: {str(error) or type(error).__name__}"


def evaluate(config: Config) -> float:
    """Compute the held-out loss of the newest checkpoint."""
    if config.evaluation is None:
        raise RunConfigError("[evaluation] is missing: what is to be evaluated on")
    config.check_functions()
    model = restored(config, ema=config.evaluation.ema)
    optimizer = nnx.Optimizer(model, optax.identity(), wrt=getattr(model, "wrt", nnx.Param))
    step = Step(model, optimizer, donate=False, has_aux=_has_metrics(model))
    return means(step, _data(config, model, config.evaluation.call()))[0]


def restored(config: Config, *, ema: bool = False) -> Any:
    """Make the model with the weights of the newest checkpoint, or with their mean."""
    folder = Path(config.run.folder) / "checkpoints"
    if not folder.is_dir():
        raise RunConfigError(f"run.folder={config.run.folder!r}: there is no {folder}; train first")
    checkpoints = Checkpoints(folder, read_only=True)
    model = make_model(config)
    wrt = getattr(model, "wrt", nnx.Param)
    shaped = {"ema": mean_like(nnx.state(model, wrt))} if ema else None
    ignored = ("optimizer", "plain", "data", *(() if ema else ("shaped",)))
    if checkpoints.restore(model, shaped=shaped, ignore=ignored) is None:
        raise RunConfigError(f"run.folder={config.run.folder!r}: there is no checkpoint")
    if shaped is not None:
        take_mean(model, shaped["ema"], wrt)
    return model


def continued(config: Config, prompt: str, *, tokenizer: str | None, **options: Any) -> str:
    """Continue a prompt with the newest checkpoint; a tokenizer of None takes bytes."""
    config.check_functions()
    words: Any = None if tokenizer is None else load(tokenizer)()
    tokens = list(prompt.encode()) if words is None else words.encode(prompt)
    if not tokens:
        raise RunConfigError("--prompt is empty: give a token or more to begin with")
    tokens = continue_prompt(restored(config), tokens, **options)
    return bytes(tokens).decode(errors="replace") if words is None else str(words.decode(tokens))


def _has_metrics(model: Any) -> bool:
    loss_fn = model.plan.loss_fn if isinstance(model, Pipeline) else None
    return bool(getattr(loss_fn, "has_metrics", False))


def _data(config: Config, model: Any, batches: Iterable[Any]) -> Iterable[Any]:
    if not config.data.pad:
        return batches
    return padded(batches, model.num_microbatches * model.plan.axes.num_rows)


def _report(text: str) -> None:
    """Print a result after the run; a closed or full output does not change the exit code."""
    try:
        say(text)
    except OSError as error:
        _say(f"standard output: {error.strerror}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # of a terminal that was closed
        print(text, file=sys.stderr)
