"""Checkpoints on a disk: what is kept, what is damaged, what does not fit."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.checkpoints import CheckpointError, Checkpoints, lock, manifest
from pipeline.training.checkpoints import folder as checkpoints_folder
from pipeline.training.checkpoints.folder import MARK
from pipeline.training.checkpoints.together import everyone, from_first
from pipeline.training.step import Step
from tests.support.close import assert_close
from tests.support.models import WIDTH, Block, Noisy
from tests.support.refusals import refusal
from tests.support.store import Store

TX = optax.adam(1e-2)


class Small(nnx.Module):
    """Two weights and a random stream."""

    def __init__(self, seed: int, *, width: int = 4) -> None:
        self.linear = nnx.Linear(width, 3, rngs=nnx.Rngs(seed))
        self.rngs = nnx.Rngs(dropout=seed)
        self.nothing = nnx.Param(jnp.zeros((0, 3)))

    @property
    def weight(self) -> np.ndarray:
        return np.asarray(self.linear.kernel[...])


def mean_square(y: jax.Array, t: jax.Array) -> jax.Array:
    return ((y - t) ** 2).mean()


def optimizer_of(model: nnx.Module) -> nnx.Optimizer:
    return nnx.Optimizer(model, TX, wrt=nnx.Param)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 10, 20 and 30; their weights are those of seeds 10, 20 and 30."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with Checkpoints(folder) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, Small(step))
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def message(error: Any) -> str:
    return " ".join(str(error.value).split())


# --- what comes back ---


@pytest.mark.parametrize("given", [False, True])
def test_what_a_refusal_recommends_to_ignore_may_be_ignored(given: bool, tmp_path: Path) -> None:
    """Issue 67: an optimizer that was given was compared with the one to be ignored."""
    model, other = Small(0), Small(1)
    average = nnx.state(model, nnx.Param)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            5,
            model,
            optimizer_of(model),
            shaped={"ema": average},
            plain={"scale": 2},
            data=Counter(7),
        )
        mine = nnx.Optimizer(other, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        shaped, plain, data = {"mean": jax.tree.map(jnp.copy, average)}, {"skale": 3}, Counter(0)
        objects = {"optimizer": mine, "shaped": shaped, "plain": plain, "data": data}
        before = jax.tree.map(jnp.copy, nnx.state(mine))
        ignore: list[str] = []
        while len(ignore) < 5:
            try:
                more = objects if given else {}
                assert checkpoints.restore(other, **more, ignore=tuple(ignore)) == 5
                break
            except ValueError as error:
                advice = re.search(r"ignore=\('(\w+)',\)", str(error))
                # The message for other names of `plain` gives the names.
                ignore.append("plain" if advice is None else advice[1])
    assert set(ignore) == {"optimizer", "shaped", "plain"} | ({"data"} if not given else set())
    np.testing.assert_array_equal(other.weight, model.weight)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(mine), before)
    assert (list(shaped), plain) == (["mean"], {"skale": 3})
    assert data.count == (7 if given else 0)


def test_everything_comes_back(tmp_path: Path) -> None:
    model, other = Small(0), Small(1)
    optimizer, of_other = optimizer_of(model), optimizer_of(other)
    model.rngs.dropout()
    average = jax.tree.map(lambda x: x * 0.5, nnx.state(model, nnx.Param))
    trees = {"ema": jax.tree.map(jnp.zeros_like, average)}
    scale: dict[str, Any] = {"scale": None}
    data, of_data = Counter(7), Counter(0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            5,
            model,
            optimizer,
            shaped={"ema": average},
            plain={"scale": {"factor": jnp.float32(1024), "good": 3, "name": ["a", None, True]}},
            data=data,
        )
        found = checkpoints.restore(other, of_other, shaped=trees, plain=scale, data=of_data)
    assert found == 5
    assert scale == {"scale": {"factor": 1024.0, "good": 3, "name": ["a", None, True]}}
    assert of_data.count == 7
    jax.tree.map(np.testing.assert_array_equal, trees["ema"], average)
    np.testing.assert_array_equal(model.weight, other.weight)
    assert jnp.all(model.rngs.dropout() == other.rngs.dropout())


class Counter:
    """An iterator that says where it is, in bytes, as some of grain's do."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_state(self) -> bytes:
        return str(self.count).encode()

    def set_state(self, state: bytes) -> None:
        self.count = int(state)


