"""The planner: its arithmetic by hand, what it refuses, and what it chooses."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from pipeline import ParallelConfig
from pipeline.cli import main as cli
from pipeline.planner import CHIPS, MODELS, Chip, DoesNotFitError, ModelSizes, plan
from pipeline.planner.candidates import REMAT, divisors, layouts_of
from pipeline.planner.clock import _places, makespan, places
from pipeline.planner.costs import estimate, mfu, stage_costs
from pipeline.planner.layout import MeshLayout, PlannedJob, layers_of_stages
from schedules import Costs, Schedule, build, simulate
from schedules.tools.main import main as schedules_cli
from tests.support.refusals import refusal

SMALL = ModelSizes(layers=8, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256)
# No links to speak of, nothing but products: 1e12 operations a second.
IDEAL = Chip("ideal", 1e12, 10**12, 1e30, 1e30, 3, 1024, 1e30, efficiency=1.0)


GATHERED, SHARED = {"remat": "gathered"}, {"vocabulary": "stage"}


def job(model=SMALL, chip=IDEAL, devices=4, batch=16, seq=32, **changes) -> PlannedJob:
    known = {"slices": 1, "clock": "event", "efficiency": chip.efficiency}
    return PlannedJob(model, chip, devices, batch, seq, **known | changes)


def mesh_of(layout: MeshLayout) -> tuple[int, ...]:
    return layout.sizes(("data", "stage", "tensor"))


def test_parameters_and_operations_of_llama_8b_by_hand():
    model, seq = MODELS["llama-8b"], 8192
    block = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert model.whole_matrices == block == 218_103_808
    tables = 2 * 128256 * 4096
    assert model.parameters == 32 * (block + 2 * 4096) + tables + 4096 == 8_030_261_248
    # Six for every parameter that is multiplied with (the embedding is looked up), and the scores:
    # two products of seq x 4096, the masked half left out, three times.
    multiplied = 32 * block + 128256 * 4096
    scores = 32 * 3 * 2 * (2 * seq * 4096) / 2
    assert model.step_operations(seq) == 6 * multiplied + scores
    assert MODELS["llama-70b"].parameters == 70_553_706_496


def test_bytes_of_a_small_pipeline_by_hand():
    layout = MeshLayout(
        1, 4, 1, schedule="gpipe", microbatches=8, rows=2, remat="stage", vocabulary="ends"
    )
    held = estimate(job(), layout).bytes
    matrices = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    blocks, ends = 2 * (matrices + 2 * 64), 2 * 256 * 64 + 64
    tokens, activation = 2 * 32, 2 * 32 * 64 * 2
    residuals = 2 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 128) * tokens
    assert held == {
        "weights": 4 * (blocks + ends),
        "optimizer": 8 * (blocks + ends),
        "gradients": 4 * (blocks + ends),
        "stashes": 8 * activation,  # GPipe holds all 8 inputs of a stage
        "weights cast": 2 * blocks,
        "messages": 2 * activation,
        "workspace": 2 * residuals + 2 * residuals,  # a block's and its gradients, and the stage's
    }


def kept(
    schedule: str, mesh: tuple[int, int, int], chunks: int, microbatches: int, **changes: Any
) -> MeshLayout:
    """Residuals are kept."""
    words = "stage" if mesh[2] == 1 else "ends"
    layout = MeshLayout(*mesh, schedule=schedule, chunks=chunks, data_parallel="zero1")
    return replace(layout, microbatches=microbatches, **{"vocabulary": words} | changes)


@pytest.mark.parametrize(("ranks", "links"), [(2, 1), (4, 2)])
def test_two_ranks_have_one_link(ranks, links):
    """Seconds of a pass over `tensor` of a block: two neighbours are no ring."""
    chip, sizes = CHIPS["v6e"], {"devices": 2 * ranks, "batch": 8, "seq": 1024}
    layout = MeshLayout(2, 1, ranks, microbatches=4, data_parallel="zero1")
    sent = 4 * (ranks - 1) / ranks * 2 * 1024 * SMALL.width
    passes = 2 * SMALL.layers * sent + 2 * (ranks - 1) / ranks * 2 * 1024 * SMALL.width
    found = estimate(job(chip=chip, **sizes), layout).seconds["tensor"]
    assert found == pytest.approx(4 * passes / (links * chip.link))


@pytest.mark.parametrize(
    ("model", "layout", "seq", "compiled"),
    [
        ("llama-8b", kept("interleaved_1f1b", (8, 2, 1), 8, 8), 4096, 58.62e9),
        ("llama-8b", kept("looped_bfs", (4, 4, 1), 8, 8), 2048, 36.85e9),
        ("llama-8b", kept("interleaved_1f1b", (8, 8, 1), 4, 32), 8192, 42.77e9),
        ("llama-70b", kept("interleaved_1f1b", (32, 4, 4), 10, 32, **GATHERED), 8192, 84.14e9),
        ("llama-70b", kept("interleaved_1f1b", (16, 8, 4), 10, 64), 8192, 85.79e9),
        ("llama-70b", kept("interleaved_1f1b", (16, 8, 4), 10, 64, **SHARED), 8192, 82.68e9),
        ("llama-70b", kept("interleaved_1f1b", (32, 2, 8), 10, 32), 8192, 87.42e9),
        ("llama-8b", kept("eager_1f1b", (8, 8, 1), 1, 32, remat="block", **SHARED), 8192, 17.57e9),
        ("llama-70b", kept("eager_1f1b", (16, 8, 4), 1, 32, remat="block"), 8192, 35.16e9),
        ("llama-8b", kept("dualpipe_v", (8, 2, 1), 2, 8), 4096, 72.89e9),
        ("llama-70b", kept("dualpipe_v", (32, 2, 8), 2, 32, **GATHERED), 8192, 96.76e9),
    ],
)
def test_bytes_of_the_tpu_compiler(model, layout, seq, compiled):
    data, stage, tensor = mesh_of(layout)
    sizes = {"devices": data * stage * tensor, "batch": data * layout.microbatches, "seq": seq}
    found = estimate(job(MODELS[model], CHIPS["v5p"], **sizes, clock="lockstep"), layout)
    assert found.hbm == pytest.approx(compiled, rel=0.05)


def test_windows_hold_two_chunks_and_move_each_once_or_twice():
    """Weights in bfloat16 for each gather, gradients in float32 for each run of backwards."""
    chip, sizes = replace(IDEAL, link=1e9), {"devices": 8, "batch": 16}
    layout = MeshLayout(4, 2, 1, schedule="looped_bfs", chunks=2, microbatches=4, remat="mlp")
    model = replace(SMALL, layers=8)
    V = 4
    layout = replace(layout, chunks=V, data_parallel="windows", vocabulary="stage")
    found = estimate(job(model, chip, **sizes), layout)
    chunk, ends = model.block, model.ends / 2
    parts = (V * chunk + ends) / 4
    assert found.bytes["weights"] == pytest.approx(4 * parts)
    assert found.bytes["gradients"] == pytest.approx(4 * (parts + ends + 2 * chunk))
    assert found.bytes["weights cast"] == pytest.approx(2 * (V * chunk / 4 + ends + 2 * chunk))
    moved = (2 * V - 2) * 2 * chunk + V * 4 * chunk + (4 + 2) * ends
    words = 4 * (4 * 2 * 1 / 2 * 2 * 32 * 64 + 12 * 32)  # of 4 microbatches, over `stage`
    sent = 3 / 4 * moved / chip.ring(2) + words / chip.ring(1, 2)
    assert found.seconds["data"] == pytest.approx(sent)


def test_what_a_tensor_group_gathers_is_kept_whole_or_gathered_again():
    whole = MeshLayout(1, 2, 2, schedule="gpipe", microbatches=4)
    again = replace(whole, remat="gathered")
    found, other = (estimate(job(batch=4), one) for one in (whole, again))
    gathered = 2 * 2 * 64 * 32  # bytes of what enters attention and MLP
    blocks, microbatches = 4, 4
    assert found.bytes["stashes"] - other.bytes["stashes"] == gathered * blocks * microbatches
    slow = replace(IDEAL, link=1e9)
    sent = [estimate(job(batch=4, chip=slow), one).seconds["tensor"] for one in (whole, again)]
    assert sent[1] / sent[0] == pytest.approx(1.25, rel=0.05)


def test_gpipes_formula_where_messages_and_ends_are_free():
    free = Costs(f=1.0, i=1.0, w=1.0)
    layout = MeshLayout(1, 4, 1, schedule="gpipe", microbatches=16, remat="block")
    found = estimate(job(costs=((1, free),)), layout)
    work = found.seconds["compute"] + found.seconds["recompute"]
    assert work == pytest.approx(16 * 2 * 4)  # F, F again and B of two blocks
    assert work / (work + found.seconds["bubble"]) == pytest.approx(16 / (16 + 4 - 1))
    assert found.seconds["tensor"] == 0
    assert found.seconds["data"] < 1e-9


def test_costs_by_microbatch_are_those_of_the_next_smaller():
    """Small microbatches take longer for each sequence, so fewer and larger ones may be quicker."""
    measured = {1: Costs(f=1.0, i=1.0, w=1.0), 4: Costs(f=2.0, i=2.0, w=2.0)}
    one = job(costs=tuple(measured.items()))
    for rows, f in {1: 1.0, 2: 2.0, 4: 2.0, 8: 4.0}.items():
        layout = MeshLayout(1, 4, 1, schedule="gpipe", microbatches=16 // rows, rows=rows)
        assert estimate(one, layout).seconds["compute"] == pytest.approx(16 / rows * 3 * f * 2)


def test_where_all_ranks_meet_1f1b_waits_for_more():
    layout = MeshLayout(1, 4, 1, schedule="1f1b", microbatches=16)
    given = ((1, Costs(f=1.0, i=1.0, w=1.0)),)
    steps = [estimate(job(costs=given, clock=c), layout).step for c in ("lockstep", "barriers")]
    assert steps[1] > 1.2 * steps[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_long_pipelines_are_timed_by_short_ones(name):
    costs = Costs(f=1.0, i=1.2, w=0.9, b=2.0, comm=0.1, head=0.3)
    schedule = build(name, num_ranks=4, num_microbatches=61)
    for clock, slots in {"event": {}, "lockstep": {"partners": True, "delayed": None}}.items():
        whole = simulate(schedule, costs, clock, **slots).makespan
        assert makespan((name, 4, 1, 61), costs, (), clock) == pytest.approx(whole, rel=1e-9)


def test_long_pipelines_of_smaller_rounds_are_timed_by_short_ones():
    costs = Costs(f=1.0, i=1.2, w=0.9, b=2.0, comm=0.1, head=0.3)
    schedule = build("interleaved_zb", num_ranks=4, num_microbatches=63, num_stages=8, group=3)
    whole = simulate(schedule, costs).makespan
    found = makespan(("interleaved_zb, group=3", 4, 2, 63), costs, (), "event")
    assert found == pytest.approx(whole, rel=1e-9)


def test_smaller_rounds_are_planned_where_memory_is_short(tmp_path):
    """The timetable of the plan is a file, for the name alone does not say the rounds."""
    chip = replace(CHIPS["v5p"], hbm=24e9)
    sizes = {"model": "llama-8b", "devices": 16, "chip": chip, "batch": 32, "seq": 8192}
    plans = plan(**sizes, schedules=("interleaved_zb",), remat=(None,))
    assert plans.pipeline.layout.order == ("interleaved_zb, group=2", 4, 8, 32)
    text = plans.write(tmp_path / "plan.toml", plans.pipeline).read_text(encoding="utf-8")
    assert 'schedule = "interleaved_zb-group2-S4-K32-M32.csv"' in text
    command = (
        "python -m schedules convert interleaved_zb interleaved_zb-group2-S4-K32-M32.csv -S 4 "
        "-K 32 -M 32 --group 2"
    )
    assert f"# its timetable is a file, written by: {command}\n" in text
    target = tmp_path / "interleaved_zb-group2-S4-K32-M32.csv"
    assert schedules_cli(["convert", "interleaved_zb", str(target), *command.split()[6:]]) == 0
    wanted = build("interleaved_zb", num_ranks=4, num_microbatches=32, num_stages=32, group=2)
    assert Schedule.from_csv(target).orders == wanted.orders


@pytest.mark.parametrize(
    ("S", "V", "M", "g"), [(16, 8, 256, 12), (16, 4, 128, 12), (24, 4, 128, 12), (20, 4, 128, 10)]
)
def test_places_of_a_long_pipeline_in_rounds_that_differ(S, V, M, g):
    """Too many, or too few: short pipelines had other rounds than the long one."""
    order = f"interleaved_zb, group={g}", S, V, M
    assert tuple(places(order)) == _places(order)


def test_everything_that_is_tried_divides():
    found = list(layouts_of(job(devices=8, slices=2), ("gpipe", "interleaved_1f1b"), (None,), {}))
    assert {mesh_of(one) for one in found} >= {(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 2, 1)}
    for one in found:
        assert one.data * one.stage * one.tensor == 8
        assert one.data * one.microbatches * one.rows == 16
        assert 8 % (one.stage * one.chunks) == 0
        assert one.data_slices * one.stage_slices == 2
        assert one.data % one.data_slices == one.stage % one.stage_slices == 0


def test_a_layout_without_its_bubble_is_a_bound():
    one = job(MODELS["llama-8b"], CHIPS["v5p"], devices=16, slices=2, seq=512, clock="lockstep")
    found = list(layouts_of(one, ("gpipe", "zb_v", "interleaved_1f1b"), REMAT, {}))[::47]
    assert {layout.remat for layout in found} == set(REMAT)
    assert {layout.data_parallel for layout in found} >= {"zero1", "fsdp"}
    for layout in found:
        least, whole = estimate(one, layout, bound=True), estimate(one, layout)
        assert least.step <= whole.step * (1 + 1e-9)
        assert min(whole.seconds.values()) >= -1e-9 * whole.step


def test_layers_that_stages_cannot_share_equally():
    assert layers_of_stages(126, 16) == [7, *[8] * 14, 7]
    assert layers_of_stages(32, 4) == [8] * 4
    model = replace(SMALL, layers=15)
    layout = MeshLayout(1, 4, 1, schedule="gpipe", microbatches=16)
    free = job(model, costs=((1, Costs(f=1.0, i=1.0, w=1.0)),))
    assert stage_costs(free, layout).f == pytest.approx((4, 4, 4, 3))
    found = estimate(free, layout)
    assert found.seconds["compute"] == pytest.approx(16 * 15 * 3 / 4)
    # Ranks of four layers set the pace: 16 F of 4 behind two others, one of 3; the same backwards.
    assert found.step == pytest.approx((8 + 16 * 4 + 3) * 3, rel=1e-6)
    assert {one.stage for one in layouts_of(free, ("1f1b",), (None,), {})} == {1, 2, 4}


def test_messages_take_the_link_they_cross():
    chip = replace(CHIPS["v5p"], network=1e9)
    layout = MeshLayout(1, 4, 1, stage_slices=2, schedule="1f1b", microbatches=16)
    comm = stage_costs(job(chip=chip, slices=2), layout).comm
    size = 32 * 64 * 2
    assert comm[0][1] == comm[2][3] == size / 100e9
    assert comm[1][2] == comm[3][0] == size / 1e9


@pytest.mark.slow
def test_one_slice_where_fsdp_fits_needs_no_pipeline():
    found = plan(model="llama-8b", devices=64, chip="v5p", batch=128, seq=8192, schedules=("1f1b",))
    assert found.verdict.startswith("do not pipeline: FSDP on data 64 takes ")
    assert found.best is found.alone
    assert found.best.hbm < found.job.chip.hbm
    assert mfu(found.job, found.best.step) < found.job.efficiency
    *_, header, first, _, _, _, fifth, more = str(found).splitlines()
    assert header == "Not chosen:"
    assert [first, fifth] == [f"  {found.lost[0]}", f"  {found.lost[4]}"]
    assert more == f"  and {len(found.lost) - 5} more, in the attribute `lost`"
    assert any("data 1 x stage 32 x tensor 2: " in line for line in found.lost)
    assert "stage 64: cannot share 32 layers with less than 10% idle" in found.lost


def test_slow_links_between_slices_are_crossed_by_a_pipeline(tmp_path):
    found = plan(
        model="llama-8b",
        devices=16,
        chip="v5p",
        batch=32,
        seq=2048,
        slices=4,
        schedules=("interleaved_1f1b",),
        clock="event",
    )
    assert found.verdict.startswith("pipeline, interleaved_1f1b on stage 4 x tensor 4: 1.")
    assert found.best.layout.stage_slices == 4
    path = found.write(tmp_path / "plan.toml")
    with path.open("rb") as file:
        tables = tomllib.load(file)
    config = ParallelConfig.from_dict(tables["parallel"])
    assert (config.data, config.stage, config.tensor) == mesh_of(found.best.layout)
    assert config.num_microbatches == found.best.layout.microbatches
    assert tables["pipeline"]["schedule"] == "interleaved_1f1b"


def test_a_pipeline_has_to_be_quicker_by_more_than_predictions_are_off():
    sizes = {"devices": 512, "chip": "v5p", "batch": 1024, "seq": 8192}
    found = plan(model="llama-70b", schedules=("interleaved_1f1b",), **sizes)
    assert found.alone.step > found.pipeline.step > 0.9 * found.alone.step
    assert found.best is found.alone
    assert found.verdict.startswith("no clear winner: FSDP on ")
    assert found.verdict.endswith(" s, and such predictions are off by 10%; the first is simpler")


@pytest.mark.slow
def test_what_attention_gave_can_be_kept_on_tpus_alone():
    sizes = {"devices": 8, "batch": 64, "seq": 2048}
    kept = {"remat": ("block_but_attention",), "schedules": ("1f1b",)}
    found = plan(model="llama-8b", chip="v5p", **sizes, **kept)
    assert "block_but_attention" in str(found)
    with pytest.raises(
        ValueError, match="nothing that attention of h100 gives can be kept by name"
    ):
        plan(model="llama-8b", chip="h100", **sizes, **kept)


def test_what_cannot_fit_names_what_does():
    tiny = replace(CHIPS["v5e"], hbm=3_000_000)
    given = {"model": SMALL, "chip": tiny, "batch": 16, "seq": 256}
    with pytest.raises(DoesNotFitError) as error:
        plan(**given, devices=2, schedules=("1f1b",))
    assert "no layout fits 2 x v5e: the least takes " in str(error.value)
    assert "; a chip has 0.0 GB for it. What fits: on more devices, devices=" in str(error.value)
    assert str(error.value).endswith("A smaller batch frees nothing")
    nearest = error.value.nearest
    assert nearest is not None
    assert nearest.job.devices > 2
    assert nearest.best.hbm <= 0.95 * tiny.hbm < error.value.least.hbm


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chip": "v5q"}, "chip='v5q' is not in the table; did you mean 'v5p'? known: v4, v5e, "),
        ({"model": "llama-7b"}, "model='llama-7b' is neither a known model nor a file; did you "),
        ({"devices": 0}, "devices=0: must be an integer >= 1"),
        ({"slices": 3}, "devices=8 cannot be shared equally by slices=3; give a multiple"),
        ({"chip": "h100", "devices": 16, "slices": 1}, "h100 joins at most 8; give slices=2 or"),
        ({"schedules": ("1f2b",)}, "schedules=('1f2b',): must be a sequence out of 'gpipe', "),
        (
            {"remat": "block"},
            "remat='block': must be a sequence out of None, 'gathered', 'block', 'block_but",
        ),
        ({"remat": 5}, "remat=5: must be a sequence out of None, 'gathered', 'block', "),
        ({"clock": "wall"}, "clock='wall': must be one of 'lockstep', 'barriers', 'event'"),
        ({"efficiency": 40}, "efficiency=40: must be a share of peak, above 0 and up to 1"),
        ({"efficiency": "0.4"}, "efficiency='0.4': must be a share of peak, above 0 and up to 1"),
        ({"efficiency": True}, "efficiency=True: must be a share of peak, above 0 and up to 1"),
        ({"costs": 0}, "costs=0: must be schedules.Costs of one block and one sequence, or"),
        ({"costs": Costs(f=[1.0, 2.0])}, "costs has a number for each stage in f: a plan splits"),
        (
            {"costs": {0: Costs()}},
            "must be schedules.Costs of one block and one sequence, or",
        ),
        (
            {"costs": [Costs()]},
            "must be schedules.Costs of one block and one sequence, or",
        ),
        ({"batch": 3, "devices": 128}, "this model have no layout: data 8, 16, 32, 64, 128: must "),
    ],
)
def test_refusals(changes, said):
    given = {"model": SMALL, "devices": 8, "chip": "v5p", "batch": 16, "seq": 32}
    assert said in refusal(plan, **given | changes)


def test_divisors_of_huge_sizes():
    """A batch of 10^12 sequences is no reason to count to 10^12."""
    assert divisors(10**12)[-2:] == [5 * 10**11, 10**12]
    assert len(divisors(10**12)) == 13**2
    assert [divisors(n) for n in (1, 2, 9, 12)] == [[1], [1, 2], [1, 3, 9], [1, 2, 3, 4, 6, 12]]


def test_models_from_configurations(tmp_path):
    path = tmp_path / "config.json"
    content = {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    given = {"devices": 1, "chip": "v5p", "batch": 4, "seq": 32}
    assert plan(model=path, **given).job.model == SMALL
    path.write_text(json.dumps(content | {"vocab_size": None}), encoding="utf-8")
    assert refusal(plan, model=path, **given) == (
        f"model={str(path)!r} lacks vocab_size: a Hugging Face config.json has them"
    )
    assert (
        refusal(ModelSizes, 8, 64, 4, 3, 128, 256)
        == "ModelSizes: heads=4 is no multiple of kv_heads=3"
    )


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "config.json"
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    path.write_text(json.dumps(dict(zip(keys, (64, 4, 4, 128), strict=True)) | {"vocab_size": 256}))
    out = tmp_path / "plan.toml"
    sizes = ["--devices", "2", "--batch", "8", "--seq", "32"]
    arguments = ["plan", "--model", str(path), *sizes]
    assert cli.main([*arguments, "--chip", "v5p", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("2 x v5p, batch 8 x 32, ")
    assert tomllib.loads(out.read_text())["parallel"]["world_size"] == 2
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--chip", "v9"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("python -m pipeline plan: chip='v9' is not in the ")
    wide = {"num_hidden_layers": 1, "hidden_size": 2**16, "intermediate_size": 2**18}
    path.write_text(json.dumps(json.loads(path.read_text()) | wide))
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--chip", "v5e"])
    assert ended.value.code == 1
    assert "no layout fits 2 x v5e: " in capsys.readouterr().err


@pytest.mark.parametrize("where", ["its link", "another folder", "a folder"])
def test_a_plan_that_cannot_be_written_is_refused_before_the_search(where, tmp_path, capsys):
    """Issue 67: the plan was written over the model's config.json."""
    model = tmp_path / "config.json"
    model.write_text("{}")  # so that a search would fail with other words
    (tmp_path / "link.toml").symlink_to(model)
    out = {
        "its link": tmp_path / "link.toml",
        "another folder": tmp_path / "no" / "plan.toml",
        "a folder": tmp_path,
    }[where]
    why = {
        "its link": " is a file that the command reads, and it would be lost; give another path",
        "another folder": f": there is no folder {out.parent}; make it, or give another path",
        "a folder": " is a folder; give the path of a file",
    }[where]
    sizes = ["--devices", "2", "--batch", "8", "--seq", "32", "--chip", "v5p"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", str(model), *sizes, "--out", str(out)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"python -m pipeline plan: --out {out}{why}\n"
    assert model.read_text() == "{}"


@pytest.mark.slow
def test_a_reader_that_stops_early(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as nobody, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", nobody)
        sizes = ["--devices", "8", "--chip", "v5p", "--batch", "64", "--seq", "2048"]
        assert cli.main(["plan", "--model", "llama-8b", *sizes]) == 0
