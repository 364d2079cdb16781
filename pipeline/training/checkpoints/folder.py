"""Checkpoints: a model, its optimizer and a run's position, in layer order, written by Orbax.

A checkpoint holds the leaves of the model without a pipeline. So it fits the model and every
pipeline of it, with any S, V, placement, schedule and mesh. It is written, while the run goes on,
into a folder with a temporary name. When all arrays are on disk the manifest is written
(`pipeline.training.checkpoints.manifest`), then the folder gets its final name.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import re
import shutil
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import jax
from flax import nnx

from pipeline.base.arguments import is_whole
from pipeline.base.tree import Tree
from pipeline.training.checkpoints import contents, lock, manifest
from pipeline.training.checkpoints.arrays import Orbax, entered_by, read_leaves
from pipeline.training.checkpoints.contents import Contents
from pipeline.training.checkpoints.manifest import DamagedError
from pipeline.training.checkpoints.together import everyone, from_first
from pipeline.training.step import warn_within_update
from schedules.core.capacity import bytes_text

MARK = "shardpipe-checkpoints.json"  # in every folder of checkpoints; other folders are refused
ARRAYS = "arrays"
SHOWN = 20  # leaves that are not restored, of which each has a line
STEP = "step_([0-9]{9}|[1-9][0-9]{9,})"

# Python 3.12.0 to 3.12.2 start no thread once the main thread has ended (CPython issue 113964).
CAN_WAIT_AT_EXIT = not (3, 12, 0) <= sys.version_info < (3, 12, 3)


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or a folder without a readable checkpoint."""