@pytest.mark.parametrize(
    "state",
    [
        {0: 5, 1: {"at": 2**70}},
        {"worker": {None: 1.5, True: 1, (1, "a"): []}},
        random.Random(0).getstate(),
        {"shardpipe type": "tuple", "items": [(1,), [2]]},
        [],
    ],
)
def test_a_state_of_the_data_keeps_its_types(state: Any, tmp_path: Path) -> None:
    """Issue 52: keys became texts, and tuples lists."""
    data, other = Counter(0), Counter(1)
    data.get_state = lambda: state  # type: ignore[method-assign]
    found: list[Any] = []
    other.set_state = found.append  # type: ignore[method-assign]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, Small(0), data=data, plain={"own": state})
        plain: dict[str, Any] = {"own": 0}
        checkpoints.restore(Small(0), data=other, plain=plain)
    assert repr(found) == repr([state])
    assert repr(plain) == repr({"own": state})


@pytest.mark.slow
def test_random_streams_of_a_pipeline_go_on(tmp_path: Path) -> None:
    def make(seed: int, S: int) -> Pipeline:
        rngs = nnx.Rngs(seed)
        stages = [Noisy(rngs), Block(rngs), Noisy(rngs), Noisy(rngs)]  # the first two differ
        return Pipeline(stages, 2, mesh=make_mesh(stage=S), loss_fn=mean_square)

    x, t = jax.random.normal(jax.random.key(0), (2, 4, WIDTH))
    one, two = make(0, 2), make(1, 4)
    one.loss(x, t)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, one)
        checkpoints.restore(two)
    assert_close(one.loss(x, t), two.loss(x, t), tolerance=1e-6)


def test_an_optimizer_that_knows_nothing_of_layers(tmp_path: Path) -> None:
    def make(seed: int, S: int) -> Any:
        stages = [Block(nnx.Rngs(seed + k)) for k in range(4)]
        pipe = Pipeline(stages, 2, mesh=make_mesh(stage=S), loss_fn=mean_square)
        return pipe, (make_optimizer(pipe, TX) if S == 2 else nnx.Optimizer(pipe, TX, wrt=pipe.wrt))

    (one, of_one), (two, of_two), (three, of_three) = make(0, 4), make(10, 2), make(20, 4)
    moments = jax.random.normal(jax.random.key(0), (4, WIDTH, 2 * WIDTH))
    held = of_one.opt_state[0].mu["chunks"][0]["up"]
    held.set_value(jax.device_put(moments, held.get_value().sharding))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, one, of_one)
        checkpoints.restore(two, of_two)
        checkpoints.restore(three, of_three)
    layers = two.to_layers(nnx.as_pure(of_two.opt_state[0].mu))
    found = np.stack([layers["stages"][k]["up"] for k in range(4)])
    np.testing.assert_array_equal(found, moments)
    # Nobody had chosen a device for its count: a jitted step still takes it beside the weights.
    step, up = of_three.step.get_value(), three.chunks[0].up.get_value()
    assert jax.jit(lambda *given: given)(step, up)[0].sharding.device_set == up.sharding.device_set


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "new" / "run").restore(Small(0)) is None


# --- what is kept ---


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 2.5}
    with Checkpoints(tmp_path, keep=2, best="min") as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, Small(step), metrics={"loss": loss})
        checkpoints.wait()
        assert checkpoints.steps == [2, 4, 5]
        checkpoints.save(6, Small(6))
        checkpoints.wait()
        assert checkpoints.steps == [2, 5, 6]
        checkpoints.save(123_456_789, Small(7))  # as many digits as a folder's name has
        checkpoints.wait()
        assert checkpoints.steps == [2, 6, 123_456_789]
        model = Small(0)
        assert checkpoints.restore(model, step=2) == 2
    np.testing.assert_array_equal(model.weight, Small(2).weight)


def test_a_run_that_goes_back_goes_on_from_where_it_went(copy: Path) -> None:
    model = Small(0)
    with Checkpoints(copy, keep=2) as checkpoints:
        assert checkpoints.restore(model, step=10) == 10
        checkpoints.save(15, model)
    assert Checkpoints(copy).restore(Small(0)) == 15


def test_a_step_is_saved_anew(copy: Path) -> None:
    model = Small(0)
    with Checkpoints(copy) as checkpoints:
        checkpoints.save(20, Small(99))
        assert checkpoints.restore(model) == 20
    np.testing.assert_array_equal(model.weight, Small(99).weight)
    assert not list(copy.glob(".step_*"))


def test_what_a_killed_run_leaves_is_removed(copy: Path) -> None:
    shutil.copytree(copy / "step_000000030", copy / ".step_000000040.tmp")
    (copy / "step_000000030").rename(copy / ".step_000000030.old")
    (copy / "step_000000010").rename(copy / ".step_000000010.gone")
    checkpoints = Checkpoints(copy)
    assert checkpoints.steps == [20, 30]
    assert checkpoints.restore(Small(0)) == 30
    assert not list(copy.glob(".step_*"))


