"""`pipeline.plan(offload="auto")`: host memory against computing again (issue 42).

Letters: P the most stashes that a rank holds at once.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import ParallelConfig, Pipeline, make_optimizer, plan
from pipeline.insight.forecast.step_memory import predict_step
from pipeline.planner import CHIPS, ModelSizes
from pipeline.planner.clock import places
from pipeline.planner.costs import estimate
from pipeline.planner.layout import MeshLayout, Parameters, parameters_of
from pipeline.planner.memory import (
    COPIES,
    bytes_of,
    host_bytes,
    moment_bytes,
    stash_bytes,
    usable,
)
from pipeline.planner.plans import Plans, compared, why
from pipeline.training.config import PipelineOptions
from pipeline.training.config.reading import read_table
from schedules import Costs, build, simulate
from tests.support.refusals import refusal

JOB: dict[str, Any] = {"model": "llama-8b", "devices": 16, "batch": 16, "seq": 8192}
FEW: dict[str, Any] = {"schedules": ("1f1b",), "remat": (None, "block"), "offload": "auto"}
V5E = CHIPS["v5e"]


@functools.cache
def planned(host: float = 60e9, overlap: float = 1.0) -> Plans:
    return plan(**JOB, **FEW, chip=replace(V5E, host=host, host_overlap=overlap))


@pytest.mark.few
@pytest.mark.parametrize(("host", "overlap", "wins"), [(60e9, 1.0, True), (5e8, 0.0, False)])
def test_offload_wins_where_copies_hide(host, overlap, wins):
    """A fast link beside products beats computing again; a slow one that waits does not."""
    plans = planned(host, overlap)
    assert plans.pipeline is not None
    layout = plans.pipeline.layout
    assert layout.uses_host is wins
    assert layout.remat == (None if wins else "block")
    assert plans.offload.startswith("offload: " if wins else "do not offload: ")
    assert str(plans).splitlines()[2] == plans.offload


# Milliseconds of F and B of four stages by the TPU compiler (bench/notes/offload.md): chip, width,
# bytes a second of the link, both, and the compiled steps with stashes on the host and computed
# again. In the last row copies of sums of gradients are left out.
PAIRS = [
    ("v5e", 8192, 16e9, (14.53, (26.00, 31.55, 31.55, 26.37)), (570.6, 534.4)),
    ("v5e", 1024, 16e9, (0.215, (0.287, 0.377, 0.377, 0.432)), (28.5, 6.8)),
    ("v5p", 16384, 16e9, (21.33, (40.84, 48.80, 48.80, 48.97)), (959.8, 849.4)),
    ("v5p", 16384, 32e9, (21.33, (40.84, 48.80, 48.80, 48.97)), (824.7, 849.4)),
    ("v5p", 1024, 16e9, (0.105, (0.141, 0.189, 0.187, 0.199)), (27.2, 3.3)),
    ("v6e", 16384, 32e9, (14.51, (30.24, 36.58, 36.58, 31.47)), (626.0, 613.7)),
]


@pytest.mark.parametrize(("chip", "width", "link", "actions", "compiled"), PAIRS)
def test_the_rule_agrees_with_every_compiled_pair(chip, width, link, actions, compiled):
    """Within 7% of the compiled step, and the same choice."""
    (f, b), (hosted, again) = actions, compiled
    copy = 1e3 * 2 * 2048 * 5 * width / link
    costs = Costs(f=f, b=b, host=copy, host_overlap=CHIPS[chip].host_overlap)
    schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    report = simulate(schedule, costs, offload="stash", keep="residuals")
    step = report.makespan
    assert step == pytest.approx(hosted, rel=0.07)
    assert (step < again) is (hosted < again)


def test_links_of_hosts():
    """Gigabytes a second, one way: PCIe as published, twice as much on v6e as on other TPUs."""
    found = {name: chip.host / 1e9 for name, chip in CHIPS.items()}
    tpus = dict.fromkeys(("v4", "v5e", "v5p", "tpu7x"), 16)
    assert found == tpus | {"v6e": 32, "h100": 64, "a100": 32}


def test_the_sentence_names_both_and_their_prices():
    plans = planned()
    assert plans.pipeline is not None
    share, seconds = plans.pipeline.layout.offload, plans.pipeline.seconds
    assert share is not None
    assert plans.pipeline.layout.host_optimizer
    assert (
        f"with remat none and {share:.0%} of stashes and the optimizer's state on the host takes "
        f"{plans.pipeline.step:.4g} s, {seconds['host']:.2g} s of it copies that no work hides, "
        f"{seconds['update']:.2g} s of it the update; the best pipeline without, "
    ) in plans.offload
    assert "with remat block, " in plans.offload


def test_what_rounding_leaves_of_a_price_is_nothing():
    """Regression test of issue 42: "computing again takes -5.69e-16 s"."""
    best = planned().pipeline
    assert best is not None
    near = replace(best, seconds=best.seconds | {"host": -5.7e-16, "recompute": 4e-16})
    assert compared(near, near).count(", 0 s of it copies") == 1
    assert compared(near, near).count(", 0 s of it computing again") == 1


def test_the_share_is_the_smallest_that_fits():
    plans = planned()
    assert plans.pipeline is not None
    layout, room = plans.pipeline.layout, usable(plans.job)
    assert layout.schedule is not None
    assert layout.offload is not None
    most, _ = places(layout.order)
    moved = math.floor(layout.offload * most + 1e-9)
    stash = stash_bytes(plans.job, layout)
    held = bytes_of(plans.job, layout)
    assert sum(held.values()) <= room < sum(held.values()) + stash
    whole = bytes_of(plans.job, replace(layout, offload=None))
    assert held["stashes"] == pytest.approx(whole["stashes"] - (moved - COPIES) * stash)
    layout = replace(layout, host_optimizer=False)
    assert host_bytes(plans.job, layout) == pytest.approx(moved * stash)
    assert host_bytes(plans.job, replace(layout, offload=None)) == 0


def test_the_state_comes_to_the_chip_for_the_update():
    """Moments take the memory that stashes and workspace have left; both ways count as time."""
    plans = planned()
    assert plans.pipeline is not None
    job, layout = plans.job, plans.pipeline.layout
    here = replace(layout, host_optimizer=False)
    moved, whole = bytes_of(job, layout), bytes_of(job, here)
    moments = whole["optimizer"]
    shards = 1 if layout.data_parallel == "replicated" else layout.data
    assert moments == 2 * 4 * sum(parameters_of(job.model, layout)) / shards
    passing = sum(whole.values()) - whole["weights"] - whole["gradients"] - moments
    assert moved["optimizer"] == max(0.0, moments - passing)
    assert host_bytes(job, layout) == pytest.approx(host_bytes(job, here) + moments)
    both = [estimate(job, one, bound=True).seconds["update"] for one in (layout, here)]
    assert both[0] - both[1] == pytest.approx(2 * moments / job.chip.host)


@pytest.mark.parametrize("way", ["replicated", "zero1"])
def test_describe_and_the_planner_agree_on_the_state(way):
    """Bytes on the host, and on the device while microbatches run, of a small traced step."""
    pipe = Pipeline(
        [nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(k)) for k in range(2)],
        4,
        mesh=make_mesh(stage=2, data=2),
        data_parallel=way,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
    )
    optimizer = make_optimizer(pipe, optax.adam(1e-3), offload=True)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    found = predict_step(pipe, optimizer, *pipe._operands(x, x, None))
    layout = MeshLayout(2, 2, 1, data_parallel=way, host_optimizer=True, schedule="1f1b")
    moments = moment_bytes(layout, Parameters(64 * 64, 0, 0))
    assert found.host_optimizer == moments
    assert f"in host memory {moments:,.0f}" in pipe.describe(x, x, optimizer=optimizer)
    assert found.optimizer < 100  # counts


def test_a_plan_that_no_host_can_hold_is_refused():
    """A tenth of a chip's part of host memory stays free; the best layout would take more."""
    plans = planned()
    assert plans.pipeline is not None
    held = host_bytes(plans.job, plans.pipeline.layout)
    chip = replace(V5E, host=60e9, host_memory=held)
    less = plan(**JOB, **FEW, chip=chip)
    assert less.pipeline is not None
    assert host_bytes(less.job, less.pipeline.layout) <= 0.9 * held
    assert less.pipeline.step > plans.pipeline.step
    chip = replace(chip, host_memory=1.0)
    none = plan(**JOB, **FEW, chip=chip)
    assert none.offload.startswith("do not offload: no pipeline that is short of memory fits ")
    one = replace(plans.pipeline, layout=plans.pipeline.layout)
    job = replace(plans.job, chip=chip)
    assert why(job, one, one) == f"does not fit: {held / 1e9:.0f} of 0 GB of host memory a chip"


