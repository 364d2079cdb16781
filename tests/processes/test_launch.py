"""Starting processes: their lines, how one failure ends all, and that none is left behind."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pipeline.cli import main as cli
from pipeline.processes.launch import Job, run

PREAMBLE = "import os, signal, subprocess, sys, time\nme = int(os.environ['SHARDPIPE_PROCESS'])\n"
FOREVER = "time.sleep(3600)"


def script(folder: Path, *lines: str) -> Path:
    path = folder / "program.py"
    path.write_text(PREAMBLE + textwrap.dedent("\n".join(lines)), encoding="utf-8")
    return path


def launch(path: Path, processes: int, grace: float = 60.0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = io.BytesIO(), io.BytesIO()
    code = run(Job([sys.executable, str(path)], processes, grace=grace), out, err)
    # Process ids differ from run to run.
    return code, out.getvalue().decode(), re.sub(r"pid \d+", "pid N", err.getvalue().decode())


def test_lines_have_numbers_and_are_never_mixed(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "for i in range(200):",
        "    for part in (f'{me}:{i} ', 'x' * 50, '\\n'):",
        "        sys.stdout.write(part)",
        "        sys.stdout.flush()",
        "print('error', me, file=sys.stderr)",
        "print('no end', end='')",
    )
    code, out, err = launch(path, 3)
    assert code == 0
    for me in range(3):
        mine = [line for line in out.splitlines() if line.startswith(f"[{me}] ")]
        assert mine == [*(f"[{me}] {me}:{i} {'x' * 50}" for i in range(200)), f"[{me}] no end"]
    assert len(out.splitlines()) == 603
    assert sorted(err.splitlines()) == [f"[{me}] error {me}" for me in range(3)]


def test_each_process_finds_its_place(tmp_path: Path) -> None:
    names = "SHARDPIPE_COORDINATOR SHARDPIPE_PROCESSES XLA_FLAGS JAX_PLATFORMS"
    path = script(tmp_path, f"print(me, *(os.environ[n] for n in '{names}'.split()))")
    out = io.BytesIO()
    job = Job([sys.executable, str(path)], 2, devices=3, port=4321)
    assert run(job, out, io.BytesIO()) == 0
    for line in out.getvalue().decode().splitlines():
        assert re.fullmatch(
            r"\[(\d)\] \1 127.0.0.1:4321 2 .*=8 --xla_force_host_platform_device_count=3 cpu", line
        )


def test_the_first_failure_stops_all_and_is_shown_last(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "for i in range(30): print(i)",
        f"if me != 1: {FOREVER}",
        "print('gone')",
        "sys.exit(7)",
    )
    code, _, err = launch(path, 3)
    assert code == 7
    last = "".join(f"[1] {i}\n" for i in range(11, 30))
    assert err.endswith(
        f"launch: process 1 (pid N) failed with exit code 7; stopping 0, 2\n"
        f"launch: process 1 (pid N) failed with exit code 7; its last lines:\n{last}[1] gone\n"
    )


def test_who_does_not_end_is_killed(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "print('ready')",
        "if me == 0:",
        "    time.sleep(1)",
        "    sys.exit(1)",
        FOREVER,
    )
    code, _, _ = launch(path, 2, grace=0.5)
    assert code == 1


def test_what_a_process_starts_ends_with_it(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])",
        "print(child.pid)",
    )
    code, out, _ = launch(path, 2)
    assert code == 0
    for line in out.splitlines():
        assert ended(int(line.split()[1]))


def ended(pid: int) -> bool:
    """True if a process ends; it may take a while."""
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except OSError:
            return True
        if state[0] == "Z":  # nobody is left to ask how it ended
            return True
        time.sleep(0.01)
    return False


UNGUARDED = """
import contextlib, os, signal, sys
from pipeline.processes import launch

@contextlib.contextmanager
def guard(grace):
    def watch_over(group):
        print(group, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    yield watch_over

launch._guard = guard
launch.run(launch.Job([sys.executable, sys.argv[1]], 1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_runs_before_it_is_watched(tmp_path: Path) -> None:
    """A launcher that is killed before its guard knows of a process leaves none."""
    path = script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w').close()", FOREVER)
    command = [sys.executable, "-c", UNGUARDED, path]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert ended(int(done.stdout))
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "launch: SIGINT: stopping all processes\n"),
        pytest.param(
            *(signal.SIGTERM, 143, "launch: SIGTERM: stopping all processes\n"),
            marks=pytest.mark.slow,
        ),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_a_launcher_that_ends_leaves_nobody(
    number: int, code: int, said: str, tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])",
        "print(os.getpid(), child.pid)",
        f"try: {FOREVER}",
        "except KeyboardInterrupt: pass",
    )
    command = [sys.executable, "-m", "pipeline", "launch", "--processes=2", "--grace=2", "--", path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()[1:]]
        launcher.send_signal(number)
        assert launcher.wait() == code
        assert launcher.stderr.read().startswith(said)
    assert len(pids) == 4
    assert all(map(ended, pids))


def environment() -> dict[str, str]:
    root = str(Path(cli.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root}


def test_a_module(tmp_path: Path) -> None:
    path = script(tmp_path, "print(me, *sys.argv[1:])")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pipeline", "launch"),
            "--processes=1",
            "--",
            "-m",
            path.stem,
            "a",
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[0] 0 a\n"), done.stderr


EXAMPLE = "python -m pipeline launch --processes 4 -- train.py --steps 100"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("launch", " launch: the following arguments are required: --processes"),
        (
            "launch --processes 0 -- x",
            " launch: argument --processes: '0' is not a whole number >= 1",
        ),
        (
            "launch --processes x -- x",
            " launch: argument --processes: 'x' is not a whole number >= 1",
        ),
        (
            "launch --processes 2 --devices-per-process -1 -- x",
            " launch: argument --devices-per-process: '-1' is not a whole number >= 1",
        ),
        (
            "launch --processes 2 --grace nan -- x",
            " launch: argument --grace: 'nan' is not a number >= 0",
        ),
        (
            "launch --processes 2 x.py",
            (f" launch: what to start comes after --, and there is no --; for example {EXAMPLE}"),
        ),
        (
            "launch --processes 2 --",
            (
                f" launch: there is nothing after --; give a script or -m MODULE, for example "
                f"{EXAMPLE}"
            ),
        ),
        (
            "launch --processes 2 -- none.py",
            " launch: none.py is no file; give the path of a Python script, or -m MODULE",
        ),
        (
            "launch --processes 2 -- -m",
            " launch: -m names no module; give -- -m MODULE [arguments]",
        ),
        (
            "launch --processes 2 -- -c x",
            (
                " launch: -c comes before the script; give -- SCRIPT.py or -- -m MODULE, then "
                "arguments"
            ),
        ),
        (
            "launch --processes 2 --fast -- there.py",
            " launch: --fast is not an option; --help lists them, the program's follow --",
        ),
        ("", ": the following arguments are required: COMMAND"),
    ],
)
def test_bad_input(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").touch()
    with pytest.raises(SystemExit) as error:
        cli.main(arguments.split())
    assert error.value.code == 2
    assert capsys.readouterr().err == f"python -m pipeline{message}\n"


def test_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    said = capsys.readouterr().out
    assert "exit codes: 0 all processes ended well; 2 the command cannot run as given" in said