# --- damage ---


def damage(folder: Path, draw: random.Random) -> tuple[str, Path]:
    """Damage a file of a checkpoint: how, and which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    way = draw.choice(["truncate", "flip", "delete", "marker"])
    file = folder / manifest.NAME if way == "marker" else draw.choice(files)
    if way in ("truncate", "flip"):
        file = draw.choice([one for one in files if one.stat().st_size])
    data = bytearray(file.read_bytes())
    if way == "truncate":
        file.write_bytes(data[: draw.randrange(len(data))])
    elif way == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    else:
        file.unlink()
    return way, file


@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 6),
        pytest.param(6, 14, marks=pytest.mark.slow),
        pytest.param(20, 80, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_of_damaged_checkpoints_none_is_loaded(
    first: int, count: int, run: Path, tmp_path: Path
) -> None:
    """Each restores from an older one, or fails naming the file."""
    ways = set()
    for seed in range(first, first + count):
        draw = random.Random(seed)
        folder = Path(shutil.copytree(run, tmp_path / str(seed)))
        steps = [30, 20, 10][: draw.choice([1, 1, 2, 3])]
        files = []
        for step in steps:
            way, file = damage(folder / f"step_{step:09d}", draw)
            ways.add(way)
            files.append(file)
        model = Small(0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if len(steps) == 3:
                with pytest.raises(CheckpointError) as error:
                    Checkpoints(folder).restore(model)
                texts = [str(error.value)] * 3
                assert np.array_equal(model.weight, Small(0).weight)
            else:
                good = 30 - 10 * len(steps)
                assert Checkpoints(folder).restore(model) == good
                np.testing.assert_array_equal(model.weight, Small(good).weight)
                texts = [str(one.message) for one in told]
                assert len(texts) == len(steps)
        for file, text in zip(files, texts, strict=True):
            assert str(file) in text
        shutil.rmtree(folder)
    assert count < 14 or ways == {"truncate", "flip", "delete", "marker"}


@pytest.mark.few
@pytest.mark.parametrize(
    "kind", ["a folder", "a link to itself", "a FIFO", "empty", "not JSON", "no text"]
)
def test_a_manifest_that_cannot_be_read_is_damage(kind: str, tmp_path: Path) -> None:
    """Issue 38: a manifest that is a folder was an OSError, and the good one before not taken."""
    model = {"stages": [nnx.Linear(2, 2, rngs=nnx.Rngs(0))]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model)
        checkpoints.save(2, model)
    file = tmp_path / "step_000000002" / "manifest.json"
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "a link to itself":
        file.symlink_to(file)
    elif kind == "a FIFO":
        os.mkfifo(file)
    else:
        file.write_bytes({"empty": b"", "not JSON": b"{", "no text": b"\xff\n\xfe\n"}[kind])
    with pytest.warns(UserWarning, match=f"step 2 is damaged: {file} .*; that of step 1 is taken"):
        assert Checkpoints(tmp_path).restore(model) == 1


def test_a_damaged_one_that_is_mended_is_kept(copy: Path) -> None:
    """Issue 52: it was still deleted as damaged."""
    file = next((copy / "step_000000030").rglob("manifest.ocdbt"))
    whole = file.read_bytes()
    with Checkpoints(copy, keep=2) as checkpoints:
        file.write_bytes(whole[:-1])
        with pytest.warns(UserWarning, match="damaged"):
            assert checkpoints.restore(Small(0)) == 20
        file.write_bytes(whole)
        assert checkpoints.restore(Small(0)) == 30
        checkpoints.save(40, Small(40))
    assert Checkpoints(copy).steps == [30, 40]


def test_a_damaged_one_is_named_and_not_kept(copy: Path) -> None:
    file = next((copy / "step_000000030").rglob("manifest.ocdbt"))
    file.write_bytes(file.read_bytes()[:-1])
    size = file.stat().st_size
    with Checkpoints(copy, keep=1) as checkpoints:
        with pytest.warns(UserWarning, match="damaged") as told:
            assert checkpoints.restore(Small(0)) == 20
        assert str(told[0].message) == (
            f"the checkpoint of step 30 is damaged: {file} has {size} bytes of {size + 1}; that of "
            f"step 20 is taken"
        )
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(Small(0), step=30)
        assert str(error.value) == (
            f"no checkpoint of step 30 in {copy} is as it was written: step 30: {file} has {size} "
            f"bytes of {size + 1}; restore a copy of it, or start anew in another folder"
        )
        checkpoints.save(25, Small(25))
    assert Checkpoints(copy).steps == [25]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_the_checkpoint_before_an_unreadable_file_is_taken(
    number: int, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 52: restore raised OSError."""
    digests = manifest.digests

    def unreadable(folder: Path, names: list[str]) -> Any:
        if folder.name == "step_000000030":
            raise OSError(number, os.strerror(number), names[0])
        return digests(folder, names)

    monkeypatch.setattr(manifest, "digests", unreadable)
    why = os.strerror(number)
    match = rf"step 30 is damaged: {copy}/.* cannot be read \({why}\); that of step 20 is taken"
    with pytest.warns(UserWarning, match=match):
        assert Checkpoints(copy).restore(Small(0)) == 20


