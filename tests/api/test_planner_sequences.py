"""`pipeline.plan(context=, num_slices=)`: sequences over ranks and in slices (issue 41).

Letters: R ranks on `context`, N slices, T positions, h heads of queries, k of keys, c width of one.
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
from pipeline.insight.forecast.bytes import predict
from pipeline.planner import CHIPS, MODELS, ModelSizes
from pipeline.planner.candidates import layouts_of
from pipeline.planner.costs import (
    estimate,
    sent_over_context,
    stage_costs,
    with_equal_slices,
)
from pipeline.planner.layout import MeshLayout, PlannedJob
from pipeline.planner.memory import LOGIT_PARTS, pipeline_bytes, stash_bytes, usable
from pipeline.planner.sequences import (
    FORMULA_PRODUCTS,
    SCORE_PASSES,
    WHOLE_CUT,
    SequenceCut,
    attention_seconds,
    carry_bytes,
    sent_bytes,
    shares_heads,
)
from pipeline.training.config import PipelineOptions
from schedules import Costs

SMALL = ModelSizes(layers=4, width=32, heads=4, kv_heads=2, hidden=64, vocabulary=64, head_width=8)
T, M = 64, 4
SIZES = {"model": SMALL, "devices": 8, "chip": "v5p", "batch": 8, "seq": 4096}


def job(model: ModelSizes = SMALL, devices: int = 4, batch: int = M, seq: int = T) -> PlannedJob:
    chip = CHIPS["v5p"]
    return PlannedJob(model, chip, devices, batch, seq, 1, "lockstep", chip.efficiency)


def layout_of(cut: SequenceCut, remat: str | None = "stage") -> MeshLayout:
    name = "seq1f1b" if cut.slices > 1 else "1f1b"
    return MeshLayout(1, 2, 1, schedule=name, microbatches=M, rows=1, remat=remat, cut=cut)


def described(layout: MeshLayout):
    """The bytes and the traffic that a pipeline of the small decoder has by its traced step."""
    cut = layout.cut
    config = DecoderConfig(
        vocabulary=64, width=32, layers=4, heads=4, kv_heads=2, head_dim=8, hidden=64
    )
    types = {"dtype": jnp.float32, "activations": jnp.bfloat16, "context": cut.context}
    stages, embed, head = build(config, [2, 2], nnx.Rngs(0), **types)
    axes = {"context": cut.ranks} if cut.ranks > 1 else {}
    devices = jax.devices()[: 2 * cut.ranks]
    pipe = Pipeline(
        stages,
        M,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(stage=2, devices=devices, **axes),
        schedule=layout.schedule,
        remat=layout.stage_remat,
        batch=P("data", *axes),
        slices=cut.slices if cut.slices > 1 else None,
    )
    words = jax.ShapeDtypeStruct((M, T), jnp.int32)
    operands = pipe._operands(words, words, None)
    return predict(pipe.plan, *operands), traffic.predict_traffic(pipe.plan, *operands)


CUTS = [
    (SequenceCut(2, "ulysses", slices=2), "stage"),
    (SequenceCut(2, "ulysses", slices=2), None),
    (SequenceCut(2, "allgather", slices=4), "stage"),
    (SequenceCut(2, "allgather"), None),
    (SequenceCut(2, "ulysses"), "stage"),
    (SequenceCut(2, "ring", "zigzag"), "stage"),
    (SequenceCut(slices=4), "stage"),
    (SequenceCut(slices=4), None),
]


@pytest.mark.few
@pytest.mark.parametrize(("cut", "remat"), CUTS)
def test_bytes_are_those_that_describe_has(cut, remat):
    """Bytes over `context`, of keys and values that slices keep, and of stashes."""
    layout = layout_of(cut, remat)
    memory, sent = described(layout)
    layers, units = 2, M * cut.slices
    forward, backward = sent_bytes(SMALL, cut, 1, T, 1)
    # A rank that computes a stage again runs every forward twice. The last stage's F does nothing
    # then, unless it leaves keys and values for later slices: some releases of jax leave out what
    # these do not need.
    runs = [2 if remat == "stage" else 1] * 2
    runs[-1] -= remat == "stage" and cut.slices == 1
    wanted = [units * layers * (forward * n + backward) for n in runs]
    spared = units * layers * forward * (remat == "stage" and cut.slices > 1)
    kinds = {"all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
    found = [
        bytes_
        for (axes, kind), bytes_ in sent.sent.items()
        if axes == ("context",) and kind in kinds
    ]
    first, last = sum(found, start=jnp.zeros(2)).tolist()
    assert first == pytest.approx(wanted[0])
    assert last == pytest.approx(wanted[1]) or wanted[1] - spared < last < wanted[1]
    assert sent_over_context(job(), layout) == pytest.approx(sum(wanted) / 2)
    planned = pipeline_bytes(job(), layout)
    assert memory.carries == planned.get("keys of slices", 0.0)
    if remat is None:  # all that a forward leaves; norms and counts are not in the planner's
        held = memory.stashes.count * stash_bytes(job(), layout)
        assert memory.stashes.size == pytest.approx(held, rel=0.06)
        assert planned["stashes"] == held


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(), (104, 64, 48, 40)])
def test_logits_are_in_as_many_parts_as_the_head_forms(lengths):
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
            schedule="seq1f1b" if lengths else "1f1b",
            slices=lengths or None,
        )
        tokens = jnp.zeros((M, length), jnp.int32)
        lines = str(pipe.describe(tokens, tokens, compiled=True)).splitlines()
        (line,) = [line for line in lines if line.strip().startswith("temporaries")]
        held[chunks] = int(line.split("compiled ")[1].replace(",", ""))
    layout = layout_of(SequenceCut(slices=4, lengths=lengths) if lengths else WHOLE_CUT, "stage")
    planned = pipeline_bytes(replace(job(model), seq=length), layout)["workspace"]
    spared = (LOGIT_PARTS - 1) * planned
    assert held[None] - held[LOGIT_PARTS] == pytest.approx(spared, rel=0.15)


def test_a_step_of_context_by_hand():
    """Ulysses runs the kernel on a rank's heads, and sends what `context_bytes` says."""
    model, chip, seq = MODELS["llama-8b"], CHIPS["v5p"], 131072
    cut = SequenceCut(8, "ulysses")
    tokens = seq / 8
    both = attention_seconds(model, chip, cut, tokens, seq, efficiency=0.5)
    causal = 2 * 2 * seq * 4096 / 2 * tokens  # two products, half of them masked
    assert both == pytest.approx([x / (chip.flops * 0.5) for x in (causal, 3.5 * causal)])
    moved = 2 * (32 + 8) * tokens * 128 * 2
    assert sent_bytes(model, cut, 1, seq, 1) == pytest.approx([7 / 8 * moved] * 2)
    layout = MeshLayout(2, 4, 1, schedule="1f1b", microbatches=8, data_parallel="zero1", cut=cut)
    found = estimate(replace(job(model, 64, 16, seq)), layout)
    exchange = 7 / 8 * moved * 8 / 7 * 8 / 4 / chip.ring()
    assert found.seconds["context"] == pytest.approx(8 * 8 * 2 * exchange)


