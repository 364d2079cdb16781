"""`pipeline.plan(context=)`: sequences over ranks (issue 41).

Letters: R ranks on `context`, T positions, h heads of queries, k of keys, c width of one.
"""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import ParallelConfig, Pipeline, plan
from pipeline.cli.main import main as cli
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.insight.forecast import traffic
from pipeline.layers import Context
from pipeline.planner import CHIPS, MODELS, ModelSizes
from pipeline.planner.candidates import layouts_of, shares_heads
from pipeline.planner.costs import ATTENTION_EFFICIENCY, context_bytes, estimate
from pipeline.planner.layout import MeshLayout, PlannedJob
from pipeline.planner.memory import LOGIT_PARTS, bytes_of, usable
from pipeline.training.config import PipelineOptions
from schedules import Costs
from tests.support.refusals import refusal

SMALL = ModelSizes(layers=4, width=32, heads=4, kv_heads=2, hidden=64, vocabulary=64, head_width=8)
T, M = 64, 4
SIZES = {"model": SMALL, "devices": 8, "chip": "v5p", "batch": 8, "seq": 4096}


def job(model: ModelSizes = SMALL, devices: int = 4, batch: int = M, seq: int = T) -> PlannedJob:
    chip = CHIPS["v5p"]
    return PlannedJob(model, chip, devices, batch, seq, 1, "lockstep", chip.efficiency)


def layout_of(ranks: int = 1, remat: str | None = "stage") -> MeshLayout:
    return MeshLayout(1, 2, 1, schedule="1f1b", microbatches=M, remat=remat, context=ranks)


def described(layout: MeshLayout):
    """The traffic that a pipeline of the small decoder has by its traced step."""
    R = layout.context
    config = DecoderConfig(
        vocabulary=64, width=32, layers=4, heads=4, kv_heads=2, head_dim=8, hidden=64
    )
    context = Context() if R == 1 else Context("context", "ulysses")
    types = {"dtype": jnp.float32, "activations": jnp.bfloat16, "context": context}
    stages, embed, head = build(config, [2, 2], nnx.Rngs(0), **types)
    axes = {"context": R} if R > 1 else {}
    pipe = Pipeline(
        stages,
        M,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(stage=2, devices=jax.devices()[: 2 * R], **axes),
        schedule=layout.schedule,
        remat=layout.remat,
        batch=P("data", *axes),
    )
    words = jax.ShapeDtypeStruct((M, T), jnp.int32)
    operands = pipe._operands(words, words, None)
    return traffic.predict_traffic(pipe.plan, *operands)


@pytest.mark.few
@pytest.mark.parametrize("remat", ["stage", None])
def test_bytes_are_those_that_describe_has(remat):
    """Bytes over `context`."""
    layout = layout_of(2, remat)
    sent = described(layout)
    once = context_bytes(job(), layout)
    # A rank that computes a stage again runs every forward twice; the last stage's F does nothing.
    wanted = [M * 2 * once * runs for runs in ((3, 2) if remat == "stage" else (2, 2))]
    found = [
        n for (axes, kind), n in sent.sent.items() if axes == ("context",) and "all-to" in kind
    ]
    assert sum(found, start=jnp.zeros(2)).tolist() == pytest.approx(wanted)


@pytest.mark.slow
def test_logits_are_in_as_many_parts_as_the_head_forms():
    """The planner's eight parts, by what compiled steps hold with all logits and in chunks."""
    words, length = 8192, 256
    model = replace(SMALL, vocabulary=words)
    held = {}
    for chunks in (None, LOGIT_PARTS):
        config = DecoderConfig(
            vocabulary=words, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, hidden=16
        )
        stages, embed, head = build(config, [1, 1], nnx.Rngs(0), loss_chunks=chunks)
        pipe = Pipeline(
            stages,
            M,
            embed=embed,
            head=head,
            loss_fn=next_token_loss,
            mesh=make_mesh(stage=2, devices=jax.devices()[:2]),
            schedule="1f1b",
        )
        tokens = jnp.zeros((M, length), jnp.int32)
        lines = str(pipe.describe(tokens, tokens, compiled=True)).splitlines()
        (line,) = [line for line in lines if line.strip().startswith("temporaries")]
        held[chunks] = int(line.split("compiled ")[1].replace(",", ""))
    planned = bytes_of(replace(job(model), seq=length), layout_of())["workspace"]
    spared = (LOGIT_PARTS - 1) * planned
    assert held[None] - held[LOGIT_PARTS] == pytest.approx(spared, rel=0.15)