def test_a_fifo_among_the_files_is_not_waited_for(copy: Path) -> None:
    file = next((copy / "step_000000030").rglob("manifest.ocdbt"))
    file.unlink()
    os.mkfifo(file)
    with pytest.warns(UserWarning, match=f"step 30 is damaged: {file} is missing"):
        assert Checkpoints(copy).restore(Small(0)) == 20


def test_other_files_and_folders_stay(copy: Path) -> None:
    """Issue 52: `.step_*` was removed at the start, and `step_7` ended the next save."""
    others = ["step_7", ".step_notes", "step_000000007.bak", ".step_7.tmp", "step_000000008"]
    for name in others:
        (copy / name).mkdir()
        (copy / name / "mine").touch()
    (copy / "step_000000009").write_text("mine")
    model = Small(0)
    with Checkpoints(copy, keep=1) as checkpoints:
        assert checkpoints.restore(model) == 30
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            checkpoints.restore(model, step=8)
        checkpoints.save(40, model)
        checkpoints.wait()
        assert checkpoints.steps == [8, 40]
    assert all((copy / name / "mine").exists() for name in others)
    assert (copy / "step_000000009").read_text() == "mine"


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_data_that_refuse_their_state_leave_all_as_it_was(error: Any, tmp_path: Path) -> None:
    """Issue 52: the weights were those of the checkpoint."""
    model, other = Small(1), Small(2)
    optimizer, of_other = optimizer_of(model), optimizer_of(other)
    of_other.step.set_value(jnp.uint32(9))
    plain, data = {"scale": 1}, Counter(3)
    trees = {"ema": jax.tree.map(jnp.copy, nnx.state(other, nnx.Param))}
    before = trees["ema"]

    def refuse(state: bytes) -> None:
        raise error(state)

    with Checkpoints(tmp_path) as checkpoints:
        shaped = {"ema": nnx.state(model, nnx.Param)}
        checkpoints.save(1, model, optimizer, shaped=shaped, plain={"scale": 2}, data=data)
        data.set_state = refuse  # type: ignore[method-assign]
        with pytest.raises(error):
            checkpoints.restore(other, of_other, shaped=trees, plain=plain, data=data)
    np.testing.assert_array_equal(other.weight, Small(2).weight)
    assert (int(of_other.step[...]), plain) == (9, {"scale": 1})
    assert trees["ema"] is before