def test_the_formula_passes_scores_through_memory():
    """A number of slices takes the formula: float32 scores, and keys again for some queries.

    Slice n reads the keys of n + 1 slices.
    """
    model, chip, seq = MODELS["llama-8b"], CHIPS["v5p"], 131072
    cut = SequenceCut(slices=16)
    tokens = seq // 16
    forward, _ = attention_seconds(model, chip, cut, tokens, seq, efficiency=0.93)
    read = (16 + 1) / 2 * tokens
    pairs = 32 * read * tokens
    products = FORMULA_PRODUCTS[0] * 2 * pairs * 128 / (0.93 * chip.flops)
    queries = 2**20 // tokens
    keys = tokens / queries * 2 * 8 * read * 128 * 4
    passes = (SCORE_PASSES[0] * 4 * pairs + keys) / chip.hbm_bandwidth
    assert forward == pytest.approx(products + passes)


def test_slices_fill_a_pipeline_sooner():
    """Eight slices leave less than half of the bubble of two; later ones take longer."""
    one = job(seq=4096, batch=8)
    found = {}
    for N in 2, 8:
        layout = replace(layout_of(SequenceCut(slices=N)), microbatches=8)
        shares = stage_costs(one, layout).slices
        assert shares == tuple(sorted(shares))
        assert sum(shares) == pytest.approx(N)
        found[N] = estimate(one, layout).seconds["bubble"]
    assert found[8] < found[2] / 2