def test_hosts_of_chips_have_memory():
    """Gigabytes of host memory a chip."""
    found = {name: chip.host_memory / 1e9 for name, chip in CHIPS.items()}
    assert found == {
        "v4": 101.75,
        "v5e": 48,
        "v5p": 112,
        "v6e": 128,
        "tpu7x": 240,
        "h100": 250,
        "a100": 250,
    }


def test_a_plan_is_written_with_its_share(tmp_path):
    plans = planned()
    assert plans.pipeline is not None
    text = plans.write(tmp_path / "plan.toml", plans.pipeline).read_text(encoding="utf-8")
    assert tomllib.loads(text)["pipeline"]["offload"] == plans.pipeline.layout.offload
    assert "# make_optimizer(offload=True): its state is in host memory\n" in text
    held = host_bytes(plans.job, plans.pipeline.layout) / 1e9
    line = f"Host memory of the best, GB a chip of 48: {held:.2f}"
    assert (line in str(plans)) is plans.best.layout.uses_host


@functools.cache
def small() -> Plans:
    """A plan that fits four chips only with its stashes in host memory."""
    model = ModelSizes(layers=8, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256)
    chip = replace(V5E, hbm=16_000_000, host_overlap=0.0)
    sizes = {"model": model, "devices": 4, "batch": 16, "seq": 2048}
    return plan(**sizes, chip=chip, schedules=("1f1b",), remat=(None,), offload="auto")


