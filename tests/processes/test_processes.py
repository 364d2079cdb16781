"""Real processes over gloo: the same losses as in one, and the end of all when one dies."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from collectives import make_mesh
from pipeline import initialize, shard_batch
from pipeline.processes import local_rows
from pipeline.processes.launch import Job, free_port, run
from tests.processes import many, unlike
from tests.support.close import assert_close

ROOT = Path(many.__file__).parents[2]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def launch(processes: int, devices: int, *arguments: Any) -> tuple[int, str]:
    """Exit code and standard error of tests/processes/many.py."""
    err = io.BytesIO()
    command = [sys.executable, many.__file__, *map(str, arguments)]
    code = run(Job(command, processes, devices), io.BytesIO(), err)
    return code, err.getvalue().decode()


def losses(
    folder: Path, processes: int, devices: int, data: int, stages: int, *engine: Any
) -> list[float]:
    path = folder / "losses.json"  # the same option on all
    code, err = launch(processes, devices, "train", path, data, stages, *engine)
    assert code == 0, err
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one_bit_by_bit(tmp_path: Path) -> None:
    found = losses(tmp_path, 2, 1, data=1, stages=2)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        wanted = list(many.losses(data=1, ranks=2, stages=2))
    assert len(found) == many.STEPS
    assert found[-1] < 0.5 * found[0]
    assert found == wanted


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        return losses(tmp_path_factory.mktemp("one"), 1, 8, data=2, stages=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (4, 8))]
)
def test_any_number_of_processes_gives_the_losses_of_one(
    processes: int, one_process: list[float], tmp_path: Path
) -> None:
    assert losses(tmp_path, processes, 8 // processes, data=2, stages=8) == one_process


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_programs_of_any_number_of_processes_give_the_losses_of_one(
    processes: int, tmp_path: Path
) -> None:
    check_programs(tmp_path, processes, data=1, steps=500)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_programs_of_ranks_on_two_processes_give_the_losses_of_one(
    processes: int, tmp_path: Path
) -> None:
    """With 4 processes each has two ranks too."""
    check_programs(tmp_path, processes, data=2, steps=30)


def check_programs(folder: Path, processes: int, data: int, steps: int) -> None:
    devices = 4 * data
    sizes = data, 8, "programs", steps
    found = losses(folder, processes, devices // processes, *sizes)
    assert len(found) == steps
    assert found == losses(folder, 1, devices, *sizes)


@pytest.mark.slow
def test_a_call_that_sends_waits_for_its_message() -> None:
    code, err = launch(2, 1, "message")
    assert code == 0, err


@pytest.mark.slow
def test_programs_give_the_losses_of_the_scan(tmp_path: Path) -> None:
    found = losses(tmp_path, 2, 4, 2, 8, "programs", 30)
    assert_close(found, losses(tmp_path, 2, 4, 2, 8), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_example_gives_the_losses_of_one_process(tmp_path: Path) -> None:
    example, found = ROOT / "examples" / "train_processes.py", []
    path = tmp_path / "losses.jsonl"  # the same option on all
    for processes in (1, 4, 8):
        err = io.BytesIO()
        command = [sys.executable, str(example), "--data=2", f"--losses={path}"]
        code = run(Job(command, processes, 8 // processes), io.BytesIO(), err)
        assert code == 0, err.getvalue().decode()
        lines = path.read_text(encoding="utf-8").splitlines()
        path.unlink()
        found.append([json.loads(line)[1] for line in lines])
    assert len(found[0]) == 30
    assert found[0][-1] < found[0][0]
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.slow
def test_the_example_says_how_many_data_shards_there_can_be() -> None:
    err = io.BytesIO()
    command = [sys.executable, str(ROOT / "examples" / "train_processes.py"), "--data=9"]
    assert run(Job(command, 1, 8), io.BytesIO(), err) == 1
    assert (
        "--data 9: must be between 1 and the number of devices, 8; virtual CPU devices are made by "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8, or by python -m pipeline launch "
        "--devices-per-process 8"
    ) in err.getvalue().decode()


@pytest.mark.slow
def test_unlike_stages_with_dropout_and_the_whole_batch_everywhere(tmp_path: Path) -> None:
    for processes in (1, 2):
        path = tmp_path / "found.json"  # the same option on all
        code, err = launch(processes, 4 // processes, "whole", path)
        assert code == 0, err
        path.rename(tmp_path / str(processes))
    one, two = (json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in "12")
    assert list(map(len, one)) == [4, 4, 6]  # twice the loss and gradients, and tokens
    for here, there in zip(two, one, strict=True):
        assert_close(here, there, tolerance=1e-6)  # sums over ranks, in another order


@pytest.mark.parametrize(("data", "stage"), [(1, 8), (2, 4), (8, 1)])
def test_one_process_brings_all_rows(data: int, stage: int) -> None:
    mesh = make_mesh(data=data, stage=stage)
    np.testing.assert_array_equal(local_rows(mesh, 16), np.arange(16))
    x = np.arange(32.0).reshape(16, 2)
    found = shard_batch({"x": x}, mesh)["x"]
    np.testing.assert_array_equal(found, x)
    assert found.sharding.shard_shape(found.shape) == (16 // data, 2)


def test_rows_that_shards_cannot_share() -> None:
    with pytest.raises(ValueError) as error:
        local_rows(make_mesh(data=4, stage=2), 18)
    assert str(error.value) == (
        "num_rows=18: the mesh's data axis has 4 shards, which take equally many; use a multiple "
        "of 4"
    )


def test_a_single_process_initializes_nothing() -> None:
    assert initialize().count == 1
    assert not jax.distributed.is_initialized()


@pytest.mark.slow
def test_different_options_are_told_before_anything_runs() -> None:
    code, err = launch(3, 1, "config")
    assert code == 1
    wanted = (
        "ValueError: the processes do not run the same program: config.model.width is 8 (processes "
        "0-1), 9 (process 2); give all of them the same code, versions and options\n"
    )
    for process in range(3):
        assert f"[{process}] {wanted}" in err


@pytest.mark.slow
def test_models_of_different_seeds_are_refused() -> None:
    code, err = launch(2, 1, "seeds")
    assert code == 1
    for process in range(2):
        assert re.search(
            rf"\[{process}\] ValueError: chunks\.0\.\S+ differs between processes: its checksum is "
            rf"[0-9a-f]{{8}} on process 0 and [0-9a-f]{{8}} on process 1; make the model from the "
            rf"same seed or the same checkpoint on all processes, and let only the batch differ "
            rf"\(shard_batch\)\n",
            err,
        ), err


def start(index: int, count: int, port: int, folder: Path, *arguments: str) -> Any:
    """A process as in a terminal of its own, without a launcher; its output lies in a file."""
    import subprocess

    place = {
        "SHARDPIPE_COORDINATOR": f"127.0.0.1:{port}",
        "SHARDPIPE_PROCESSES": str(count),
        "SHARDPIPE_PROCESS": str(index),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
    }
    with (folder / str(index)).open("wb") as output:
        return subprocess.Popen(
            [sys.executable, many.__file__, *arguments],
            env=os.environ | place,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "what"), [(0, "wait"), (2, "wait"), (2, "steps")])
def test_a_killed_process_ends_all_others_and_is_named(
    victim: int, what: str, tmp_path: Path
) -> None:
    port = free_port()
    processes = [start(index, 3, port, tmp_path, what) for index in range(3)]
    try:
        while not all(b"going" in (tmp_path / str(i)).read_bytes() for i in range(3)):
            assert [process.poll() for process in processes] == [None] * 3
            time.sleep(0.1)
        processes[victim].send_signal(signal.SIGKILL)
        for index, process in enumerate(processes):
            code = process.wait(timeout=600)  # it takes seconds, but this machine may be stopped
            said = (tmp_path / str(index)).read_text(encoding="utf-8", errors="replace")
            if victim == 0 and index:
                assert code == -signal.SIGABRT
                assert "detected fatal errors" in said
            if victim == 2 and index == 0:  # which may end process 1 with itself
                assert code == 1
                assert re.search(
                    r"process 0 of 3: its program has failed, but process(es 1-| )2 did not come "
                    r"to an end within 5 s: killed, or waiting for this one; it leaves with exit "
                    r"code 1\n",
                    said,
                )
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_exception_ends_all_others_and_is_shown(culprit: int) -> None:
    code, err = launch(3, 1, "end", culprit, "fail")
    assert code == 1
    assert f"launch: process {culprit} (pid " in err
    last = err[err.index("its last lines:") :]
    assert f"[{culprit}] ValueError: row 7 is not a number\n" in last
    assert all(line.startswith(f"[{culprit}] ") for line in last.splitlines()[1:])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_ranks_with_unlike_meshes_on_several_processes(steps: int, tmp_path: Path) -> None:
    """Two processes give the losses of one until one dies; four go on, with other meshes."""

    def train(name: str, processes: int, meshes: str, last: int, *how: str) -> tuple[Any, str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        err = io.BytesIO()
        command = [sys.executable, unlike.__file__, str(folder), meshes, str(last), *how]
        code = run(Job(command, processes, 8 // processes), io.BytesIO(), err)
        text = err.getvalue().decode()
        assert bool(code) == bool(how), text
        return json.loads((folder / "losses.json").read_text(encoding="utf-8")), text

    whole, _ = train("one", 1, "wide", steps)
    half, text = train("many", 2, "wide", steps // 2, "dies")
    assert half == whole[: steps // 2]
    assert "process 1" in text
    # Two of four processes share a rank, and sum its four gradients in another order.
    rest, _ = train("many", 4, "other", steps)
    assert len(rest) == steps // 2
    assert_close(rest, whole[steps // 2 :], tolerance=1e-5)