def test_a_step_of_context_by_hand():
    """Ulysses runs the kernel on a rank's heads, and sends what `context_bytes` says."""
    model, chip, seq = MODELS["llama-8b"], CHIPS["v5p"], 131072
    layout = MeshLayout(2, 4, 1, schedule="1f1b", microbatches=8, data_parallel="zero1", context=8)
    moved = 2 * (32 + 8) * seq / 8 * 128 * 2
    one = job(model, 64, 16, seq)
    assert context_bytes(one, layout) == pytest.approx(7 / 8 * moved)
    found = estimate(one, layout)
    exchange = moved * 8 / 4 / chip.ring()
    assert found.seconds["context"] == pytest.approx(8 * 8 * 2 * exchange)
    causal = 2 * 2 * seq * 4096 / 2 * seq / 8  # two products, half of them masked
    more = estimate(replace(one, seq=2 * seq), layout).seconds["compute"]
    rate = chip.flops * ATTENTION_EFFICIENCY
    attention = 8 * 8 * 4.5 * causal / rate  # microbatches, layers, F and B
    # Twice the positions: all else doubles, and attention takes four times as long.
    assert more - 2 * found.seconds["compute"] == pytest.approx(2 * attention, rel=1e-3)


def test_a_plan_says_and_writes_its_axis(tmp_path):
    """The table has a column, the file has mesh and batch, and a run reads it."""
    found = plan(**SIZES, context=(4,), remat=(None, "stage"))
    assert "data x context x stage x tensor" in str(found)
    assert found.pipeline is not None
    assert "by ulysses" in found.verdict
    path = found.write(tmp_path / "plan.toml", found.pipeline)
    text = path.read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    config = ParallelConfig.from_dict(tables["parallel"])
    assert config.sizes["context"] == found.pipeline.layout.context == 4
    assert config.batch_size == config.num_microbatches * config.data * config.microbatch_size
    assert PipelineOptions(**tables["pipeline"]).options()["batch"] == P("data", "context")
    assert '# attention with Context("context", "ulysses")' in text


def test_ranks_that_cannot_share_the_heads_are_named():
    faults: dict[str, list[int]] = {}
    one = replace(job(devices=16, batch=16, seq=4096), context=(1, 2, 4, 8))
    found = list(layouts_of(one, ("gpipe",), ("stage",), faults))
    assert {at.context for at in found} == {1, 2, 4}
    assert all(shares_heads(SMALL, at.context, at.tensor) for at in found)
    rule = "context: Ulysses needs ranks that can share 4 heads of queries and 2 of keys"
    assert faults[rule] == [8, 4]


def test_auto_tries_parts_of_enough_positions():
    tried = plan(**SIZES, context="auto", schedules=("gpipe",)).job.context
    assert tried == (1, 2, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"context": (1, 3)},
            (
                "context=3: must divide the 4096 positions of seq=; up to 64 these do: 1, 2, 4, 8, "
                "16, 32, 64. Or pad sequences"
            ),
        ),
        (
            {"context": 4},
            (
                "context=4: must be a sequence of integers >= 1, the sizes of the axis; 'auto' to "
                "try all that divide; or None for 1"
            ),
        ),
        (
            {"context": (2,), "costs": Costs()},
            (
                "costs= with context=: measured seconds are those of blocks on whole sequences; "
                "leave costs out"
            ),
        ),
        (
            {"context": (2,), "model": "deepseek-v3"},
            (
                "context= with latent attention: its keys and values on several ranks are not "
                "counted; leave it out"
            ),
        ),
    ],
)
def test_bad_input(given, message):
    assert refusal(plan, **{**SIZES, **given}) == message


@pytest.mark.slow
def test_the_command_line_takes_sizes(capsys):
    words = "plan --model llama-8b --devices 4 --chip v5p --batch 2 --seq 32768"
    assert cli([*words.split(), "--context", "1", "4"]) == 0
    assert "data x context x stage x tensor" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli([*words.split(), "--context", "three"])
    assert "context=['three']: must be a sequence of integers >= 1" in capsys.readouterr().err


GUIDE = Path(__file__).parents[2] / "docs/guides/long-sequences.md"


def quickest(seq: int, ranks: int) -> str:
    """The best of four and eight stages, with and without computing stages again."""
    one, found = job(MODELS["llama-8b"], 64, 2**21 // seq, seq), []
    ways = ("eager_1f1b", "1f1b", "interleaved_1f1b")
    for S, remat, name in itertools.product((4, 8), ("stage", None), ways):
        data = 64 // (S * ranks)
        layout = MeshLayout(
            data,
            S,
            1,
            schedule=name,
            chunks=32 // S if name == "interleaved_1f1b" else 1,
            microbatches=one.batch // data,
            remat=remat,
            data_parallel="replicated" if data == 1 else "zero1",
            vocabulary="stage",
            context=ranks,
        )
        found.append(estimate(one, layout))
    best = min((each for each in found if each.hbm <= usable(one)), key=lambda each: each.step)
    return f"{best.step:.1f} s, {best.hbm / 1e9:.0f} GB"


@pytest.mark.slow
@pytest.mark.parametrize("seq", [8192, 32768, 131072])
def test_the_guides_table(seq):
    rows = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    (row,) = (line for line in rows if line.startswith(f"| {seq:,} | "))
    assert row == f"| {seq:,} | " + " | ".join(quickest(seq, ranks) for ranks in (1, 8)) + " |"