def layers(plans: Plans) -> list[nnx.Module]:
    at = plans.best.layout
    return [nnx.Linear(64, 64, rngs=nnx.Rngs(k)) for k in range(at.stage * at.chunks)]


def test_a_pipeline_from_the_file_offloads_as_planned(tmp_path):
    plans = small()
    assert plans.best.layout.offload
    tables = tomllib.loads(plans.write(tmp_path / "plan.toml").read_text(encoding="utf-8"))
    config = ParallelConfig.from_dict(tables["parallel"])
    own = read_table(PipelineOptions, tables["pipeline"], "pipeline", [])
    devices = jax.devices()[:4]
    given = config.pipeline_options(devices) | own.options()
    made = plans.pipeline_options(devices)
    assert made == {name: given[name] for name in made}
    for options in (made, given):
        assert Pipeline(layers(plans), **options).plan.offload == plans.best.layout.offload


@functools.cache
def sharded() -> Plans:
    """70B on 64 v6e by FSDP, of which blocks keep all but their MLP."""
    sizes = {"model": "llama-70b", "devices": 64, "batch": 64, "seq": 8192}
    options = {"schedules": ("gpipe",), "remat": ("mlp",), "offload": "auto"}
    return plan(**sizes, **options, chip="v6e")


@pytest.mark.slow
def test_without_a_pipeline_activations_are_offloaded_too(tmp_path):
    """Inputs, queries, keys, values and attention's results, as MaxText's recipes offload them."""
    plans = sharded()
    assert plans.alone is not None
    job, layout = plans.job, plans.alone.layout
    assert (layout.schedule, layout.remat, layout.offload) == (None, "mlp", 1)
    tokens, heads = layout.rows * 8192 / layout.tensor, 64
    numbers = 8192 + 2 * 8192 + 2 * 1024  # input; queries and attention's result; keys and values
    each = (2 * numbers + 4 * heads) * tokens
    assert host_bytes(job, layout) == pytest.approx(80 * each)
    here, there = (bytes_of(job, replace(layout, offload=one)) for one in (None, 1.0))
    assert here.pop("stashes") == pytest.approx(80 * each)
    assert there.pop("stashes") == pytest.approx(COPIES * each)
    assert here == there
    assert "100% on host" in str(plans)
    text = plans.write(tmp_path / "plan.toml", plans.alone).read_text(encoding="utf-8")
    assert ", whose policy offloads its input, queries, keys, values and attention's result" in text


def test_their_copies_travel_beside_blocks():
    """A write beside 0.7 of F, and the read of the next block beside a third of B."""
    plans = sharded()
    assert plans.alone is not None
    layout = plans.alone.layout
    chips = [replace(plans.job.chip, host=host) for host in (1e15, 1e6)]
    quick, slow = (estimate(replace(plans.job, chip=chip), layout) for chip in chips)
    assert quick.seconds["host"] == 0
    seconds = slow.seconds
    copies = layout.microbatches * host_bytes(plans.job, layout) / 1e6
    hidden = 2 * copies - seconds["host"]
    assert 0 < hidden < 0.7 * (seconds["compute"] + seconds["recompute"] + seconds["tensor"])


def test_gpus_keep_nothing_of_attention_by_name():
    assert refusal(plan, **JOB, chip="h100", remat=("mlp",)) == (
        "remat has 'mlp' alone, and nothing that attention of h100 gives can be kept by name: give "
        "'block', None or 'stage' too"
    )


def test_nothing_is_tried_without_the_option():
    options = {**FEW, "offload": None, "remat": ("block",)}
    plans = plan(**JOB, **options, chip=V5E)
    assert plans.offload == ""
    assert not any(one.layout.uses_host for one in plans.ranked)


@pytest.mark.parametrize("offload", ["stash", 0.5, True])
def test_bad_input(offload):
    assert refusal(plan, **JOB, chip="v5e", offload=offload) == (
        f"offload={offload!r}: must be 'auto' (stashes in host memory are tried where memory is "
        f"short) or None"
    )