# --- what cannot be written ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few pages, where one can be had."""
    import subprocess

    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room_is_seen_before_anything_is_written(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = sorted(copy.iterdir())
    said = {"total": 2**30, "used": 0, "free": 2**20 - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(**said))
    checkpoints = Checkpoints(copy, keep=4)
    with pytest.raises(CheckpointError) as error:
        checkpoints.save(40, {"stages": [Large()]})
    assert str(error.value) == (
        f"the checkpoint of step 40 is not begun: its arrays take 1.0 MiB, and 1024.0 KiB are free "
        f"in {copy} (those of steps 10, 20, 30 are there); make room there, or give another folder"
    )
    assert sorted(copy.iterdir()) == held
    said["free"] += 1
    checkpoints.save(40, {"stages": [Large()]})
    said |= {"free": 0, "total": 0}  # it does not tell
    checkpoints.save(50, Small(50))
    checkpoints.close()
    assert checkpoints.steps == [20, 30, 40, 50]


def test_a_full_disk_keeps_the_old_ones(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = SimpleNamespace(total=2**40, free=2**40)  # as where others write to it, or by a quota
    monkeypatch.setattr(shutil, "disk_usage", lambda _: plenty)
    with Checkpoints(small_disk, keep=2) as checkpoints:
        checkpoints.save(1, Small(1))
        checkpoints.save(2, {"stages": [Large()]})
        with pytest.raises(CheckpointError) as error:
            checkpoints.wait()
        text = message(error)
        assert text.startswith(
            f"the checkpoint of step 2 could not be written to {small_disk} (those of steps 1 are "
            f"there, "
        )
        assert "No space left on device" in text
        model = Small(0)
        assert checkpoints.restore(model) == 1
    assert [path.name for path in small_disk.iterdir() if ".tmp" in path.name] == []
    np.testing.assert_array_equal(model.weight, Small(1).weight)


class Large(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jax.random.normal(jax.random.key(0), (512, 512)))


def test_a_full_disk_at_the_last_file_keeps_the_old_ones(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Checkpoints(copy) as checkpoints:
        monkeypatch.setattr(manifest, "write_manifest", full)
        checkpoints.save(40, Small(40))
        with pytest.raises(CheckpointError, match="could not be written") as error:
            checkpoints.save(50, Small(50))
        assert "those of steps 10, 20, 30 are there" in message(error)
        assert "No space left on device" in message(error)
        monkeypatch.undo()
        checkpoints.save(60, Small(60))
    assert checkpoints.steps == [20, 30, 60]


def test_folders_that_are_none_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refusal(Checkpoints, file) == (
        f"folder={str(file)!r} is a file; give a folder, which may not be there yet"
    )
    assert refusal(Checkpoints, tmp_path) == (
        f"folder={str(tmp_path)!r} holds 'file' and is no folder of checkpoints, which has a file "
        f"{MARK}; give an empty one, or one that is not there yet"
    )
    assert "must be a folder of a file system" in refusal(Checkpoints, "gs://bucket/run")
    assert refusal(Checkpoints, tmp_path / "none", read_only=True) == (
        f"folder={str(tmp_path / 'none')!r} has no checkpoints, and read_only=True"
    )

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(manifest, "write_durably", refused)
    with pytest.raises(PermissionError) as error:
        Checkpoints(tmp_path / "closed")
    assert error.value.strerror == (
        f"folder={str(tmp_path / 'closed')!r} cannot be written to (Permission denied); give "
        f"another, or make room there, or read_only=True to restore only"
    )


def test_a_folder_may_be_read_only(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    checkpoints = Checkpoints(run, read_only=True)
    assert checkpoints.restore(Small(0)) == 30
    with pytest.raises(ValueError, match="writes nothing; make it without read_only to save"):
        checkpoints.save(40, Small(40))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_orbax_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("orbax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "orbax", None)
    with pytest.raises(ImportError) as error:
        Checkpoints(tmp_path)
    assert str(error.value) == (
        "checkpoints are written by orbax-checkpoint, which is not here (No module named "
        "'orbax.checkpoint'; 'orbax' is not a package); install the extra: pip install "
        "'shardpipe[training]'"
    )


# --- what does not fit ---


def test_a_checkpoint_of_another_model_names_what_differs(run: Path) -> None:
    folder = run / "step_000000030"
    checkpoints = Checkpoints(run)
    model = Small(0, width=5)
    before = model.weight
    assert refusal(checkpoints.restore, model) == (
        f"{folder} holds model.linear.kernel as float32[4,3], and what is restored has "
        f"float32[5,3]; it is a checkpoint of another model: give the model that was saved, or "
        f"ignore=('model.linear',) to leave it as it is given"
    )
    np.testing.assert_array_equal(model.weight, before)
    half = Small(0)
    half.linear.bias.set_value(half.linear.bias[...].astype(jnp.bfloat16))
    with pytest.raises(ValueError) as error:
        checkpoints.restore(half)
    assert "holds model.linear.bias as float32[3], and what is restored has bfloat16[3]" in str(
        error.value
    )
    more = Small(0)
    more.extra = nnx.Param(jnp.ones(2))
    assert refusal(checkpoints.restore, more) == (
        f"{folder} has nothing for model.extra, float32[2]; it is a checkpoint of another model: "
        f"give the model that was saved, or ignore=('model.extra',) to leave it as it is given"
    )
    assert "has nothing for model.bias, float32[3], and 6 more differ" in refusal(
        checkpoints.restore, Small(0).linear
    )
    less = Small(0)
    del less.nothing
    assert refusal(checkpoints.restore, less) == (
        f"{folder} holds model.nothing, float32[0,3], which has no place in what is restored; give "
        f"the model that was saved, or ignore=('model.nothing',) to leave it as it is given"
    )


def test_all_of_a_checkpoint_has_a_place(tmp_path: Path) -> None:
    model = Small(0)
    optimizer = optimizer_of(model)
    folder = tmp_path / "step_000000001"
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, optimizer, plain={"scale": 2}, data=Counter(3))
        cases: list[tuple[dict[str, Any], str]] = [
            (
                {"plain": {"scale": 0}, "data": Counter(0)},
                (
                    f"{folder} holds optimizer.opt_state.0.count, int32[], which has no place in "
                    f"what is restored, and 7 more differ; give the optimizer that was saved, or "
                    f"ignore=('optimizer',) to leave it there"
                ),
            ),
            (
                {"optimizer": optimizer, "data": Counter(0)},
                (
                    f"{folder} holds plain, and none is given: give plain=, or ignore=('plain',) "
                    f"to leave it there"
                ),
            ),
            (
                {"optimizer": optimizer, "plain": {"scale": 0}},
                (
                    f"{folder} holds data, and none is given: give data=, or ignore=('data',) to "
                    f"leave it there"
                ),
            ),
            (
                {"optimizer": optimizer, "plain": {"skale": 0}, "data": Counter(0)},
                f"{folder}: plain['skale'] is only in what is restored; give 'scale'",
            ),
            (
                {"optimizer": optimizer, "plain": {"scale": 0}, "ignore": ("model",)},
                (
                    "ignore=('model',): must be a tuple of 'optimizer', 'shaped', 'plain', 'data' "
                    "and names such as 'model.head', what of a checkpoint is not restored"
                ),
            ),
            (
                {"step": 7},
                f"step=7: {tmp_path} has checkpoints of steps 1; give one of them",
            ),
        ]
        for given, text in cases:
            assert refusal(checkpoints.restore, model, **given) == text
        assert checkpoints.restore(model, ignore=("optimizer", "plain", "data")) == 1


def test_arguments_that_cannot_be_written(tmp_path: Path) -> None:
    for options, text in (
        ({"keep": 0}, "keep=0: must be an integer >= 1, how many checkpoints remain"),
        (
            {"best": "most"},
            (
                "best='most': must be None, or 'min' or 'max' for the checkpoint of the least or "
                "the greatest metric to be kept too"
            ),
        ),
    ):
        assert refusal(Checkpoints, tmp_path, **options) == text
    checkpoints = Checkpoints(tmp_path)
    model = Small(0)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((-1, model), {}, "step=-1: must be an integer >= 0, the steps that were done"),
        (
            (1, [model]),
            {},
            (
                "model is of type list; give a Pipeline, an nnx.Module, or a dictionary of "
                "modules: {'stages': [...], 'embed': ..., 'head': ...}"
            ),
        ),
        (
            (1, model, TX),
            {},
            (
                "optimizer is of type GradientTransformationExtraArgs; give what "
                "pipeline.make_optimizer(pipe, tx) or nnx.Optimizer(model, tx, wrt=...) returns"
            ),
        ),
        (
            (1, model),
            {"plain": {"a": {"b": jnp.zeros(2)}}},
            (
                "plain['a']['b'] is of type ArrayImpl; give numbers, texts, lists and dictionaries "
                "of them, and arrays that are like the parameters as shaped="
            ),
        ),
        (
            (1, model),
            {"plain": {"a": float("inf")}},
            "plain['a'] is inf, which JSON cannot represent; give a finite number",
        ),
        ((1, model), {"metrics": {"loss": "low"}}, "metrics['loss']='low': must be a number"),
        (
            (1, model),
            {"metrics": {"loss": 10**400}},
            "metrics['loss']=an integer beyond float64: must be a number",
        ),
        (
            (1, model),
            {"data": [1, 2]},
            (
                "data is of type list, which has no get_state(); give the iterator, as grain's, "
                "with get_state() and set_state(state)"
            ),
        ),
    ]
    for given, options, text in cases:
        assert refusal(checkpoints.save, *given, **options) == text
    assert checkpoints.steps == []


def test_a_later_release_is_named(copy: Path) -> None:
    folder = copy / "step_000000030"
    said = manifest.read_manifest(folder)
    text = json.dumps(said | {"format": 2})
    digest = manifest.hashlib.sha256(text.encode()).hexdigest()
    (folder / manifest.NAME).write_text(f"{text}\n{digest}\n", encoding="utf-8")
    assert re.match(
        rf"{folder}/manifest.json has the format 2, and this shardpipe reads up to 1; install the "
        rf"one that wrote it: \{{'jax': ",
        refusal(Checkpoints(copy).restore, Small(0)),
    )


@pytest.mark.parametrize(
    ("tell", "own", "silent"), [(everyone, 0, "processes 1-3"), (from_first, 1, "process 0")]
)
def test_processes_that_say_nothing_are_named(
    monkeypatch: pytest.MonkeyPatch, tell: Any, own: int, silent: str
) -> None:
    Store(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: own)
    with pytest.raises(TimeoutError) as error:
        tell("save", 1, timeout=0.05)
    assert str(error.value) == (
        f"process {own} of 4 heard nothing of {silent} on 'save' within 0.05 s; see in what they "
        f"wrote whether they ended, and that all processes save and restore at the same steps"
    )


def test_a_pipelines_checkpoint_says_what_to_give_for_another_model(tmp_path: Path) -> None:
    """A plain model has `blocks` where a pipeline has stages (issue 38)."""

    class Plain(nnx.Module):
        def __init__(self) -> None:
            self.blocks = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(k)) for k in range(2)])
            self.out = nnx.Linear(3, 3, rngs=nnx.Rngs(2))

    plain = Plain()
    layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(k + 5)) for k in range(2)]
    pipe = Pipeline(layers, 2, head=nnx.Linear(3, 3, rngs=nnx.Rngs(7)), mesh=make_mesh(stage=2))
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, pipe)
        assert refusal(checkpoints.restore, plain).endswith(
            "give the model that was saved; it holds the layers of a pipeline: for a model with "
            'other attributes give its parts, {"stages": [K modules], "embed": module, "head": '
            "module}, which may be modules of the model itself"
        )
        assert checkpoints.restore({"stages": list(plain.blocks), "head": plain.out}) == 1
    np.testing.assert_array_equal(plain.blocks[1].kernel[...], layers[1].kernel[...])


