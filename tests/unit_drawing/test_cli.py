"""The command line: what it prints, for people and for programs, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import schedules
from schedules import Costs, Schedule, build, simulate
from schedules.tools.main import main
from schedules.tools.records import read_json, report_record

SIZES = ["-S", "4", "-M", "8"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_draw_prints_a_grid_without_colour_where_nobody_reads_it(capsys):
    code, out, err = run(capsys, "draw", "1f1b", "-S", "2", "-M", "2")
    assert (code, err) == (0, "")
    assert "rank 0   0F0  0F1    .  0B0    .  0B1" in out
    assert "\x1b" not in out


def test_draw_prints_colour_where_it_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in run(capsys, "draw", "1f1b", "-S", "2", "-M", "2")[1]


@pytest.mark.few
@pytest.mark.parametrize("suffix", ["txt", "svg", "png", "json", "html"])
def test_draw_writes_files(capsys, tmp_path, suffix):
    if suffix in ("svg", "png"):
        pytest.importorskip("matplotlib")
    path = tmp_path / f"drawing.{suffix}"
    assert run(capsys, "draw", "1f1b", "zb_h1", *SIZES, "-o", str(path)) == (0, "", "")
    assert path.stat().st_size > 500


@pytest.mark.parametrize("command", ["draw", "convert", "auto", "draw --costs"])
def test_no_output_is_written_over_an_input(capsys, tmp_path, command):
    """Issue 67: a timetable was lost to its own drawing, and measured costs to a timetable."""
    path, link = tmp_path / "mine.json", tmp_path / "link.json"
    run(capsys, "convert", "1f1b", str(path), *SIZES)
    if "auto" in command or "--costs" in command:
        path.write_text(json.dumps({"costs": {"f": 1, "i": 1, "w": 1}}))
    before = path.read_bytes()
    link.symlink_to(path)
    arguments = {
        "draw": ["draw", "1f1b", str(path), *SIZES, "-o", str(link)],
        "convert": ["convert", str(link), str(path)],
        "auto": ["auto", *SIZES, "--costs", str(path), "-o", str(path)],
        "draw --costs": ["draw", "1f1b", *SIZES, "--costs", str(link), "-o", str(path)],
    }[command]
    code, out, err = run(capsys, *arguments)
    option, target = ("FILE" if command == "convert" else "--output"), arguments[-1]
    assert (code, out) == (2, "")
    assert err == (
        f"python -m schedules: {option} {target} is a file that the command reads, and it would "
        f"be lost; give another path\n"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", ["txt", "svg", "json", "html"])
def test_a_drawing_that_does_not_fit_on_the_disk_leaves_the_old_one(
    capsys, tmp_path, monkeypatch, suffix
):
    """Issue 67: every writer names its file, and loses nothing that was there."""
    if suffix == "svg":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"drawing.{suffix}"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run(capsys, "draw", "1f1b", *SIZES, "-o", str(path))
    assert code == 2
    assert err == (
        f"python -m schedules: {path}: No space left on device; give a path that can be read and "
        f"written\n"
    )
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(path.name, "old")]


def test_table_sums_idle_time_by_cause(capsys):
    code, out, _ = run(capsys, "table", "gpipe", "-S", "2", "-M", "2", "--optimizer", "1")
    assert code == 0
    assert out == (
        "gpipe: S=2 ranks, K=2 stages, M=2 microbatches, event clock\n"
        "rank  stages  work  fill  optimizer wait  idle  in span  peak\n"
        "0          0     6     3               0     3        3     2\n"
        "1          1     6     1               2     3        0     2\n"
        "makespan 9, with the optimizer 10; bubble 33.3% of the step, 33.3% of the longest span\n"
    )


def test_table_for_programs(capsys):
    options = ["--f", "1,2,3,4", "--i", "2", "--w", "1", "--comm", "0.5", "--clock", "lockstep"]
    code, out, _ = run(
        capsys, "table", "zb_h1", *SIZES, *options, "--partners", "--delayed", "--json"
    )
    report = simulate(
        build("zb_h1", num_ranks=4, num_microbatches=8),
        Costs(f=(1, 2, 3, 4), i=2, w=1, comm=0.5),
        "lockstep",
        partners=True,
        delayed=True,
    )
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(report_record(report)))


def test_compare_has_the_quickest_first_and_says_why_others_are_absent(capsys):
    code, out, _ = run(capsys, "compare", *SIZES, "--clock", "lockstep", "--json")
    assert code == 0
    found = json.loads(out)
    spans = [record["makespan"] for record in found["compared"]]
    assert spans == sorted(spans)
    names = {record["schedule"] for record in found["compared"]}
    assert names | set(found["absent"]) == set(schedules.names())
    assert found["absent"]["zb_v"].startswith("-K 4 with -S 4: zb_v is defined for 2 stages")
    text = run(capsys, "compare", *SIZES, "--clock", "lockstep")[1].splitlines()
    assert text[0].split() == [
        "schedule",
        "K",
        "makespan",
        "bubble",
        "in",
        "span",
        "peak",
        "ticks",
        "buffers",
    ]
    assert len(text) == 1 + len(found["compared"]) + len(found["absent"])


def test_compare_stages_of_several_sizes(capsys):
    """A stage of K = 2 S takes half of what one of K = S takes."""
    names = ["gpipe", "looped_bfs"]
    options = [*SIZES, "-K", "4", "8", "--f", "2", "--i", "2", "--w", "2", "--json"]
    found = json.loads(run(capsys, "compare", *names, *options)[1])["compared"]
    spans = {(r["schedule"], r["num_stages"]): r["makespan"] for r in found}
    assert spans["gpipe", 4] == spans["looped_bfs", 4] == (8 + 3) * 6
    assert spans["looped_bfs", 8] == (2 * 8 + 3) * 3
    code, _, err = run(capsys, "compare", *names, *SIZES, "-K", "4", "8", "--f", "1,1,1,2")
    assert code == 2
    assert err == (
        "python -m schedules: --f, --i, --w and --b, or the file of --costs, give a duration per "
        "stage, which fits one K only; give one number each to compare several\n"
    )


def test_a_whole_backward_of_its_own_price(capsys):
    """A stage of half the size costs half; and costs are read back as they were."""
    options = [*SIZES, "--i", "1.2", "--b", "2", "--json"]
    found = json.loads(run(capsys, "table", "gpipe", *options)[1])
    assert found["makespan"] == (8 + 3) * 3
    assert found["against_ideal"] == 8 / 11
    assert Costs(**found["costs"]) == Costs(i=1.2, b=2.0)
    per_stage = [*SIZES, "--b", "2,2,2,3", "--json"]
    found = json.loads(run(capsys, "table", "gpipe", *per_stage)[1])
    assert Costs(**found["costs"]) == Costs(b=(2, 2, 2, 3))
    found = json.loads(run(capsys, "compare", "looped_bfs", *options, "-K", "8")[1])["compared"]
    assert found[0]["makespan"] == (2 * 8 + 3) * 1.5
    assert "ideal" not in run(capsys, "table", "gpipe", *options[:-1])[1]
    split = run(capsys, "table", "zb_h1", "-S", "1", "-M", "8", *options[len(SIZES) : -1])[1]
    assert split.endswith("93.8% of the ideal, where every backward takes what is less\n")


def test_costs_from_a_file(capsys, tmp_path):
    """Costs of one report are taken by the next command."""
    stated = ["--f", "1,2,3,4", "--i", "2", "--w", "1", "--b", "2.5", "--comm", "0.5"]
    _, out, _ = run(capsys, "table", "zb_h1", *SIZES, *stated, "--json")
    path = tmp_path / "costs.json"
    path.write_text(out, encoding="utf-8")
    for command in (["table", "zb_h1"], ["compare", "zb_h1", "gpipe"], ["auto", "--budget", "9"]):
        found = run(capsys, *command, *SIZES, "--costs", str(path))
        assert found == run(capsys, *command, *SIZES, *stated)
        assert found[0] == 0


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "cannot be read as costs: No such file or directory; give a JSON file as"),
        ("{", [], "cannot be read as costs: "),
        ("[]", [], "holds no JSON object; give a JSON file as Calibration.to_json writes it"),
        ('{"costs": {"f": 1, "i": 1}}', [], 'has no "costs" with f, i and w, and of f, i, w, b,'),
        ('{"costs": {"f": 1, "i": 1, "w": 1, "x": 1}}', [], 'has no "costs" with f, i and w'),
        ('{"costs": {"f": -1, "i": 1, "w": 1}}', [], "Costs(f=-1): a duration is a finite number"),
        ('{"costs": {"f": 1, "i": 1, "w": 1}}', ["--w", "1"], "says them all; leave out --w"),
    ],
)
def test_a_file_that_holds_no_costs(capsys, tmp_path, text, options, message):
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, out, err = run(capsys, "table", "1f1b", *SIZES, "--costs", str(path), *options)
    assert (code, out) == (2, "")
    assert message in err
    assert str(path) in err


def test_halves_are_merged(capsys, tmp_path):
    found = json.loads(run(capsys, "compare", *SIZES, "--b", "1.6", "--merge", "--json")[1])
    spans = {record["schedule"]: record["makespan"] for record in found["compared"]}
    assert {"1f1b", "zb_h1, merged", "zb_h2, merged"} <= set(spans)
    plain = simulate(build("zb_h2", num_ranks=4, num_microbatches=8), Costs(b=1.6)).makespan
    assert spans["zb_h2, merged"] < plain
    csv = str(tmp_path / "merged.csv")
    assert run(capsys, "convert", "zb_h2", csv, *SIZES, "--b", "1.6", "--merge")[0] == 0
    assert simulate(Schedule.from_csv(csv), Costs(b=1.6)).makespan == spans["zb_h2, merged"]
    code, _, err = run(capsys, "table", "1f1b", *SIZES, "--merge")
    assert code == 2
    assert err.startswith("python -m schedules: merge=True with schedule='1f1b': it has no halves")


def test_an_option_may_be_given_by_its_old_name(capsys):
    sizes = "-S", "2", "-M", "6", "--json"
    code, out, err = run(capsys, "table", "zb_auto", *sizes, "--memory-limit", "2")
    assert (code, err) == (
        0,
        "python -m schedules table: --memory-limit is now --max-activations\n",
    )
    assert out == run(capsys, "table", "zb_auto", *sizes, "--max-activations", "2")[1]


def test_compare_within_a_limit_of_activations(capsys):
    code, out, _ = run(capsys, "compare", *SIZES, "--max-activations", "4", "--json")
    found = json.loads(out)
    assert code == 0
    assert {"1f1b", "zb_h1", "zb_auto"} <= {record["schedule"] for record in found["compared"]}
    assert "gpipe" in found["absent"]
    assert run(capsys, "compare", "gpipe", *SIZES, "--max-activations", "4")[0] == 1


def test_auto_names_the_winner_and_why_others_lost(capsys, tmp_path):
    csv, page = str(tmp_path / "best.csv"), str(tmp_path / "best.html")
    options = ["-S", "2", "-M", "6", "--i", "1.3", "--max-activations", "3", "--budget", "50"]
    code, out, _ = run(capsys, "auto", *options, "-o", csv, "-o", page, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["candidates"][0]["lost"] == ""
    assert all(candidate["lost"] for candidate in found["candidates"][1:])
    best = Schedule.from_csv(csv)
    assert found["winner"]["orders"] == [list(map(str, order)) for order in best.orders]
    assert max(simulate(best).peak_activations) <= 3
    assert "the winner" in run(capsys, "auto", *options)[1]
    slots = ["--clock", "lockstep", "--partners", "--delayed", "--budget", "0", "--json"]
    report = json.loads(run(capsys, "auto", *options, *slots)[1])["report"]
    assert (report["clock"], report["partners"], report["delayed"]) == ("lockstep", True, True)
    assert Path(page).stat().st_size > 500
    code, out, err = run(capsys, "auto", "-S", "2", "-M", "6", "--max-activations", "0.5")
    assert (code, out) == (1, "")
    assert "use --max-activations 1 or more" in err


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("interleaved_1f1b", "1f1b with the warm-up of eager_1f1b"),
        ("interleaved_zb", "zb_h1"),
        ("looped_bfs", "gpipe"),
    ],
)
def test_a_family_of_chunks_with_one_stage_per_rank_is_called_by_its_other_name(capsys, name, twin):
    assert run(capsys, "compare", "1f1b", name, *SIZES)[2] == (
        f"python -m schedules: {name} with K = S = 4 is {twin}: a rank holds one stage; give -K 8 "
        f"or another multiple of S\n"
    )
    assert run(capsys, "table", name, *SIZES, "-K", "8")[2] == ""
    one, other = (
        build(family, num_ranks=4, num_microbatches=8) for family in (name, twin.split()[-1])
    )
    assert one.orders == other.orders


def test_rounds_of_a_group(capsys, tmp_path):
    path = str(tmp_path / "rounds.csv")
    sizes = ["-S", "4", "-K", "8", "-M", "6", "--group"]
    assert main(["convert", "interleaved_zb", path, *sizes, "3"]) == 0
    wanted = build("interleaved_zb", num_ranks=4, num_microbatches=6, num_stages=8, group=3)
    assert Schedule.from_csv(path).orders == wanted.orders
    assert main(["table", "interleaved_1f1b", *sizes, "1"]) == 2
    message = "--group 1 with -S 4: a round of interleaved_1f1b has an integer from S / 2 to S"
    assert message in capsys.readouterr().err


def test_convert_there_and_back(capsys, tmp_path):
    first, second, third = (str(tmp_path / name) for name in ("a.csv", "b.json", "c.csv"))
    assert run(capsys, "convert", "dualpipe_v", first, *SIZES, "-K", "8") == (0, "", "")
    assert run(capsys, "convert", first, second) == (0, "", "")
    assert run(capsys, "convert", second, third) == (0, "", "")
    built = build("dualpipe_v", num_ranks=4, num_microbatches=8, num_stages=8)
    assert built.pairs
    assert Schedule.from_csv(first) == read_json(second) == Schedule.from_csv(third) == built


def test_check_passes_and_fails(capsys, tmp_path):
    good, bad, broken = (tmp_path / name for name in ("good.csv", "bad.csv", "broken.json"))
    build("1f1b", num_ranks=2, num_microbatches=2).to_csv(good)
    bad.write_text("0F0,0B0,0B0\n")
    broken.write_text("{")
    assert run(capsys, "check", str(good)) == (0, f"{good}: legal\n", "")
    code, out, _ = run(capsys, "check", str(good), str(bad), str(broken), "--json")
    verdicts = json.loads(out)
    assert code == 1
    assert [verdict["legal"] for verdict in verdicts] == [True, False, False]
    assert "runs again" in verdicts[1]["reason"]
    assert verdicts[2]["reason"].startswith(f"'{broken}': cannot be read as a timetable")
    code, out, _ = run(capsys, "check", str(good), "--max-activations", "1")
    assert code == 1
    assert out.startswith(f"{good}: schedule 'good'")
    missing = str(tmp_path / "missing.csv")
    assert run(capsys, "check", missing)[::2] == (
        2,
        f"python -m schedules: {missing}: give the path of a .csv or .json file that is there\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "1f1b"], "1f1b is a family: give its sizes, for example -S 4 -M 8"),
        (["compare"], "families are compared at given sizes, for example -S 4 -M 8"),
        (
            ["compare", "gpipe", "missing.csv", *SIZES],
            "missing.csv: give the path of a .csv or .json file that is there\n",
        ),
        (
            ["compare", "gpip", *SIZES],
            "schedule='gpip' is not a known family; did you mean 'gpipe' or 'dualpipe_v'? known: ",
        ),
        (
            ["draw", "1f1b", *SIZES, "-o", "x.pdf"],
            "--output x.pdf: a drawing is .html (interactive), .png, .svg, .txt or .json (a trace",
        ),
        (
            ["convert", "1f1b", "x.xls", *SIZES],
            "x.xls: a timetable is written as .csv or .json",
        ),
        (["table", "1f1b", *SIZES, "--f", "x"], "argument --f: invalid durations value: 'x'"),
        (["table", "1f1b", *SIZES, "--f", "-1"], "Costs(f=-1.0): a duration is a finite number"),
        # Messages name the options of the command, not the arguments of Python (issue 52).
        (
            ["table", "zb_v", *SIZES],
            "-K 4 with -S 4: zb_v is defined for 2 stages per rank; use -K 8",
        ),
        (["convert", "1f1b", "x.csv", *SIZES, "-K", "6"], "-K 6 is not a multiple of -S 4"),
        (["table", "interleaved_1f1b", "-S", "4", "-M", "9"], "-M 9 with -S 4: interleaved_1f1b"),
        (["table", "zb_auto", *SIZES, "--max-activations", "0"], "--max-activations 0.0 with -S 4"),
        (["compare", *SIZES, "-K", "0"], "argument -K/--stages: must be 1 or more, not 0"),
        (
            ["auto", *SIZES, "--max-activations", "nan"],
            "argument --max-activations: must be a number,",
        ),
        (["auto", *SIZES, "--budget", "-1"], "budget=-1: must be an integer >= 0"),
        (["auto", *SIZES, "-o", "x.bad"], "--output x.bad: a drawing is .html"),
        (["auto", *SIZES, "-o", "nowhere/x.csv"], "--output nowhere/x.csv: there is no folder"),
        (
            ["convert", "1f1b", "/nowhere/x.json", *SIZES],
            "FILE /nowhere/x.json: there is no folder /nowhere; make it, or give another path",
        ),
        ([], "the following arguments are required: COMMAND"),
        (["auto", "-S", "4"], "the following arguments are required: -M/--microbatches"),
        (
            ["auto", *SIZES, "--pattern", "unit"],
            "auto chooses slots itself, and without pairs; leave out --pattern and --pair",
        ),
        (
            ["auto", *SIZES, "--partners"],
            "partners=True with clock='event': only lockstep ticks have slots that end in",
        ),
    ],
)
def test_what_cannot_run_says_why_and_exits_with_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"python -m schedules: {message}")
    assert "num_" not in err


@pytest.mark.parametrize("command", ["draw", "table", "check", "compare", "auto", "convert"])
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: python -m schedules {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b'{"orders": 3}',
        b'{"orders": [3], "placement": [0]}',
        b'{"orders": [[3]], "placement": [0]}',
        b'{"orders": [["0F0"]], "placement": ["a"]}',
        b'{"orders": [["0F0"]], "placement": [9]}',
        b'{"orders": [["0F0&"]], "placement": [0]}',
        b'{"orders": [["999999999F0"]], "placement": [0]}',
        b"[" * 100_000,
    ],
)
def test_json_of_any_content(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(schedules.ScheduleError) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_as_a_program(tmp_path):
    """In a process of its own: no jax, an exit code, and a reader that stops early."""
    root = Path(schedules.__file__).parents[1]
    command = [sys.executable, "-m", "schedules"]
    done = subprocess.run(
        [*command, "check", str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("python -m schedules: ")
    piped = subprocess.run(
        f"{sys.executable} -m schedules draw gpipe -S 8 -M 400 | head -n 1",
        shell=True,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.stdout.startswith("gpipe")
    assert piped.stderr == ""
