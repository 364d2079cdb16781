"""A run that is killed, asked to stop, or stands still."""

from __future__ import annotations

import errno
import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from collectives import make_mesh
from pipeline.processes.launch import Job, run
from pipeline.training.faults import Stop, Watchdog, stop_on_signals
from tests.support.refusals import refusal
from tests.support.store import Store
from tests.training import survivor

ROOT = Path(survivor.__file__).parents[2]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def command(folder: Path, *arguments: Any) -> list[str]:
    return [sys.executable, survivor.__file__, *map(str, (folder, *arguments))]


def killed(folder: Path, steps: int, every: int, kills: int, seed: int) -> tuple[int, list[str]]:
    """Run to the end through kill -9 at random moments: how many there were, and standard error."""
    draw, count, said = random.Random(seed), 0, []
    while True:
        child = subprocess.Popen(
            command(folder, steps, every, 0.02), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert child.stdout is not None
        lines = draw.randint(1, 2 * steps // max(kills, 1)) if count < kills else steps
        for _, _line in zip(range(lines), child.stdout, strict=False):
            pass
        if count < kills:
            time.sleep(draw.uniform(0, 0.1))
            child.kill()
        _, err = child.communicate()
        said.append(err.decode())
        if child.returncode == 0:
            return count, said
        assert child.returncode == -signal.SIGKILL, said[-1]
        count += 1


@pytest.mark.parametrize(
    ("steps", "every", "kills"),
    [
        pytest.param(20, 4, 1, marks=pytest.mark.slow),
        pytest.param(300, 10, 20, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_a_run_that_is_killed_ends_with_the_same_bits(
    steps: int, every: int, kills: int, tmp_path: Path
) -> None:
    count, said = killed(tmp_path / "run", steps, every, kills, seed=kills)
    assert count >= 0.8 * kills
    assert not [text for text in said if "damaged" in text]
    with jax.numpy_dtype_promotion("standard"):  # of optax
        wanted = survivor.run(tmp_path / "whole", steps, steps)
    with np.load(tmp_path / "run.npz") as found:
        for own, other in zip(found.values(), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(own, survivor.numbers(other))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_asks_to_stop(name: str) -> None:
    number = signal.Signals[name]
    with stop_on_signals() as stop:
        assert not stop()
        assert not stop.requested(1)
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.reason == name
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_of_a_closed_terminal_asks_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", closed)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.reason == "SIGHUP"


def test_a_sighup_that_is_ignored_stays_so() -> None:
    """As under nohup (issue 52)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert run(Job([sys.executable, "-c", HANGS_UP], 1)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


HANGS_UP = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3)"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: whoever starts tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_twice_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested(0)
        assert capfd.readouterr().err == (
            "SIGINT: stopping after this step; once more ends it at once\n"
        )
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_the_main_thread_hears_signals() -> None:
    found: list[str] = []

    def enter() -> None:
        try:
            with stop_on_signals():
                pass
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    (text,) = found
    assert text == (
        "stop_on_signals() was called in a thread, and Python hands signals to the main one only; "
        "enter it there, or call Stop().ask() yourself"
    )


@pytest.mark.few
@pytest.mark.parametrize("seed", range(4))
def test_all_processes_stop_before_the_same_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that run ahead of each other by a few steps, as processes do."""
    store, count, draw = Store(monkeypatch), 4, random.Random(seed)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: store.own.index)
    asking, at = draw.randrange(count), draw.randrange(3, 12)
    pauses = [[draw.uniform(0, 0.03) for _ in range(400)] for _ in range(count)]
    watch = Stop._watch

    def program(index: int) -> Any:
        def watched(stop: Stop) -> None:
            store.own.index = index
            watch(stop)

        with lock:  # of one process at a time
            monkeypatch.setattr(Stop, "_watch", watched)
            stop = Stop()
            stop._topic = "stop/test"
        for step in range(400):
            if index == asking and step == at:
                stop.ask("SIGTERM")
            if stop.requested(step):
                return step, stop.reason
            time.sleep(pauses[index][step])
        return None

    lock = threading.Lock()
    found = store.each(*(lambda n=n: program(n) for n in range(count)))
    assert len(set(found)) == 1
    assert found[0][0] > at
    assert found[0][1] == "SIGTERM"


def test_a_process_that_never_asks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("pipeline.training.faults.ANSWER", 0.2)
    store.own.index = 0
    watch = Stop._watch

    def watched(stop: Stop) -> None:
        store.own.index = 0
        watch(stop)

    monkeypatch.setattr(Stop, "_watch", watched)
    stop = Stop()
    stop.ask()
    while not stop._holds:
        time.sleep(0.01)
    with pytest.raises(TimeoutError) as error:
        stop()
    assert str(error.value) == (
        "process 0 of 2 is to stop and heard nothing of process 1 within 0.2 s; stop_on_signals() "
        "belongs around the loop of every process, and stop.requested(step) before each of its "
        "steps"
    )


def test_a_step_that_does_not_end_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    with Watchdog(0.2, make_mesh(stage=4, data=2), end=ended.append) as dog:
        dog.beat(6)
        dog.beat(7)
        time.sleep(1)
    err = capfd.readouterr().err
    assert err.startswith(
        "process 0 of 1 (ranks 0-3) is stuck: for 0 s in step 7\na step may take 0.2 s; it ends "
        "with exit code 70. The stacks of its threads:\n"
    )
    assert "test_faults.py" in err
    assert ended == [70]


def test_a_step_that_fails_while_others_are_asked_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    ended: list[int] = []

    def train() -> None:
        with Watchdog(0.4, end=ended.append) as dog:
            dog.beat(6)
            dog.beat(7)
            while "shardpipe/stuck/0" not in store.texts:
                time.sleep(0.01)
            raise RuntimeError("peer closed")

    with pytest.raises(RuntimeError, match=r"^peer closed$"):
        train()
    assert (ended, capfd.readouterr().err) == ([], "")


def test_a_stuck_process_speaks_when_the_service_is_gone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def gone(folder: str) -> None:
        raise OSError(f"nobody answers of {folder}")

    ended: list[int] = []
    with Watchdog(0.2, end=ended.append) as dog:
        dog.beat(6)
        dog.beat(7)
        while "shardpipe/stuck/0" not in store.texts:
            time.sleep(0.01)
        monkeypatch.setattr(store, "key_value_dir_get", gone)
        time.sleep(0.6)
    err = capfd.readouterr().err
    assert err.startswith("process 0 of 2 is stuck: for 0 s in step 7\n  process 1: says nothing: ")
    assert ended == [70]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a new shape", "a new function"])
def test_a_step_that_is_compiled_may_take_longer(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Issue 52: only the first step might."""
    ended: list[int] = []
    compiled = jax.jit(lambda x: -x)
    other = jax.jit(lambda x: +x)
    with Watchdog(0.3, end=ended.append) as dog:
        dog.beat(1)
        compiled(np.ones(3))
        dog.beat(2)
        dog.beat(3)
        compiled(np.ones(4)) if kind == "a new shape" else other(np.ones(3))
        time.sleep(0.8)
        assert not ended
        dog.beat(4)
        compiled(np.ones(3))
        time.sleep(0.8)
    assert "is stuck: for 0 s in step 4" in capfd.readouterr().err
    assert ended == [70]


def test_steps_that_end_are_not_told(capfd: pytest.CaptureFixture[str]) -> None:
    with Watchdog(0.4) as dog:
        for step in range(10):
            dog.beat(step)
            time.sleep(0.08)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "3", True])
def test_no_time_for_a_step(seconds: Any) -> None:
    assert refusal(Watchdog, seconds) == (
        f"seconds={seconds!r}: must be a number > 0, how long a step may take before it counts as "
        f"stuck"
    )


def launched(folder: Path, *arguments: Any, seconds: float = 0, number: int = 0) -> tuple[Any, ...]:
    """Two processes of two devices each: exit code, output and errors, after a signal to all."""
    out, err = io.BytesIO(), io.BytesIO()
    if number:

        def send() -> None:
            while b"step 8" not in out.getvalue():
                time.sleep(0.1)
            time.sleep(seconds)
            os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()
    code = run(Job(command(folder, *arguments), 2, 2, grace=60.0), out, err)
    return code, out.getvalue().decode(), err.getvalue().decode()


@pytest.mark.slow
def test_sigterm_to_a_launcher_stops_all_processes_before_one_step(tmp_path: Path) -> None:
    code, out, err = launched(tmp_path / "run", 4000, 5, 0.05, number=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    stopped = re.findall(r"stopped before (\d+)", out)
    assert len(stopped) == 2, err
    assert len(set(stopped)) == 1
    code, out, err = launched(tmp_path / "run", int(stopped[0]) + 3, 5, 0)
    assert code == 0, err
    again = [int(step) for step in re.findall(r"step (\d+) ", out)]
    assert min(again) == int(stopped[0])


@pytest.mark.slow
def test_a_stuck_collective_ends_with_a_message(tmp_path: Path) -> None:
    code, _, err = launched(tmp_path / "run", 40, 100, 0, 5)
    assert code == 70
    assert re.search(r"process 0 of 2 \(ranks? [\d, -]+\) is stuck: for \d+ s in step 5", err), err
    assert re.search(r"process 1: for \d+ s in step 4", err), err