def test_a_model_with_a_list_of_stages_restores_a_pipelines_checkpoint(tmp_path: Path) -> None:
    """Layers are numbered across stages: here two stages of three layers, or three of two."""

    class Plain(nnx.Module):
        def __init__(self) -> None:
            layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(k)) for k in range(6)]
            self.stages = nnx.List([nnx.List(layers[n : n + 2]) for n in (0, 2, 4)])

    plain, layers = Plain(), [nnx.Linear(3, 3, rngs=nnx.Rngs(k + 9)) for k in range(6)]
    stages = [nnx.Sequential(*layers[:3]), nnx.Sequential(*layers[3:])]
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, Pipeline(stages, 2, mesh=make_mesh(stage=2)))
        assert checkpoints.restore(plain) == 1
    for n, layer in enumerate(layers):
        np.testing.assert_array_equal(plain.stages[n // 2][n % 2].kernel[...], layer.kernel[...])


# --- one run in a folder ---


@pytest.mark.few
@pytest.mark.parametrize("way", ["made", "made by another path", "saves the same step"])
def test_a_save_under_way_outlives_other_checkpoints_of_its_folder(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 52: `Checkpoints(folder)`, made anew in one process, removed the files."""
    folder, digests, begun = tmp_path / "run", manifest.digests, threading.Event()

    def slow(*given: Any) -> Any:
        begun.set()
        time.sleep(0.2)
        return digests(*given)

    monkeypatch.setattr(manifest, "digests", slow)
    monkeypatch.setattr(checkpoints_folder, "CAN_WAIT_AT_EXIT", True)
    (tmp_path / "link").symlink_to(folder)
    first = Checkpoints(folder)
    first.save(1, Small(1))
    assert begun.wait(60)  # all arrays are written, and nothing has its name
    second = Checkpoints(tmp_path / "link" if way == "made by another path" else folder)
    first.save(2, Small(2))
    if way == "saves the same step":
        second.save(2, Small(3))
        second.wait()
    first.wait()
    model = Small(0)
    assert second.restore(model) == 2
    assert second.steps == [1, 2]
    seed = 3 if way == "saves the same step" else 2
    np.testing.assert_array_equal(model.weight, Small(seed).weight)


@pytest.mark.few
@pytest.mark.parametrize("ends", ["while it saves", "after it", "by close"])
def test_a_failed_save_is_told_if_nobody_waits(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Issue 52: the error of a `Checkpoints` that was collected was lost."""

    def full(*_: Any) -> None:
        time.sleep(0.1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(manifest, "write_manifest", full)
    monkeypatch.setattr(checkpoints_folder, "CAN_WAIT_AT_EXIT", True)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, Small(1))
    thread = checkpoints._thread
    assert thread is not None
    if ends == "by close":
        with pytest.raises(CheckpointError, match="of step 1 could not be written"):
            checkpoints.close()
        assert checkpoints._lock is None
    elif ends == "after it":
        thread.join()
    del checkpoints
    thread.join()
    gc.collect()
    said = capfd.readouterr().err
    assert ("the checkpoint of step 1 could not be written to" in said) == (ends != "by close")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_a_forked_process_holds_no_lock(way: str, tmp_path: Path) -> None:
    """Issue 52: a data worker of a killed run kept the folder's lock."""
    held = lock.take(tmp_path)
    assert held is not None
    if way == "os.fork":
        process = os.fork()
        if not process:
            time.sleep(60)
            os._exit(0)
    else:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        process = worker.pid
    try:
        del held  # as where the first process dies
        gc.collect()
        ended = time.monotonic() + 30  # the child closes its files when it comes to run
        while (taken := lock.take(tmp_path)) is None and time.monotonic() < ended:
            time.sleep(0.05)
        assert taken is not None
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_threads_open_and_save_to_one_folder_in_turn(tmp_path: Path) -> None:
    """Issue 67: one thread's temporary file was another's, and a folder was locked twice."""
    errors: list[BaseException] = []

    def work(folder: Path, number: int, gate: threading.Barrier) -> None:
        gate.wait()
        try:
            with Checkpoints(folder, keep=9) as checkpoints:
                if folder.name == "saved":
                    checkpoints.save(number, Small(number))
        except Exception as error:  # noqa: BLE001  # asserted below
            errors.append(error)

    for name in ("saved", *map(str, range(20))):
        gate = threading.Barrier(3)
        threads = [threading.Thread(target=work, args=(tmp_path / name, n, gate)) for n in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert errors == []
    assert Checkpoints(tmp_path / "saved").steps == [0, 1, 2]


def test_a_checkpoint_that_is_a_link_is_dropped_and_its_target_stays(tmp_path: Path) -> None:
    """Issue 67: the link could not be removed, and the step could not be saved again."""
    folder, disk = tmp_path / "run", tmp_path / "disk"
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, Small(1))
        checkpoints.wait()
        (folder / "step_000000001").rename(disk)
        (folder / "step_000000001").symlink_to(disk)
        checkpoints.save(1, Small(2))
        checkpoints.save(2, Small(3))
        checkpoints.save(1, Small(4))
        model = Small(0)
        assert checkpoints.restore(model) == 1
    np.testing.assert_array_equal(model.weight, Small(4).weight)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [lock.NAME, MARK, "step_000000001"]
    assert (disk / manifest.NAME).is_file()


def test_a_folder_may_be_a_link_to_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "large disk")
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(1, Small(1))
    assert (tmp_path / "run").is_symlink()
    assert Checkpoints(tmp_path / "large disk" / "checkpoints").steps == [1]


@pytest.mark.parametrize("whole", [False, True])
def test_a_save_within_an_update_says_what_it_leaves_out(whole: bool, tmp_path: Path) -> None:
    """Issue 67: calls of `Step(accumulate=)` since the last update are in no checkpoint."""
    pipe = Pipeline([nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(2)], 1, loss_fn=mean_square)
    step = Step(pipe, make_optimizer(pipe, optax.sgd(0.1)), accumulate=3)
    x = jnp.ones((2, 4))
    for _ in range(3 if whole else 2):
        step(x, x)
    with Checkpoints(tmp_path) as checkpoints, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoints.save(7, pipe, step.optimizer, plain={"step": step.plain()})
    text = (
        "the checkpoint of step 7 is saved after 2 of 3 calls of an update of Step(accumulate=3): "
        "it lacks the gradients of these calls, and a run that resumes from it loses them; save "
        "after a call that returns metrics"
    )
    found = [str(one.message) for one in caught if one.category is UserWarning]
    assert found == ([] if whole else [text])


HOLDER = """
import sys, time
from pipeline.training.checkpoints import Checkpoints
held = Checkpoints(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_two_runs_in_one_folder_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(CheckpointError) as error:
                Checkpoints(folder)
            assert str(error.value) == (
                f"{folder} is written to by another process, and two runs in one folder would "
                f"delete each other's checkpoints: name another folder, or wait until that run has "
                f"ended; Checkpoints(folder, read_only=True) reads it meanwhile"
            )
            assert Checkpoints(folder, read_only=True).steps == []
        finally:
            other.kill()
    first = Checkpoints(folder)  # a process that died holds nothing
    second = Checkpoints(folder)  # in one process they are two names of one run
    first.save(1, Small(0))
    second.close()
    first.close()
    assert first.steps == [1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"  # who has closed holds nothing
            with pytest.raises(CheckpointError, match="is written to by another process"):
                first.save(2, Small(0))
        finally:
            other.kill()
    first.save(2, Small(0))
    first.close()
