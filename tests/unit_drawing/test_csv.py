"""Files: they round-trip, and whatever a file holds, the error says where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from schedules import Schedule, ScheduleError, build, from_orders
from tests.support.sizes import is_legal

TEXT = b"0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
ORDERS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "mine.csv"


def refusal(path, data: bytes | None = None) -> str:
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(path)
    return str(caught.value)


def read(data: bytes, path: Path) -> Schedule | None:
    """The schedule in a file, None if it is refused in the proper way."""
    path.write_bytes(data)
    try:
        return Schedule.from_csv(path)
    except ScheduleError as error:
        message = str(error)
    assert message.startswith(f"{path}: ")
    return None


def test_one_row_per_rank_and_an_empty_cell_where_it_idles(path):
    from_orders(ORDERS).to_csv(path)
    assert path.read_bytes() == TEXT


@pytest.mark.parametrize(
    ("name", "S", "K", "M"),
    [
        (name, S, K, M)
        for name in schedules.names()
        for S, K, M in [(1, 1, 1), (4, 4, 6), (3, 6, 5), (2, 4, 5), (1, 4, 2), (5, 5, 2)]
        if is_legal(name, S, M, K // S)
    ],
)
def test_a_schedule_round_trips(name, S, K, M, path):
    schedule = build(name, num_ranks=S, num_microbatches=M, num_stages=K)
    for each in (schedule, schedule.forward()):
        each.to_csv(str(path))
        assert Schedule.from_csv(str(path), name=name) == each


def test_an_overlapped_pair_is_one_cell(path):
    schedule = from_orders([["0F0", "0F1", "1F0", "1B0", "1F1&0B0", "1B1", "0B1"]], name="mine")
    schedule.to_csv(path)
    assert path.read_bytes() == b"0F0,0F1,1F0,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n"
    assert Schedule.from_csv(path) == schedule
    path.write_bytes(path.read_bytes().replace(b"(1F1;0B0)", b" ( 1F1;0B0 ) "))
    assert Schedule.from_csv(path) == schedule


def test_a_pair_that_can_never_start_is_still_written(path):
    orders = [["0F0", "1F0&1B0", "0B0"]]
    from_orders(orders).to_csv(path)
    assert path.read_bytes() == b"0F0,(1F0;1B0)OVERLAP_F_B,0B0\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + TEXT,
        TEXT.replace(b"\n", b"\r\n"),
        TEXT.replace(b"\n", b"\r"),
        TEXT.rstrip(b"\n"),
        TEXT + b"\n \r\n\n",
        TEXT.replace(b",", b" ,\t"),
        TEXT.replace(b"0F0", b'"0F0"'),
        b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    ],
)
def test_what_other_programs_make_of_it_reads_the_same(data, path):
    path.write_bytes(data)
    assert Schedule.from_csv(path) == from_orders(ORDERS, name="mine")


@pytest.mark.parametrize(
    ("data", "where", "fault"),
    [
        (
            b"0F0,0X0\n",
            "row 1, column 2",
            (
                "action '0X0' is not of the form {stage}{kind}{microbatch} with kind one of F, B, "
                "I, W; write it like 3F0"
            ),
        ),
        (
            b"0F0,0B0\n,,1F0\x00\n",
            "row 2, column 3",
            (
                "action '1F0\\x00' is not of the form {stage}{kind}{microbatch} with kind one of "
                "F, B, I, W; write it like 3F0"
            ),
        ),
        (
            b"0F" + b"9" * 200_000,
            "row 1, column 1",
            (
                "action '0F9999999999999999999999999999999999... is not of the form "
                "{stage}{kind}{microbatch} with kind one of F, B, I, W; write it like 3F0"
            ),
        ),
        (
            b"0F0,0B0\r\n0F999999999999\r\n",
            "row 2, column 1",
            (
                "action 0F999999999999 is of microbatch 999999999999, but the file has 3 actions "
                "in all; every microbatch from 0 on takes part, so correct the number"
            ),
        ),
        (
            b"999999999999F0\n",
            "row 1, column 1",
            (
                "action 999999999999F0 is of stage 999999999999, but the file has 1 actions in "
                "all; every stage from 0 on takes part, so correct the number"
            ),
        ),
        (
            b"0F0,0B0\n1F0,\xff\xfe\n",
            "row 2, column 2",
            "byte 0xff is not UTF-8; save the file as CSV in UTF-8",
        ),
        (
            b"0F0,(0F1;1B0;0F2)OVERLAP_F_B\n",
            "row 1, column 2",
            (
                "'(0F1;1B0;0F2)OVERLAP_F_B' is not a pair of actions; write an F and a backward of "
                "another stage, like (1F0;2B1)OVERLAP_F_B"
            ),
        ),
        (
            b"0F0,( 0F1 ; 1X0 )OVERLAP_F_B\n",
            "row 1, column 2",
            (
                "action '1X0' is not of the form {stage}{kind}{microbatch} with kind one of F, B, "
                "I, W; write it like 3F0"
            ),
        ),
    ],
)
def test_a_bad_cell_is_named_with_its_place(data, where, fault, path):
    assert refusal(path, data) == f"{path}: {where}: {fault}"


@pytest.mark.parametrize(
    "cell",
    [
        *["0SEND_F1", "1RECV_B0", "0UNSHARD", "0RESHARD", "UNSHARD", "0REDUCE_GRAD", "1RECV_F10"],
        *["0WAIT_SEND_F1", "1WAIT_SEND_B0", "0WAIT_REDUCE_GRAD"],
    ],
)
def test_communication_actions_of_torch(cell, path):
    assert refusal(path, f"0F0,{cell}\n".encode()) == (
        f"{path}: row 1, column 2: {cell!r} is a communication action of "
        f"torch.distributed.pipelining; messages follow from the compute actions here, so export "
        f'those only (format="compute_only")'
    )


def test_all_bad_cells_are_named_up_to_a_few(path):
    lines = refusal(path, b"x,y\n" + b"z,\n" * 20).splitlines()
    assert [line.split(": action")[0] for line in lines[:3]] == [
        f"{path}: row 1, column 1",
        "row 1, column 2",
        "row 2, column 1",
    ]
    assert lines[-1] == "and 14 more"
    assert len(lines) == 9


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file(data, path):
    assert refusal(path, data) == (
        f"{path}: is empty; a timetable has one row per rank and a cell per action, like 0F0"
    )


def test_no_file(path):
    remedy = "give the path of a CSV file"
    assert refusal(path) == (
        f"{str(path)!r}: cannot be read as a timetable: No such file or directory; {remedy}"
    )
    assert refusal(path.parent) == (
        f"{str(path.parent)!r}: cannot be read as a timetable: Is a directory; {remedy}"
    )
    assert refusal("a\0b") == (
        f"'a\\x00b': cannot be read as a timetable: embedded null byte; {remedy}"
    )


def test_what_is_read_is_checked(path):
    assert refusal(path, TEXT.replace(b"0B1", b"0B0")) == "\n".join(
        [
            f"{path}: schedule 'mine' (S=2 ranks, K=2 stages, M=2 microbatches) has 2 faults",
            "- runs again: 0B0 (rank 0, step 4), first as 0B0 (rank 0, step 3)",
            "  every action runs once; take it out",
            "- missing: 0B1 (rank 0)",
            (
                "  every stage runs F and a backward (B, or I and then W) once for every "
                "microbatch; add it"
            ),
            "step      0    1    2    3    4",
            "rank 0  0F0  0F1    . [0B0][0B0]  missing 0B1",
            "rank 1    .  1F0  1B0  1F1  1B1",
        ]
    )


@pytest.mark.parametrize("length", range(1, len(TEXT) - 2))
def test_no_truncated_file_is_taken_for_another_schedule(length, path):
    schedule = read(TEXT[:length], path)
    if schedule is not None:  # what the first row starts with is a schedule of its own
        assert schedule.placement == (0,)
        assert schedule.is_forward or b"0B1" in TEXT[:length]


def test_a_blank_row_is_a_rank_without_stages(path):
    assert "ranks that hold different numbers of stages: rank 0 holds 0; rank 1 holds 1" in refusal(
        path, b"\n0F0,0B0\n"
    )


def test_a_failed_write_leaves_the_old_file_alone(path, monkeypatch):
    def fail(self, target):
        raise OSError("disk full")

    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        from_orders(ORDERS).to_csv(path)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_written_again_keeps_its_mode(path, monkeypatch):
    path.write_bytes(b"old")
    path.chmod(0o600)
    from_orders(ORDERS).to_csv(path)
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "access", lambda *_: False)  # of another user
    with pytest.raises(PermissionError, match=r"Permission denied: .*\.csv"):
        from_orders(ORDERS).to_csv(path)


def test_writing_through_a_link_keeps_the_link(path):
    link = path.with_name("link.csv")
    path.write_bytes(b"old")
    link.symlink_to(path)
    from_orders(ORDERS).to_csv(link)
    assert link.is_symlink()
    assert path.read_bytes() == TEXT


@given(st.binary(max_size=64))
def test_any_bytes(tmp_path_factory, data):
    read(data, tmp_path_factory.getbasetemp() / "any.csv")


@settings(max_examples=300)
@given(st.text(alphabet='0012FBIW,,\n" ', max_size=48))
def test_any_cells(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp()
    schedule = read(text.encode(), folder / "any.csv")
    if schedule is not None:
        schedule.to_csv(folder / "again.csv")
        assert Schedule.from_csv(folder / "again.csv", name=schedule.name) == schedule
