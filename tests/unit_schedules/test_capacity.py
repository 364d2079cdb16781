"""Requests for more memory than there is are refused before any is allocated."""

from __future__ import annotations

import sys

import pytest

from schedules import ScheduleError, build, lower, simulate
from schedules.core import capacity
from schedules.core.capacity import _control_groups, memory

GIB = 1 << 30


def refusal(function, *args, **options) -> str:
    with pytest.raises(ScheduleError) as caught:
        function(*args, **options)
    return str(caught.value)


def test_sizes_that_no_machine_can_hold():
    message = refusal(build, "gpipe", num_ranks=2, num_microbatches=10**15)
    assert message == (
        "num_microbatches=1000000000000000 with num_stages=2: a schedule of 4000000000000000 "
        "actions or more, which need about 888.2 PiB of memory; this process can have "
        f"{capacity.bytes_text(memory())}: use fewer microbatches, or fewer stages"
    )
    assert "need about 562949953421312.0 PiB of memory" in refusal(
        build, "gpipe", num_ranks=2, num_microbatches=10**99
    )


def test_the_limit_is_what_the_process_can_have(monkeypatch):
    sizes = {"num_ranks": 2, "num_microbatches": 2**19}
    monkeypatch.setattr(capacity, "memory", lambda: GIB // 2)
    assert refusal(build, "looped_bfs", **sizes, num_stages=4) == (
        "num_microbatches=524288 with num_stages=4: a schedule of 4194304 actions or more, which "
        "need about 1000.0 MiB of memory; this process can have 512.0 MiB: use fewer microbatches, "
        "or fewer stages"
    )


@pytest.mark.parametrize("run", [lower, lambda s: simulate(s, clock="lockstep")])
def test_tables_are_refused_before_they_are_allocated(monkeypatch, run):
    """Many ranks and one microbatch: few actions, but a slot of every rank for each of them."""
    schedule = build("gpipe", num_ranks=4096, num_microbatches=1)
    monkeypatch.setattr(capacity, "memory", lambda: GIB)
    assert refusal(run, schedule) == (
        "schedule 'gpipe' (4096 ranks, 8192 actions): its tables of 8192 slots for every rank, "
        "which need about 1.9 GiB of memory; this process can have 1.0 GiB: lower a schedule of "
        "fewer ranks, or of fewer microbatches"
    )


def test_nobody_is_asked_about_little(monkeypatch):
    monkeypatch.setattr(capacity, "memory", lambda: 0)
    assert lower(build("1f1b", num_ranks=4, num_microbatches=8)).num_ticks == 22


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits there")
def test_memory_is_finite():
    assert 0 < memory() < float("inf")


def test_control_groups(tmp_path):
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert list(_control_groups(tmp_path)) == []  # no Linux
    write("proc/self/cgroup", "12:cpu:/a\n4:hugetlb,memory:/a/b\n0::/c/d\n")
    write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n")
    write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "2000\n")
    write("sys/fs/cgroup/c/d/memory.max", "max\n")
    write("sys/fs/cgroup/c/memory.max", "3000\n")
    assert list(_control_groups(tmp_path)) == [2000, 1000, 3000]