class Checkpoints:
    """The checkpoints of a run, in one folder that all processes share.

    Args:
      folder: the path of the folder; a missing folder is made. Only one run writes to the folder;
        give ``read_only=True`` to read it at the same time.
      keep: the number of newest checkpoints to keep.
      best: whether the checkpoint with the least ("min") or greatest ("max") metric is kept too.
      read_only: whether nothing is written, for example for evaluation from another user's disk.

    Raises:
      CheckpointError: another process writes to the folder.
      ValueError: the folder is a file, or contains something else.
      OSError: the folder cannot be written to.
      ImportError: Orbax is not installed.
    """

    _asked = itertools.count(1)  # numbers for topics of messages, each used once

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        best: Literal["min", "max"] | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        if not is_whole(keep, 1):
            raise ValueError(f"keep={keep!r}: must be an integer >= 1, how many checkpoints remain")
        if best not in (None, "min", "max"):
            raise ValueError(
                f"best={best!r}: must be None, or 'min' or 'max' for the checkpoint of the least "
                f"or the greatest metric to be kept too"
            )
        self._orbax = Orbax()
        self._folder, self._keep, self._best, self._read_only = Path(folder), keep, best, read_only
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._untold: list[str] = []  # the failure's text; its traceback refers to this object
        weakref.finalize(self, _tell, self._untold)
        self._damaged: set[int] = set()  # steps of damaged checkpoints
        self._asked_at_exit = self._is_entered = False
        _check_folder(self._folder, read_only=read_only)
        self._folder = self._folder.absolute()
        self._lock: lock.Lock | None = None
        if not read_only:
            with self._claim():
                self._tidy()

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        return self._folder

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return sorted(
            int(path.name[5:])
            for path in self._folder.glob("step_*")
            if re.fullmatch(STEP, path.name) and path.is_dir()
        )

    def check(
        self,
        model: Any,
        optimizer: nnx.Optimizer[Any] | None = None,
        *,
        shaped: Mapping[str, Tree] | None = None,
    ) -> None:
        """Check, before a run starts, that its leaves have names, as `save` needs.

        Raises:
          ValueError: two leaves have one name, because a name has a dot; or an unknown model.
        """
        Contents(model, optimizer, shaped)

    def save(
        self,
        step: int,
        model: Any,
        optimizer: nnx.Optimizer[Any] | None = None,
        *,
        shaped: Mapping[str, Tree] | None = None,
        plain: Mapping[str, Any] | None = None,
        data: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write a checkpoint in the background; return when all arrays are copied.

        On Python 3.12.0 to 3.12.2, outside of ``with Checkpoints(...)``, this returns when the
        checkpoint is on disk, because these releases cannot write after the main thread has ended.

        All processes must call this at the same step. An unfinished earlier save is waited for.

        Args:
          step: the number of finished steps of the run.
          model: a pipeline, any other `nnx.Module`, or ``{"stages": [K modules], "embed": module,
            "head": module}``. All of its state is written, random streams and counts too.
          optimizer: the model's optimizer.
          shaped: trees shaped like the model's parameters, such as their running mean, by name.
          plain: JSON values by name, for state without arrays, such as a loss scale.
          data: an iterator with ``get_state()``, such as grain's; each process gives its own
            iterator.
          metrics: numbers; the first decides the ``best`` checkpoint; a checkpoint without
            metrics, or with a number that is not finite, is never the best.

        Raises:
          CheckpointError: this checkpoint, or the previous one, could not be written; or the disk
            has no room for its arrays, and nothing was written.
          ValueError: arguments that cannot be written.
        """
        if self._read_only:
            raise ValueError(
                f"Checkpoints({str(self._folder)!r}, read_only=True) writes nothing; make it "
                f"without read_only to save"
            )
        self.wait()
        with self._claim():
            state = Contents(model, optimizer, shaped)
            warn_within_update(step, optimizer)
            said = contents.describe(step, state, plain, data, metrics, self._topic("data"))
            self._begin(step, state, said)
        if not (CAN_WAIT_AT_EXIT or self._is_entered):
            self.wait()

    def _begin(self, step: int, state: Contents, said: dict[str, Any]) -> None:
        """Copy the arrays of a checkpoint, and begin to write it in a thread."""
        self._check_room(step, sum(leaf.size for leaf in state.leaves.values()))
        temporary, topic = self._folder / f".{_name(step)}.tmp", self._topic("save")
        tree = read_leaves(state.leaves, state.model)
        try:
            if jax.process_index() == 0:
                _remove(temporary)
                temporary.mkdir()
            response = self._orbax.save(temporary / ARRAYS, tree)
        except Exception as error:
            raise self._failed(step, error) from error
        if not self._asked_at_exit:
            self._asked_at_exit = True
            _before_exit(functools.partial(_end, weakref.ref(self)))
        given = step, response, said, topic
        self._thread = threading.Thread(target=self._finish, args=given, name=_name(step))
        self._thread.start()
        if self._lock is not None:
            self._lock.saving = self._thread

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
          CheckpointError: the checkpoint could not be written; earlier checkpoints are unchanged.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            self._untold.clear()
            raise failure

    def close(self) -> None:
        """Wait until the last save is on disk, as `wait` does, then let other runs write.

        Later saves are still possible.
        """
        try:
            self.wait()
        finally:
            self._lock = None

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restore(
        self,
        model: Any,
        optimizer: nnx.Optimizer[Any] | None = None,
        *,
        shaped: dict[str, Tree] | None = None,
        plain: dict[str, Any] | None = None,
        data: Any = None,
        step: int | None = None,
        ignore: Collection[str] = (),
        strict: bool = True,
    ) -> int | None:
        """Restore a model, and the other given objects, from a checkpoint.

        The checkpoint and the given objects must have the same entries. All entries are compared,
        every file is compared with its digest, and ``data`` is set, before the first array is
        changed. A damaged checkpoint causes a warning, and the previous checkpoint is used.

        Args:
          model: any pipeline of the same layers, or the model without a pipeline.
          optimizer: the model's optimizer, with the same transformation as the saved one.
          shaped: trees by name, which are replaced by the saved trees.
          plain: values by name, which are replaced by the saved values.
          data: an iterator with ``set_state(state)``. If processes had different positions in their
            data, the number of processes must be the same as at the save.
          step: the step of the checkpoint; by default the newest good checkpoint.
          ignore: what is not restored and stays as it is given: parts, of "optimizer", "shaped",
            "plain" and "data", and modules or leaves by name, such as "model.head" for a new head,
            with their moments and means. Leaves of restored parts that are left are printed.
          strict: False leaves the leaves of optimizer and ``shaped`` that differ in name, shape or
            dtype, and prints them: another optimizer, or more trained layers, keep the moments that
            fit. A schedule that the checkpoint lacks continues at the optimizer's step.

        Returns:
          The step; None if the folder has no checkpoint.

        Raises:
          ValueError: the checkpoint has another model or other entries; the message names the first
            difference.
          CheckpointError: no checkpoint is good.
        """
        self.wait()
        contents.check_ignored(ignore)
        found = self._good(step)
        if found is None:
            return None
        folder, said = found
        optimizer, shaped, plain, data = (
            None if name in ignore else part
            for name, part in zip(
                get_args(contents.Part), (optimizer, shaped, plain, data), strict=True
            )
        )
        trees = None if shaped is None else dict(shaped)
        state = Contents(model, optimizer, trees)
        leaves, left = contents.select_leaves(folder, said, state, ignore, strict=strict)
        contents.check_same(folder, said, {"plain": plain, "data": data}, ignore)
        if data is not None:  # it may refuse its state, so it comes before any change
            data.set_state(contents.own_position(folder, said["data"]))
        of_model = {name: leaf for name, leaf in leaves.items() if name.startswith("model.")}
        self._orbax.load(folder / ARRAYS, of_model, model)
        with entered_by(model):
            means = contents.start_means(state, left, ignore)
            others = {name: leaf for name, leaf in leaves.items() if name not in of_model}
            self._orbax.load(folder / ARRAYS, others, model)
            for name, mean in means.items():
                left[name] = left[name].replace(" stays", ", which starts at the weights")
                if mean.cell.value is not None:
                    mean.cell.store()
        if optimizer is not None and not strict:
            contents.continue_schedules(optimizer, left)
        if left and jax.process_index() == 0:
            more = [f"and {len(left) - SHOWN} more"] if len(left) > SHOWN else []
            lines = [*left.values()][:SHOWN]
            _tell([f"{folder}: {len(left)} leaves are not restored", *lines, *more])
        if shaped is not None and trees is not None:
            shaped.update(trees)
        if plain is not None:
            plain.update(contents.of_json(said["plain"]))
        return int(said["step"])

    # --- writing ---

    def _check_room(self, step: int, needed: int) -> None:
        """Check that the disk has room for ``needed`` bytes; nothing is compressed."""
        free: int | None = None
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(self._folder)
            free = usage.free if usage.total else None  # some file systems report nothing
        free = from_first(self._topic("room"), free)  # so that all processes decide alike
        if free is not None and free < needed:
            raise CheckpointError(
                f"the checkpoint of step {step} is not begun: its arrays take "
                f"{bytes_text(needed)}, and {bytes_text(free)} are free in {self._folder} "
                f"({self._kept()}); make room there, or give another folder"
            )

    def _finish(self, step: int, response: Any, said: dict[str, Any], topic: str) -> None:
        """Finish the save in a thread; a failure is reported at the next call."""
        try:
            self._complete(step, response, said, topic)
        except Exception as error:  # noqa: BLE001  # from Orbax, the disk, other processes
            self._failure = self._failed(step, error)
            self._failure.__cause__ = error
            self._untold.append(str(self._failure))

    def _complete(self, step: int, response: Any, said: dict[str, Any], topic: str) -> None:
        """Write arrays, manifest and name to disk, then delete checkpoints that are too old."""
        temporary, several = self._folder / f".{_name(step)}.tmp", jax.process_count() > 1

        def tried(work: Callable[[], Any]) -> str:
            try:
                work()
            except Exception as error:
                if not several:
                    raise
                return f"{type(error).__name__}: {error}"
            return ""

        _check_done(everyone(f"{topic}/arrays", tried(response.result)))
        names = from_first(f"{topic}/names", manifest.names_of_files(temporary))
        mine = names[jax.process_index() :: jax.process_count()]
        files: dict[str, Any] = {}
        for part in everyone(f"{topic}/files", manifest.digests(temporary, mine)):
            files |= part
        done = ""
        if jax.process_index() == 0:
            done = tried(lambda: self._commit(step, temporary, said | {"files": files}))
        _check_done([from_first(f"{topic}/done", done)])

    def _commit(self, step: int, temporary: Path, said: dict[str, Any]) -> None:
        known = self._read()
        said["serial"] = 1 + max((one.get("serial", 0) for one in known.values()), default=0)
        manifest.sync_tree(temporary)
        manifest.write_manifest(temporary, said)
        final, aside = self._folder / _name(step), self._folder / f".{_name(step)}.old"
        if final.is_dir():  # keep this step's old checkpoint until the new one has its name
            _remove(aside)
            final.rename(aside)
        temporary.rename(final)
        manifest.sync_folder(self._folder)
        _remove(aside)
        self._damaged.discard(step)
        self._drop()

    def _drop(self) -> None:
        """Delete old checkpoints: keep the newest, the best, and folders of other releases."""
        known = self._read()
        good = {step: one for step, one in known.items() if step not in self._damaged}
        order = sorted(good, key=lambda step: good[step]["serial"])
        kept = {*order[-self._keep :], *self._best_of(good)}
        for step in self.steps:
            if step in known and step not in kept:
                gone = self._folder / f".{_name(step)}.gone"
                (self._folder / _name(step)).rename(gone)  # a checkpoint is never half deleted
                _remove(gone)

    def _best_of(self, known: Mapping[int, Mapping[str, Any]]) -> list[int]:
        first = {step: next(iter(one["metrics"].values()), None) for step, one in known.items()}
        values = {step: value for step, value in first.items() if value is not None}
        if self._best is None or not values:
            return []
        choose = min if self._best == "min" else max
        return [choose(values, key=values.__getitem__)]

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        """Remove a checkpoint that could not be written, and make the error for it."""
        if jax.process_index() == 0:
            _remove(self._folder / f".{_name(step)}.tmp")
        kept = self._kept()
        with contextlib.suppress(OSError):
            kept = f"{kept}, {bytes_text(shutil.disk_usage(self._folder).free)} are free"
        text = " ".join(str(error).split())
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._folder} ({kept}): "
            f"{type(error).__name__}: {text[:500]}"
        )

    def _kept(self) -> str:
        steps = ", ".join(map(str, self.steps))
        return f"those of steps {steps} are there" if steps else "none is there"

    def _claim(self) -> contextlib.AbstractContextManager[None]:
        if jax.process_index():
            return contextlib.nullcontext()
        self._lock = lock.take(self._folder)
        if self._lock is None:
            raise CheckpointError(
                f"{self._folder} is written to by another process, and two runs in one folder "
                f"would delete each other's checkpoints: name another folder, or wait until that "
                f"run has ended; Checkpoints(folder, read_only=True) reads it meanwhile"
            )
        return self._lock

    def _tidy(self) -> None:
        """Remove the incomplete folders of a run that was killed; other folders stay."""
        if self._lock is None:
            return
        for path in sorted(self._folder.glob(".step_*")):
            if not re.fullmatch(rf"\.{STEP}\.(tmp|old|gone)", path.name):
                continue
            final = self._folder / path.name[1:].rpartition(".")[0]
            if path.suffix == ".old" and not final.exists():
                path.rename(final)
            else:
                _remove(path)

    # --- reading ---

    def _read(self) -> dict[int, dict[str, Any]]:
        found = {}
        for step in self.steps:
            with contextlib.suppress(DamagedError, manifest.NewerError):
                found[step] = manifest.read_manifest(self._folder / _name(step))
        return found

    def _good(self, step: int | None) -> tuple[Path, dict[str, Any]] | None:
        """Find the newest undamaged checkpoint, or the checkpoint of a step."""
        topic = self._topic("restore")
        wanted = from_first(f"{topic}/steps", self.steps)  # after process 0 has tidied up
        steps = self.steps
        if not all(everyone(f"{topic}/alike", steps == wanted)):
            raise ValueError(
                f"processes see other checkpoints in {self._folder}, process "
                f"{jax.process_index()} those of steps {steps}; give a folder that all share"
            )
        if step is not None and step not in steps:
            raise ValueError(
                f"step={step!r}: {self._folder} has checkpoints of steps "
                f"{', '.join(map(str, steps)) or 'none'}; give one of them"
            )
        known: dict[int, dict[str, Any]] = {}
        why: dict[int, str] = {}
        for one in steps if step is None else [step]:
            try:
                known[one] = manifest.read_manifest(self._folder / _name(one))
            except DamagedError as error:
                why[one] = str(error)
        for one in sorted(known, key=lambda step: known[step]["serial"], reverse=True):
            folder = self._folder / _name(one)
            text, part, parts = "", jax.process_index(), jax.process_count()
            try:
                manifest.check_files(folder, known[one]["files"], part=part, parts=parts)
            except DamagedError as error:
                text = str(error)
            text = "; ".join(filter(None, everyone(f"{topic}/{one}", text)))
            if not text:
                self._damaged.discard(one)
                self._warn({step: text for step, text in why.items() if step > one}, one)
                return folder, known[one]
            why[one] = text
        self._damaged.update(why)
        if why:
            texts = "; ".join(f"step {step}: {text}" for step, text in sorted(why.items()))
            raise CheckpointError(
                f"no checkpoint of {'those in' if step is None else f'step {step} in'} "
                f"{self._folder} is as it was written: {texts}; restore a copy of it, or start "
                f"anew in another folder"
            )
        return None

    def _warn(self, why: Mapping[int, str], taken: int) -> None:
        """Warn of damaged checkpoints, which are not used."""
        self._damaged.update(why)
        for step, text in sorted(why.items(), reverse=True):
            warnings.warn(
                f"the checkpoint of step {step} is damaged: {text}; that of step {taken} is taken",
                stacklevel=4,
            )

    def _topic(self, name: str) -> str:
        return f"checkpoints/{next(self._asked)}/{name}"


def _end(checkpoints: weakref.ref[Checkpoints]) -> None:
    """Wait for an unfinished save before the interpreter ends."""
    found = checkpoints()
    try:
        if found is not None:
            found.wait()
    except CheckpointError as error:  # no caller is left to catch it
        _tell([str(error)])


def _tell(lines: list[str]) -> None:
    """Write lines to standard error, such as failures of saves that no later call reports."""
    for text in lines:
        sys.stderr.write(f"{text}\n")


def _name(step: int) -> str:
    return f"step_{step:09d}"


def _check_folder(folder: Path, *, read_only: bool) -> None:
    """Check that a folder holds checkpoints or is empty, and that the folder can be written to."""
    if "://" in str(folder) or str(folder).startswith("gs:/"):
        raise ValueError(
            f"folder={str(folder)!r}: must be a folder of a file system, which renames atomically; "
            f"mount the bucket, or save to a local folder and copy complete checkpoints"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"folder={str(folder)!r} is a file; give a folder, which may not be there yet"
        )
    held = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    begun = f".{MARK}", lock.NAME  # files of another thread that makes the folder
    others = [name for name in held if not name.startswith(begun)]
    if others and MARK not in held:
        raise ValueError(
            f"folder={str(folder)!r} holds {others[0]!r} and is no folder of checkpoints, which "
            f"has a file {MARK}; give an empty one, or one that is not there yet"
        )
    if read_only:
        if not held:
            raise ValueError(f"folder={str(folder)!r} has no checkpoints, and read_only=True")
        return
    if jax.process_index():
        return
    try:
        folder.resolve().mkdir(parents=True, exist_ok=True)  # also the target of a link
        manifest.write_durably(folder / MARK, '{"format": 1}\n')
    except OSError as error:
        raise type(error)(
            error.errno,
            f"folder={str(folder)!r} cannot be written to ({error.strerror}); give another, or "
            f"make room there, or read_only=True to restore only",
        ) from error


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible; of a link to a folder only the link."""
    if folder.is_symlink():
        with contextlib.suppress(OSError):
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _check_done(texts: list[str]) -> None:
    for process, text in enumerate(texts):
        if text:
            raise RuntimeError(f"process {process}: {text}")


def _before_exit(call: Callable[[], None]) -> None:
    """Register a call for the end of the main thread, before any executor refuses work.

    Orbax writes in executors of `concurrent.futures`. These refuse new work as soon as the main
    thread has ended, and `atexit` runs after that. The executors themselves use
    `threading._register_atexit`, which runs the newest call first (CPython 3.9 to 3.14). It is no
    public name, so `atexit` is used if it is missing.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(call)
    except RuntimeError:  # the interpreter is ending already: a save then has to wait itself
        return