def test_slices_of_equal_time_run_the_kernel():
    """On TPUs lengths are tried too: later slices are shorter, in blocks of 128."""
    one = replace(job(MODELS["llama-8b"], 64, 16, 131072), num_slices=(4,))
    layout = replace(layout_of(SequenceCut(8, "ulysses", slices=4)), data=2, stage=4)
    found = with_equal_slices(one, layout)
    assert found is not None
    cut = found.cut
    assert sum(cut.lengths) == 131072
    assert sorted(cut.lengths, reverse=True) == [*cut.lengths]
    assert all(length % 128 == 0 for length in cut.lengths)
    assert cut.by_kernel
    assert stage_costs(one, found).slices is None
    assert estimate(one, found).step < estimate(one, layout).step / 2
    longest = cut.lengths[0] / 131072 * 4
    ratio = stash_bytes(one, found) / stash_bytes(one, layout)
    assert ratio == pytest.approx(longest)
    assert with_equal_slices(one, replace(layout, vocabulary="stage")) is None
    assert with_equal_slices(replace(one, chip=CHIPS["h100"]), layout) is None
    assert with_equal_slices(replace(one, seq=256), layout) is None


def test_carries_are_of_a_ranks_own_heads():
    """With Ulysses of at least one; an all-gather keeps those of all heads on every rank."""
    whole = 2 * 2 * 2 * 8 * T / 4  # keys and values, bfloat16, two heads of 8, a quarter of T
    for way, ranks, share in ("ulysses", 2, 1 / 2), ("ulysses", 4, 1 / 2), ("allgather", 4, 1):
        cut = SequenceCut(ranks, way, slices=4)
        assert carry_bytes(SMALL, cut, 1, T, 1) == whole * share


def test_a_plan_says_and_writes_its_cuts(tmp_path):
    """The table has a column, the file has mesh, batch and slices, and a run reads it."""
    found = plan(**SIZES, context=(4,), num_slices=(2,), remat=(None, "stage"))
    said = str(found)
    assert "data x context x stage x tensor  sequences" in said
    assert "4 ulysses, 2 slices by length" in said
    assert found.alone is None
    assert found.pipeline is not None
    assert "by ulysses in 2 slices" in found.verdict
    at = found.best.layout
    sent = sent_over_context(found.job, at) / 1e9
    assert f"\nSent over context in its attention: {sent:.2f} GB of a chip a step\n" in said
    text = found.write(tmp_path / "plan.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    config = ParallelConfig.from_dict(tables["parallel"])
    assert config.sizes["context"] == at.cut.ranks == 4
    assert config.batch_size == config.num_microbatches * config.data * config.microbatch_size
    options = PipelineOptions(**tables["pipeline"]).options()
    assert tuple(options["slices"]) == at.cut.lengths
    assert len(at.cut.lengths) == 2
    assert options["batch"] == P("data", "context")
    assert f'# attention with Context("context", "{at.cut.way}")' in text


def test_which_cuts_are_tried():
    """Ulysses where ranks share the heads, a ring in zig-zag order elsewhere."""
    one = replace(job(devices=16, batch=16, seq=4096), context=None, num_slices=(1, 4))
    faults: dict[str, list[int]] = {}
    found = list(layouts_of(one, ("gpipe",), ("stage",), faults))
    assert {str(at.cut) for at in found} == {
        "whole",
        "2 ulysses",
        "4 ulysses",
        "4 slices",
        "2 ulysses, 4 slices",
        "4 ulysses, 4 slices",
        "4 ring zigzag",
        "4 allgather",
        "4 allgather, 4 slices",
    }
    assert {at.schedule for at in found if at.cut.slices > 1} == {"seq1f1b", "seq1f1b_zb"}
    assert all(at.chunks == 1 and at.stage > 1 for at in found if at.cut.slices > 1)
    assert all(
        (at.cut.way == "ulysses") is shares_heads(SMALL, at.cut.ranks, at.tensor)
        for at in found
        if at.cut.ranks > 1
    )


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
            {"num_slices": (6,)},
            (
                "num_slices=6: must divide the 4096 positions of seq=; up to 64 these do: 1, 2, 4, "
                "8, 16, 32, 64. Or pad sequences"
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
            {"num_slices": (2, 0)},
            (
                "num_slices=(2, 0): must be a sequence of integers >= 1, the numbers of slices of "
                "a sequence; 'auto' to try all that divide; or None for 1"
            ),
        ),
        (
            {"schedules": ("1f1b", "seq1f1b")},
            (
                "schedules has 'seq1f1b', which runs slices of sequences, and num_slices is None: "
                "give num_slices='auto' or numbers of slices such as (1, 4, 8)"
            ),
        ),
        (
            {"context": (2,), "costs": Costs()},
            (
                "costs= beside context= or num_slices=: measured seconds are those of blocks on "
                "whole sequences; leave costs out"
            ),
        ),
        (
            {"num_slices": (2,), "model": "deepseek-v3"},
            (
                "context= or num_slices= with latent attention: its keys and values on several "
                "ranks are not counted; leave them out"
            ),
        ),
    ],
)
def test_bad_input(given, message):
    with pytest.raises(ValueError) as error:
        plan(**{**SIZES, **given})
    assert str(error.value) == message


