"""Plans for mixtures of experts: sizes, bytes and seconds by hand, and choices.

Letters: D, E, S ranks on `data`, `expert`, `stage`; n tokens of a rank, d width, k experts of one.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import ParallelConfig, Pipeline, decoders
from pipeline.insight.forecast.bytes import predict
from pipeline.models.layers.experts import products
from pipeline.planner import CHIPS, MODELS, ExpertSizes, LatentSizes, ModelSizes, plan
from pipeline.planner.candidates import capacity_for, layouts_of
from pipeline.planner.costs import all_to_all, estimate, mfu
from pipeline.planner.layout import Dispatched, MeshLayout
from pipeline.planner.memory import bytes_of
from tests.api.test_planner import IDEAL, job
from tests.support.refusals import refusal

SIZES = ExpertSizes(8, 2, hidden=96)
MIXED = ModelSizes(8, 64, 4, 2, 128, 256, experts=SIZES)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # As their authors publish them, tables included.
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 30.5e9, 3.35e9),
        ("qwen3-235b-a22b", 235e9, 22.2e9),
        ("deepseek-v3", 671e9, 37.6e9),
    ],
)
def test_all_parameters_and_those_that_a_token_passes(name, total, active):
    model = MODELS[name]
    assert model.parameters == pytest.approx(total, rel=2e-3)
    assert model.active_parameters == pytest.approx(active, rel=3e-3)


def test_operations_are_those_of_the_experts_that_a_token_passes():
    seq, d, f = 32, 64, 96
    attention = d * (64 + 32 + 32) + 64 * d
    multiplied = 8 * (attention + d * 8 + 2 * 3 * d * f) + 256 * d
    scores = 8 * 3 * 2 * (2 * seq * 64) / 2
    assert MIXED.step_operations(seq) == 6 * multiplied + scores
    one = job(MIXED)
    assert mfu(one, 1e-3) == 16 * 32 * MIXED.step_operations(seq) / (4 * 1e12 * 1e-3)
    dense = replace(MIXED, experts=replace(SIZES, dense_layers=3))
    saved = 3 * (d * 8 + 8 * 3 * d * f - 3 * d * 128)
    assert MIXED.parameters - dense.parameters == saved


def piped(at: Dispatched, **changes) -> MeshLayout:
    given = {"schedule": "gpipe", "microbatches": 2, "data_parallel": "zero1"}
    return MeshLayout(2, 2, 1, experts=at, **given | changes)


def test_bytes_of_weights_by_hand():
    """Experts are shared out over `expert`; their moments over `data`, all others over both."""
    held = bytes_of(job(MIXED, devices=16), piped(Dispatched(4)))
    attention, d = 64 * (64 + 32 + 32) + 64 * 64, 64
    whole, experts = 4 * (attention + d * 8 + 2 * d), 4 * 8 * 3 * d * 96
    ends = 2 * 256 * d + d
    assert held["weights"] == held["gradients"] == 4 * (whole + ends + experts / 4)
    assert held["optimizer"] == 8 * ((whole + ends) / (2 * 4) + experts / 4 / 2)


ROWS = [("gather", 4 * 2), ("capacity", 1.5 * 2), ("ragged", 4 * 2)]


@pytest.mark.parametrize(("way", "rows"), ROWS)
def test_bytes_of_stashes_by_hand(way, rows):
    """Every row, its gate, up and output; of "capacity" outputs by place and by token."""
    at = Dispatched(4, way, 1.5)
    d, f, n = 64, 96, 32
    given = {"gather": rows, "capacity": rows + 2, "ragged": 2}[way]
    numbers = 2 * d + 2 * 64 + 2 * 32 + rows * 2 * f + d * (rows + given)
    held = bytes_of(job(MIXED, devices=16), piped(at))
    assert held["stashes"] == 2 * 4 * 2 * numbers * n  # microbatches, blocks, bytes
    again = bytes_of(job(MIXED, devices=16), piped(at, remat="block"))
    assert again["stashes"] == 2 * 4 * 2 * d * n


def test_seconds_over_experts_by_hand():
    chip = replace(IDEAL, link=1e9)
    one = job(MIXED, chip, devices=16)
    size = 2 * 32 * 64
    for at, once in {
        Dispatched(4): 2 * 3 * size / 2e9,
        Dispatched(4, "capacity", 1.5): 2 * all_to_all(one, size * 2 * 1.5, 4),
        Dispatched(4, "ragged"): 2 * all_to_all(one, size * 2, 4),
        Dispatched(1): 0.0,
    }.items():
        for remat, passes in {None: 2, "block": 3, "mlp": 3}.items():
            found = estimate(one, piped(at, remat=remat))
            assert found.seconds["expert"] == pytest.approx(2 * 4 * passes * once)
    # A ring of 4: each sends a quarter to the neighbours and to the rank across, in 2 directions.
    assert all_to_all(one, 4.0, 4) == pytest.approx((1 + 1 + 2) / 2 / 1e9)
    assert all_to_all(replace(one, chip=CHIPS["h100"]), 4.0, 4) == 3 / 450e9


def test_the_busiest_rank_and_what_it_takes_to_drop_next_to_nothing():
    for ranks, imbalance, load in (8, 1.5, 1.5), (1, 1.5, 1.0), (4, 2.4, (2.4 + 5.6 / 7) / 2):
        assert Dispatched(ranks).load(SIZES, imbalance) == pytest.approx(load)
    # 512 tokens of an expert on average: 1.25 + 3 sqrt(1.25 / 512) = 1.398.
    assert capacity_for(SIZES, 2048, 1.25) == pytest.approx(1.4)
    assert capacity_for(SIZES, 4, 1.0) == 4.0  # a place for every token


def test_everything_that_is_tried_divides():
    one = job(MIXED, devices=32, batch=64)
    found = list(layouts_of(one, ("gpipe",), (None,), faults := {}))
    assert {at.experts.ranks for at in found} == {1, 2, 4, 8}
    assert {at.experts.way for at in found if at.experts.ranks > 1} == set(one.dispatch)
    for at in found:
        assert at.data * at.experts.ranks * at.stage == 32
        assert at.rows_ranks * at.microbatches * at.rows == 64
        assert at.experts.way == "gather" or at.experts.ranks > 1
    assert "tensor: experts are not cut over it, so each of its ranks would compute all" in faults


def test_a_layout_without_its_bubble_is_a_bound():
    one = job(MODELS["mixtral-8x7b"], CHIPS["v5p"], devices=16, batch=64, seq=512)
    found = list(layouts_of(one, ("gpipe", "zb_v"), (None, "block", "stage"), {}))[::31]
    assert {at.experts.way for at in found} == set(one.dispatch)
    for layout in found:
        least, whole = estimate(one, layout, bound=True), estimate(one, layout)
        assert least.step <= whole.step * (1 + 1e-9)
        assert min(whole.seconds.values()) >= -1e-9 * whole.step


def test_experts_that_do_not_fit_on_a_chip_lie_over_several(tmp_path):
    """A chip with room for a quarter of the weights of 2 stages; nothing may be gathered."""
    chip = replace(CHIPS["v5p"], hbm=16 * 10**9)
    model = replace(MODELS["mixtral-8x7b"], layers=4)
    found = plan(model=model, devices=8, chip=chip, batch=32, seq=1024, schedules=("1f1b",))
    best = found.pipeline
    assert best is not None
    at = best.layout.experts
    assert at.ranks > 1
    said = str(found)
    assert "6.07e9 parameters, of which a token passes 1.84e9; " in said
    assert "data x expert x stage  dispatch" in said
    with found.write(tmp_path / "plan.toml", best).open("rb") as file:
        text = file.read().decode()
    tables = tomllib.loads(text)
    config = ParallelConfig.from_dict(tables["parallel"])
    assert config.sizes["expert"] == at.ranks
    assert config.batch_size == config.num_microbatches * config.data * config.microbatch_size
    assert f'# MixtureOfExperts(dispatch="{at.way}"' in text
    assert 'batch=PartitionSpec(("data", "expert"))' in text


def test_only_dispatches_that_are_asked_for_are_tried():
    one = replace(job(MIXED, devices=8), dispatch=("gather",))
    assert {at.experts.way for at in layouts_of(one, ("gpipe",), (None,), {})} == {"gather"}
    given = {"model": MIXED, "devices": 8, "chip": "v5p", "batch": 16, "seq": 32}
    assert refusal(plan, **given, dispatch="gather") == (
        "dispatch='gather': must be a sequence out of 'gather', 'ragged', 'capacity'"
    )
    assert refusal(plan, **given, imbalance=0.5) == (
        "imbalance=0.5: must be a number >= 1, the load of the busiest expert over the mean; 1 "
        "where all experts get the same"
    )
    assert refusal(ExpertSizes, 4, 5, hidden=8) == (
        "ExpertSizes: top_k=5 is more than number=4: give no more"
    )
    assert refusal(LatentSizes, -1, 12, 4, "a") == (
        "LatentSizes: rank=-1 must be an integer >= 1; value='a' must be an integer >= 1"
    )
    assert refusal(replace, MIXED, experts=8, latent=16, tied="no") == (
        "ModelSizes: experts=8 must be a pipeline.planner.ExpertSizes, or None; latent=16 must be "
        "a pipeline.planner.LatentSizes, or None; tied='no' must be True or False"
    )


BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
    "num_experts_per_tok": 2,
}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "q_lora_rank": None,
}


@pytest.mark.parametrize(
    ("content", "experts"),
    [
        ({"num_local_experts": 8}, SIZES),
        (
            {
                "num_experts": 8,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 48,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1],
            },
            ExpertSizes(8, 2, 32, shared=48, dense_layers=5),
        ),
        (
            {
                "n_routed_experts": 8,
                "moe_intermediate_size": 32,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
                **LATENT,
            },
            ExpertSizes(8, 2, 32, shared=64, dense_layers=1),
        ),
    ],
)
def test_experts_of_configurations(tmp_path, content, experts):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE | content), encoding="utf-8")
    given = {"devices": 1, "chip": "v5p", "batch": 4, "seq": 32}
    model = plan(model=path, **given).job.model
    assert model.experts == experts
    if model.latent is not None:
        d, heads = 64, 4
        keys = d * (16 + 4) + 16 * heads * (12 + 12)
        assert model.attention_matrices == d * heads * 16 + keys + heads * 12 * d
    path.write_text(json.dumps(BASE | content | {"num_experts_per_tok": None}), encoding="utf-8")
    assert refusal(plan, model=path, **given) == (
        f"model={str(path)!r} lacks num_experts_per_tok: a Hugging Face config.json has them"
    )


def test_a_plan_says_what_it_does_not_count(tmp_path):
    """The modules of a configuration, and chunks of tokens."""
    path = tmp_path / "config.json"
    content = BASE | {"num_local_experts": 8, "num_nextn_predict_layers": 2}
    path.write_text(json.dumps(content), encoding="utf-8")
    plans = plan(model=path, devices=1, chip="v5p", batch=4, seq=32)
    assert plans.job.model == replace(MIXED, hidden=96, mtp_modules=2)
    d = 64
    block = 2 * d * (64 + 32) + d * 8 + 8 * 3 * d * 96 + 2 * d
    number = 2 * (block + 2 * d * d + 3 * d)
    chunks = (
        "Not tried: MixtureOfExperts(chunk=), which holds fewer rows of experts at a time and "
        "computes them again in the backward."
    )
    modules = (
        f"Not counted: 2 modules for multi-token prediction, {number / 1e9:.3g}e9 parameters and "
        f"as many passes of the head more, by default on the last stage; mtp_layers=0 leaves them "
        f"out."
    )
    assert plans.notes == (chunks, modules)
    assert all(note in str(plans).splitlines() for note in plans.notes)
    written = plans.write(tmp_path / "plan.toml").read_text(encoding="utf-8")
    assert all(f"# {note}" in written.splitlines() for note in plans.notes)
    dense = plan(model="llama-8b", devices=16, chip="v5p", batch=64, seq=256, schedules=["gpipe"])
    assert dense.notes == ()
    assert (
        refusal(replace, MIXED, mtp_modules=-1)
        == "ModelSizes: mtp_modules=-1 must be an integer >= 0"
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gather", "capacity"])
def test_a_plan_holds_what_a_traced_step_holds(way, monkeypatch):
    """Few positions, whose scores weigh nothing: no kernel spares them on CPU.

    Rows are those of TPUs: in blocks, as elsewhere, they would be more.
    """
    monkeypatch.setattr(products, "platform", lambda: "tpu")
    D, E, S, M, seq = 2, 2, 2, 4, 8
    sizes = ModelSizes(4, 512, 4, 2, 128, 256, experts=ExpertSizes(8, 2, hidden=768))
    mixture = decoders.ExpertsConfig(8, 2, 768, tuple(range(4)), dispatch=way, capacity_factor=1.5)
    config = decoders.DecoderConfig(
        vocabulary=256,
        width=512,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=128,
        hidden=128,
        experts=mixture,
    )
    stages, embed, head = decoders.build(config, [2, 2], nnx.Rngs(0))
    pipe = Pipeline(
        stages,
        M,
        embed=embed,
        head=head,
        loss_fn=decoders.next_token_loss,
        mesh=make_mesh(stage=S, expert=E, data=D),
        batch=P(("data", "expert")),
        schedule="1f1b",
        remat=None,
        data_parallel="zero1",
        compute_dtype=jnp.bfloat16,
        vocabulary="ends",
    )
    x = jax.ShapeDtypeStruct((M * D * E, seq), jnp.int32)
    traced = predict(pipe.plan, *pipe._operands(x, x, None))
    layout = MeshLayout(
        D,
        S,
        1,
        schedule="1f1b",
        microbatches=M,
        remat=None,
        data_parallel="zero1",
        experts=Dispatched(E, way, 1.5 if way == "capacity" else 1.0),
    )
    one = job(sizes, devices=8, batch=M * D * E, seq=seq, clock="lockstep")
    said = bytes_of(one, layout)
    for kind, size in {
        "weights": traced.weights,
        "gradients": traced.totals,
        "stashes": traced.stashes.size,
    }.items():
        assert said[kind] == pytest.approx(size, rel=0.05), kind
