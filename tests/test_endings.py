"""However a process ends while the others go on, all end, and say which process and why."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from pipeline.processes import departure, waiting, watch
from pipeline.processes.initialize import initialize
from pipeline.processes.launch import Job, run
from pipeline.processes.waiting import Waiting
from tests import many

ROOT = Path(many.__file__).parents[1]

# The file alone: the package would load jax.
ALONE = f"""
import os, runpy, sys, threading
install = runpy.run_path({departure.__file__!r})["install"]
say = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())
install(lambda how, code: say(how, code), lambda: say("leaving"))
"""


def told(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ALONE + program], capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("pass", []),
        ("sys.exit()", []),
        ("sys.exit(0)", []),
        ("sys.exit(3)", ["its program ended with sys.exit(3) 3"]),
        ("sys.exit(-1)", ["its program ended with sys.exit(255) 255"]),
        ("sys.exit('no rows')", ["its program ended with sys.exit(1) 1"]),
        ("sys.exit((1, 2))", ["its program ended with sys.exit(1) 1"]),
        ("def f(): sys.exit(3)\nf()", ["its program ended with sys.exit(3) 3"]),
        ("try: sys.exit(3)\nexcept SystemExit: pass", []),
        ("try: sys.exit(3)\nexcept SystemExit as e: kept = e", []),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", []),
        ("1 / 0", ["it failed with ZeroDivisionError: division by zero 1"]),
        ("raise KeyError", ["it failed with KeyError 1"]),
        ("raise KeyboardInterrupt", ["it failed with KeyboardInterrupt 1"]),
        ("raise ValueError('a\\nb')", ["it failed with ValueError: a 1"]),
        ("sys.excepthook = print\nraise KeyError", ["it failed with KeyError 1"]),
    ],
)
def test_how_a_process_ends_is_told_before_it_leaves(program: str, said: list[str]) -> None:
    # What a replaced hook prints is its own affair.
    assert [line for line in told(program) if not line.startswith("<class")] == [*said, "leaving"]


def test_a_forked_child_tells_nothing() -> None:
    assert told("if os.fork() == 0: sys.exit(3)\nos.wait()") == ["leaving"]


@pytest.fixture
def _devices() -> None:
    """jax has looked for them: before, nothing is waited for."""
    jax.devices()


class Array:
    """What jax does not have yet."""

    def __init__(self, ready: bool = False) -> None:
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready


def ask(wait: Waiting, now: float) -> float:
    wait.seconds(now)
    wait._thread.join()
    return wait.seconds(now)


@pytest.mark.usefixtures("_devices")
def test_results_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_place", lambda: None)
    wait, arrays = Waiting(), [Array(ready=True)]
    monkeypatch.setattr(jax, "live_arrays", lambda: arrays)
    assert [ask(wait, now) for now in (0, 10)] == [0, 0]
    arrays.append(Array())
    assert [ask(wait, now) for now in (20, 30, 40)] == [0, 10, 20]
    arrays[1].ready = True
    assert ask(wait, 50) == 0
    for now in (60, 70, 80):  # work goes on, though there is always something to wait for
        arrays[1] = Array()
        assert ask(wait, now) == 0


@pytest.mark.usefixtures("_devices")
def test_jax_that_does_not_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_place", lambda: None)
    answer = threading.Event()
    monkeypatch.setattr(jax, "live_arrays", lambda: answer.wait() and [])
    wait = Waiting()
    assert [wait.seconds(now) for now in (0, 10, 20)] == [0, 0, 10]
    answer.set()
    assert ask(wait, 30) == 0


def test_the_main_thread_at_one_instruction_counts_but_in_libraries() -> None:
    found, seen = [], threading.Event()
    busy = threading.Lock()

    def look() -> None:
        while (place := waiting._place()) is not None:
            time.sleep(0.01)
        found.append(place)
        seen.set()
        while (place := waiting._place()) is None or place != waiting._place():
            time.sleep(0.01)
        found.append(place)
        busy.release()

    busy.acquire()
    thread = threading.Thread(target=look)
    thread.start()
    seen.wait()  # in the standard library
    busy.acquire()  # in this function, as a jitted function would be
    thread.join()
    assert found[0] is None
    assert found[1][0].co_name == "test_the_main_thread_at_one_instruction_counts_but_in_libraries"


def test_all_end_within_a_minute() -> None:
    grace = 5.0  # as by default
    asked = 4 * watch.BEAT  # a look at once, an answer, one that is later, and on its way
    assert watch.PATIENCE + asked + grace + 2 * watch.LAST <= 60


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": -1}, "timeout=-1: must be a number of seconds >= 0"),
        ({"grace": "5"}, "grace='5': must be a number of seconds >= 0"),
        ({"grace": float("nan")}, "grace=nan: must be a number of seconds >= 0"),
        (
            {"heartbeat": 0},
            "heartbeat=0: must be a number of seconds > 0, or math.inf for ever",
        ),
    ],
)
def test_times_are_numbers(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as error:
        initialize(**given)  # type: ignore[arg-type]
    assert str(error.value) == message


SOON = "this process cannot go on without it and ends with exit code 75\n"
WORDS = {
    "fail": (1, "it failed with ValueError: row 7 is not a number"),
    "fail_unseen": (1, "it failed with ValueError: row 7 is not a number"),
    "exit": (3, "its program ended with sys.exit(3)"),
    "exit_text": (1, "its program ended with sys.exit(1)"),
    "exit_with_a_thread": (3, "its program ended with sys.exit(3)"),
    "fork_and_die": (137, watch.CLOSED),
    "hang": (
        watch.LOST,
        "it gave no sign of life for 20 s, as when it is stopped or its host hangs",
    ),
}
MOST = [("exit", 0), ("hang", 0), ("hang", 1)]
REST = [(how, culprit) for how in WORDS for culprit in (0, 1) if (how, culprit) not in MOST]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "culprit"),
    [*MOST, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in REST)],
)
def test_others_end_and_name_who_ended(
    how: str, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, err = launched(monkeypatch, "end", culprit, how)
    wanted, why = WORDS[how]
    # Without the coordinator, jax may end a process before it has said all.
    assert code == wanted
    for index in {0, 1, 2} - {culprit}:
        said = f"[{index}] process {index} of 3: process {culprit} ("
        assert said in err
    assert f") is gone: {why}; {SOON}" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "culprit"),
    [("return", 0), ("leave", 1), pytest.param("return", 1, marks=pytest.mark.exhaustive)],
)
def test_a_program_that_is_done_too_early(
    how: str, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, err = launched(monkeypatch, "end", culprit, how)
    assert code == 1
    for index in {0, 1, 2} - {culprit}:
        said = f"[{index}] process {index} of 3: process {culprit} ("
        assert said in err
    assert ") is gone: its program has ended, but process " in err
    assert f" goes on and has been waiting for it for {watch.PATIENCE:.0f} s; {SOON}" in err
    assert f"[{culprit}] process {culprit} of 3: its program has ended, but process " in err


@pytest.mark.slow
def test_one_may_go_on_alone_when_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    code, err = launched(monkeypatch, "alone")
    assert code == 0, err
    assert "is gone" not in err


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    """Exit code and standard error of three processes of tests/many.py."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    err = io.BytesIO()
    command = [sys.executable, many.__file__, *map(str, arguments)]
    code = run(Job(command, 3), io.BytesIO(), err)
    return code, err.getvalue().decode()