def test_a_ring_that_zigzag_does_not_divide_is_named():
    """4098 positions: two ranks have 2049 each, which are no two blocks."""
    faults: dict[str, list[int]] = {}
    one = replace(job(replace(SMALL, kv_heads=4, heads=4), 4, 4, 4098), context=(2,))
    assert {at.cut.way for at in layouts_of(one, ("gpipe",), ("stage",), faults)} == {"ulysses"}
    rule = "context: a ring in zig-zag order needs twice the ranks to divide 4098 positions"
    assert faults[rule] == [2]


@pytest.mark.slow
def test_the_command_line_takes_both(capsys):
    words = "plan --model llama-8b --devices 4 --chip v5p --batch 2 --seq 32768"
    assert cli([*words.split(), "--context", "1", "4", "--num-slices", "auto"]) == 0
    assert "sequences" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli([*words.split(), "--context", "three"])
    assert "context=['three']: must be a sequence of integers >= 1" in capsys.readouterr().err


GUIDE = Path(__file__).parents[2] / "docs/guides/long-sequences.md"


def quickest(seq: int, ranks: int, slices: tuple[int, ...]) -> str:
    """The best of four and eight stages, with and without computing stages again."""
    one, found = replace(job(MODELS["llama-8b"], 64, 2**21 // seq, seq)), []
    ways: tuple[str, ...] = ("seq1f1b",)
    if slices == (1,):
        ways = ("eager_1f1b", "1f1b", "interleaved_1f1b")
    for S, N, remat, name in itertools.product((4, 8), slices, ("stage", None), ways):
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
            vocabulary="stage" if N == 1 else "ends",
            cut=SequenceCut(ranks, "ulysses" if ranks > 1 else "allgather", slices=N),
        )
        made = layout if N == 1 else with_equal_slices(one, layout)
        assert made is not None
        found.append(estimate(one, made))
    fit = [each for each in found if each.hbm <= usable(one)]
    best = min(fit, key=lambda each: each.step)
    return f"{best.step:.1f} s, {best.hbm / 1e9:.0f} GB"


@pytest.mark.slow
@pytest.mark.parametrize("seq", [8192, 32768, 131072])
def test_the_guides_table(seq):
    rows = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    (row,) = (line for line in rows if line.startswith(f"| {seq:,} | "))
    found = [quickest(seq, *way) for way in ((1, (1,)), (8, (1,)), (1, (4, 16)), (8, (4,)))]
    assert row == f"| {seq:,} | " + " | ".join(found) + " |"
