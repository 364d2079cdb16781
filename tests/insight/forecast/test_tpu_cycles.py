"""Costs by the TPU compiler: cycles out of programs written here, and a step that it compiles.

Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies

from collectives import make_mesh
from pipeline import Calibration, CalibrationError, Pipeline
from pipeline.base.chips import CHIPS, Chip
from pipeline.insight.calibrate import compiled
from pipeline.insight.calibrate.cycles import EFFICIENCY, Cycles, Machine, Scope, cycles, group_of
from schedules import Costs, ScheduleError
from tests.support import models
from tests.support.models import WIDTH, Block

# A cycle a nanosecond, 2 operations a cycle, 8 bytes a cycle over a link.
CHIP = Chip("toy", 2e9, 10**9, 1e9, 8e9, 1, 64, 1e9, clock=1e9)
MACHINE = Machine(CHIP, np.arange(4)[:, None], (4,))
IN = "jit(step)/ticks0_9/while/body"


def fusion(name: str, count: int, what: str = "fusion") -> str:
    return (
        f'  %{what}.{count} = f32[] fusion(), kind=kLoop, metadata={{op_name="{name}"}}, '
        f'backend_config={{"estimated_cycles":"{count}"}}'
    )


def loop(what: str, name: str) -> str:
    return (
        f"  %while.{what} = (s32[]) while(%x), condition=%{what}_cond, body=%{what}_body, "
        f'metadata={{op_name="{name}"}}'
    )


def counts(limit: int) -> list[str]:
    return [f"  %constant.1 = s32[] constant({limit})", "  ROOT %lt = pred[] compare(%i, %n)"]


def kernel(kind: str, results: str = "bf16[4,1024,64]") -> str:
    """[4, 1024, 64] of splash attention in blocks of 256; what it says has line breaks."""
    sizes = ", ".join(
        rf"\"block_{name}\": 256" for name in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    )
    return (
        f"  %splash_mha_{kind}_no_residuals.1 = {results} custom-call(%q), "
        'custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2,2]{2,1,0}, '
        "bf16[1,4,1024,64]{3,2,1,0}}, frontend_attributes={kernel_metadata={\n"
        f'"xprof_metadata":"{{{sizes}}}"\n'
        f'}}}}, metadata={{op_name="{IN}/slot1/B0/while/body/call"}}'
    )


ONCE = ["  ROOT %get-tuple-element.1 = pred[] get-tuple-element(%x), index=0"]
PROGRAM = {
    "block_cond": counts(4),
    "block_body": [
        fusion(f"{IN}/slot0/F0_first/while/body/while/body/dot", 100),
        "  %x.1 = f32[] copy()",
    ],
    "first_cond": ONCE,
    "first_body": [loop("block", f"{IN}/slot0/F0_first/while/body/while"), fusion("no scope", 7)],
    "back_cond": ONCE,
    "back_body": [kernel("dq"), fusion(f"{IN}/slot1/B0/while/body/head/add", 20)],
    "head_cond": ONCE,
    "head_body": [fusion(f"{IN}/slot1/head/while/body/dot", 30)],
    "ticks_cond": counts(9),
    "ticks_body": [
        loop("first", f"{IN}/slot0/F0_first/while"),
        loop("back", f"{IN}/slot1/stages_0_2/B0/while"),
        loop("head", f"{IN}/slot1/head/while"),
        fusion(f"{IN}/select", 3),
    ],
    "main": [
        loop("ticks", "jit(step)/ticks0_9/while"),
        fusion("jit(step)/add", 1000),
        fusion("jit(step)/offloaded", 2**63 - 1),  # that nobody has estimated
    ],
}
BLOCKS = 1 + 2 + 3 + 4  # of 256 x 256, that a causal mask leaves


def program(**changes: list[str]) -> str:
    texts = [
        ("ENTRY " if name == "main" else "")
        + f"%{name} (x: f32[]) -> f32[] {{\n"
        + "\n".join(lines)
        + "\n}"
        for name, lines in {**PROGRAM, **changes}.items()
    ]
    return "\n\n".join(["HloModule step", *texts])


# 1000 bytes of bfloat16 to the first of two places in host memory, and back.
POOL, VALUE = "bf16[2,500]{1,0:S(5)}", "bf16[1,500]{1,0:T(8,128)(2,1)}"
OUT = (
    f"  %dynamic-update-slice-start = (({POOL}, {VALUE}, s32[]), {POOL}, u32[]{{:S(2)}}) "
    "dynamic-update-slice-start(%pool, %x, %n)"
)
BACK = (
    f"  %dynamic-slice-start = (({POOL}, s32[]), {VALUE}, u32[]{{:S(2)}}) "
    "dynamic-slice-start(%pool, %n)"
)
OUT_DONE, BACK_DONE = (
    f"  %{kind}-done = {result} {kind}-done(%{kind}-start)"
    for kind, result in (("dynamic-update-slice", POOL), ("dynamic-slice", VALUE))
)


@pytest.mark.parametrize(
    ("lines", "waits"),
    [
        ([OUT, fusion("a", 300), OUT_DONE, fusion("b", 50)], 200),  # 500 cycles at 2 bytes each
        ([OUT, BACK, fusion("a", 300), OUT_DONE, fusion("b", 150), BACK_DONE], 200 + 0),  # two ways
        ([BACK, BACK_DONE, fusion("a", 300)], 500),
        (
            [BACK, BACK.replace("start =", "start.1 ="), fusion("a", 600), BACK_DONE,
             BACK_DONE.replace("done =", "done.1 =").replace("start)", "start.1)")],
            400,  # one after the other
        ),
    ],
)  # fmt: skip
def test_copies_to_host_memory_count_where_they_are_to(lines, waits) -> None:
    chip = dataclasses.replace(CHIP, host=2e9)
    text = program(main=lines)
    for copies in (False, True):
        machine = dataclasses.replace(MACHINE, chip=chip, copies=copies)
        one = cycles(text, machine)[Scope("step")]
        assert one.waits == waits * copies
        assert one.total == one.fusions + one.waits


def test_cycles_are_summed_by_action_and_times_the_trips_within() -> None:
    operations = 3 * 2 * 4 * BLOCKS * 256**2 * 64
    found = cycles(program(), MACHINE)
    assert {scope: one.total for scope, one in found.items()} == {
        Scope("F0_first", "ticks0_9", "slot0"): 4 * 100 + 7,
        Scope("B0", "ticks0_9", "slot1", (0, 2)): 0,  # the loop itself
        Scope("B0", "ticks0_9", "slot1"): 20 + operations / 2 / EFFICIENCY,
        Scope("head", "ticks0_9", "slot1"): 30,
        Scope("ticks", "ticks0_9"): 3,
        Scope("step"): 1000,
    }


@pytest.mark.parametrize(
    ("line", "operations"),
    [
        (kernel("fwd"), 2 * 2 * 4 * BLOCKS * 256**2 * 64),
        (kernel("dkv"), 4 * 2 * 4 * BLOCKS * 256**2 * 64),
        (
            kernel("dkv", results="(f32[4,4,1024,64], bf16[2,1024,64], bf16[2,1024,64])"),
            5 * 2 * 4 * BLOCKS * 256**2 * 64,
        ),
        (  # a slice of 512 positions behind 512 others: its two blocks of queries read 3 and 4
            kernel("fwd").replace(
                "bf16[1,4,1024,64]{3,2,1,0}}", "bf16[4,512,64]{2,1,0}, bf16[2,1024,64]{2,1,0}}"
            ),
            2 * 2 * 4 * (3 + 4) * 256**2 * 64,
        ),
        (
            (
                '  %mine.1 = f32[8] custom-call(), custom_call_target="tpu_custom_call", '
                'backend_config={"cost_estimate":{"transcendentals":1,"flops":1234}}'
            ),
            1234,
        ),
    ],
)
def test_a_kernel_counts_by_its_operations(line: str, operations: float) -> None:
    found = cycles(program(main=[line, fusion("jit(step)/add", 1)]), MACHINE)
    assert sum(one.kernels for one in found.values()) == operations / 2 / EFFICIENCY


def grouped(name: str, told: str = "") -> str:
    return (
        f"  %{name} = bf16[8] custom-call(%sizes), "
        f'custom_call_target="tpu_custom_call", backend_config={{{told}}}'
    )


@pytest.mark.parametrize("share", [EFFICIENCY, 1.5])
def test_grouped_products_have_a_rate_of_their_own(share: float) -> None:
    """One kernel of `jax.lax.ragged_dot` plans the tiles of the others, and multiplies nothing."""
    products = grouped("ragged-dot-none.3", '"cost_estimate":{"flops":"600","transcendentals":"0"}')
    lines = [grouped("ragged-dot-metadata.1"), products, fusion("jit(step)/add", 1)]
    machine = dataclasses.replace(MACHINE, grouped=share)
    assert cycles(program(main=lines), machine)[Scope("step")].kernels == 600 / 2 / share


GATHER = "all-gather{}(%x), replica_groups=[1,4]<=[4], dimensions={{0}}"


@pytest.mark.parametrize(
    ("lines", "waits"),
    [
        # 3/4 of 4096 bytes, over two links of 8 bytes a cycle
        (["  %ag = bf16[2048] " + GATHER.format("")], 192),
        (
            [
                "  %ag = (bf16[512], bf16[2048]) " + GATHER.format("-start"),
                fusion("jit(step)/dot", 150),
                "  %done = bf16[2048] all-gather-done(%ag)",
            ],
            192 - 150,
        ),
        (
            [
                "  %ag = (bf16[512], bf16[2048]) " + GATHER.format("-start"),
                fusion("jit(step)/dot", 500),
                "  %done = bf16[2048] all-gather-done(%ag)",
            ],
            0,
        ),
        (  # what is sent at the same time shares the links
            [
                "  %ag = (bf16[512], bf16[2048]) " + GATHER.format("-start"),
                "  %other = (bf16[512], bf16[2048]) " + GATHER.format("-start"),
                "  %a = bf16[2048] all-gather-done(%ag)",
                "  %b = bf16[2048] all-gather-done(%other)",
            ],
            2 * 192,
        ),
        # two of four chips in a row are a line: half of the bytes over one link
        (["  %ar = f32[1024] all-reduce(%x), replica_groups={{0,1},{2,3}}"], 4096 / 8),
        (["  %rs = f32[1024] reduce-scatter(%x), replica_groups=[1,4]<=[4]"], 3 * 4096 / 16),
        (["  %p = f32[1024] collective-permute(%x), source_target_pairs={{0,1}}"], 4096 / 8),
    ],
)
def test_a_collective_is_waited_for_as_far_as_nothing_hides_it(
    lines: list[str], waits: float
) -> None:
    found = cycles(program(main=[*lines, fusion("jit(step)/add", 1)]), MACHINE)
    assert found[Scope("step")].waits == waits


def test_a_sum_whose_parts_are_kept_is_fused() -> None:
    fused = ["  %ar = f32[4096] all-reduce(%x), replica_groups=[1,4]<=[4]", ""]
    fused[1] = "  ROOT %d = f32[1024] dynamic-slice(%ar, %i)"
    line = "  %f = f32[1024] fusion(%x), kind=kCustom, calls=%summed"
    found = cycles(program(summed=fused, main=[line, fusion("jit(step)/add", 1)]), MACHINE)
    assert found[Scope("step")].waits == 3 / 4 * 16384 / 16


def test_messages_of_ticks_are_the_clocks_affair() -> None:
    line = f'  %p = f32[1024] collective-permute(%x), metadata={{op_name="{IN}/ppermute"}}'
    body = [*PROGRAM["ticks_body"], line + ", source_target_pairs={{0,1},{1,2}}"]
    found = cycles(program(ticks_body=body), MACHINE)
    assert found[Scope("ticks", "ticks0_9")] == Cycles(3)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups=mesh['data'=2,'stage'=4] {'data'}, x", (0, 4)),
        ("replica_groups=mesh['data'=2,'stage'=4] {'stage'}, x", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", (0, 4)),
        ("replica_groups=[2,4]<=[8], x", (0, 1, 2, 3)),
        ("replica_groups={{0,3},{1,2}}", (0, 3)),
    ],
)
def test_who_meets(text: str, group: tuple[int, ...]) -> None:
    assert group_of(text) == group


def refusal(**changes: list[str]) -> str:
    with pytest.raises(CalibrationError) as caught:
        cycles(program(**changes), MACHINE)
    return str(caught.value)


def test_what_cannot_be_counted_is_refused() -> None:
    assert refusal(block_cond=["  ROOT %lt = pred[] compare(%i, %n)"]) == (
        "the trips of a loop are not known, and with them its cycles: block_cond of the compiled "
        "step; a stage with such a loop has to be timed on a device"
    )
    assert refusal(back_body=[kernel("dq").replace("splash_mha", "of_somebody")]) == (
        "a Pallas kernel that is not counted: of_somebody_dq_no_residuals.1; give its pallas_call "
        "a cost_estimate=pl.CostEstimate(flops=..., transcendentals=..., bytes_accessed=...)"
    )
    assert refusal(main=[fusion("a", 1), "  %x = f32[4] all-gather(%y), replica_groups=?"]) == (
        "a collective whose groups cannot be read: %x = f32[4] all-gather(%y), replica_groups=?; "
        "report it with the versions of jax and libtpu"
    )
    with pytest.raises(CalibrationError) as caught:
        cycles(program().replace("estimated_cycles", "cost"), MACHINE)
    assert str(caught.value) == (
        "the compiler wrote no estimated cycles on its fusions: what it compiled for is no TPU, or "
        "this libtpu keeps them to itself; those of 0.0.52 and later write them (pip install "
        "--upgrade libtpu)"
    )


# --- calibrate(topology=), by programs written here ---


@dataclasses.dataclass(frozen=True)
class Place:
    """A chip of a slice that is not there."""

    coords: tuple[int, ...]


def make(S: int = 2, **options: Any) -> Pipeline:
    given = {"mesh": make_mesh(stage=S), "loss_fn": models.squares, "remat": None} | options
    return Pipeline(models.build(Block, 2), 4, **given)


def data() -> tuple[jax.Array, jax.Array]:
    x, t = (jax.random.normal(jax.random.key(k), (8, WIDTH)) for k in (1, 2))
    return x, t


def written(pipe: Any) -> str:
    """A step whose F, B, I and W of both stages take 100, 230, 120 and 130 cycles, and 9 more."""
    takes, body, more = {"F": 100, "B": 230, "I": 120, "W": 130}, [], {}
    for op in pipe.plan.training.slots[0].ops:
        name = f"{IN}/slot0/{op.label}/while"
        body.append(loop(op.label, name))
        more |= {f"{op.label}_cond": ONCE}
        more |= {f"{op.label}_body": [fusion(f"{name}/body/dot", takes[str(op.kind)] * 10**6)]}
    return program(ticks_body=[*body, fusion(f"{IN}/select", 9 * 10**6)], **more)


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find_slice", lambda _: (CHIPS["v5p"], list(jax.devices()[:2])))
    monkeypatch.setattr(compiled, "machine_of", lambda chip, *_: Machine(chip))
    monkeypatch.setattr(compiled, "compile_step", lambda pipe, *_: written(pipe))
    version = compiled.metadata.version
    monkeypatch.setattr(
        compiled.metadata, "version", lambda name: "0.9" if name == "libtpu" else version(name)
    )


@pytest.mark.usefixtures("on_paper")
def test_costs_are_cycles_over_the_clock(tmp_path: Any) -> None:
    pipe = make()
    cal = pipe.calibrate(*data(), topology="v5p:2x1x1")
    ms = {name: [1e3 * t for t in getattr(cal.costs, name)] for name in "fbiw"}
    want = {"f": 100, "b": 230, "i": 120, "w": 130}
    for name, count in want.items():
        assert ms[name] == pytest.approx([count / 1.75] * 2)
    message = 2 * WIDTH * 4
    assert cal.costs.comm == message / CHIPS["v5p"].link
    path = tmp_path / "costs.json"
    cal.to_json(path)
    assert Calibration.from_json(path) == cal
    assert str(cal).splitlines()[1:4] == [
        (
            "ms by the compiler's cycles at 1.75 GHz; 0% are Pallas kernels, counted at 50% of "
            "peak, 0% are waits for collectives"
        ),
        "stage                   F                   B                   I                   W",
        "0                  57.143             131.429              68.571              74.286",
    ]
    again = pipe.replace(costs=cal, schedule="auto")
    assert again.plan.costs == cal.costs
    assert "what the compiler expects of v5p" in again.describe()
    whole = pipe.calibrate(*data(), topology="v5p:2x1x1", split=False).costs
    assert (whole.i, whole.w) == (whole.b, (0.0, 0.0))
    with pytest.raises(ScheduleError, match="costs= is a calibration of another model: there"):
        pipe.replace(costs=cal, remat="stage")


def test_an_action_whose_stash_lies_on_the_host_counts() -> None:
    """Regression test of issue 42: without it every stage that moves all its stashes was free."""
    stages = models.build(Block, 2)
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=2), loss_fn=models.squares, offload="stash")
    scope = {"ticks": "ticks0_9", "slot": "slot0"}
    found = {"F0_first_stash": 1e9, "F0_last": 3e9, "B0_first": 2e9, "B0_first_stash_early": 5e9}
    read = {Scope(name, **scope): Cycles(each) for name, each in (found | {"B0_last": 4e9}).items()}
    costs = compiled.costs_of(read, pipe.plan, MACHINE, 0.0)
    assert costs.f == (1.0, 3.0)
    assert costs.b == (5.0, 4.0), "the slower of those whose stash lies here and there"


def test_what_a_run_of_microbatches_moves_is_spread_over_them() -> None:
    """One of 4 forwards of chunk 0 gathers the next chunk, and takes 5 s for 1."""
    options: dict[str, Any] = {"schedule": "looped_bfs", "loss_fn": models.squares}
    mesh = make_mesh(stage=2, data=2)
    stages = models.build(Block, 4)
    pipe = Pipeline(stages, 4, mesh=mesh, data_parallel="fsdp", gather="repeat", **options)
    program = pipe.plan.training
    found = {}
    for n, slot in enumerate(program.slots):
        for op in slot.ops:
            seconds = 5e9 if op.gathers >= 0 else 1e9
            found[Scope(op.label, f"ticks0_{program.num_ticks}", f"slot{n}")] = Cycles(seconds)
    costs = compiled.costs_of(found, pipe.plan, MACHINE, 0.0)
    assert costs.f == (2.0, 2.0, 1.0, 1.0)
    assert costs.b == (1.0,) * 4


@pytest.mark.usefixtures("on_paper")
def test_types_will_do() -> None:
    stages = nnx.eval_shape(lambda: models.build(Block, 2))
    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=2), loss_fn=models.squares, remat=None)
    rows = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    assert isinstance(pipe.calibrate(rows, rows, topology="v5p:2x1x1").costs, Costs)


@pytest.mark.usefixtures("on_paper")
def test_a_slice_that_is_too_small() -> None:
    with pytest.raises(ValueError) as caught:
        make(mesh=make_mesh(stage=2, data=2)).calibrate(*data(), topology="v5p:2x1x1")
    assert str(caught.value) == (
        "topology='v5p:2x1x1': the slice has 2 devices, and this pipeline's mesh 4 (data 2 x stage "
        "2); give a topology of 4 devices or more, or calibrate pipe.replace(mesh=make_mesh(...)) "
        "of fewer"
    )


@pytest.mark.usefixtures("on_paper")
def test_a_step_without_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = program(main=[fusion("jit(step)/add", 1)])
    monkeypatch.setattr(compiled, "compile_step", lambda *_: text)
    with pytest.raises(CalibrationError) as caught:
        make().calibrate(*data(), topology="v5p:2x1x1")
    assert str(caught.value) == (
        "the compiled step has none of the kernel's name scopes (such as "
        "'ticks0_38/slot1/B0_last'), or nothing in them takes time; compile without XLA flags that "
        "drop op_name, and stages that compute something"
    )


def test_a_chip_that_is_not_in_the_table() -> None:
    for topology, hint in ("v5q:2x2x1", "did you mean 'v5p'? "), ("v5p", ""), (8, ""):
        with pytest.raises(ValueError) as caught:
            compiled.find_slice(topology)
        assert str(caught.value) == (
            f"topology={topology!r}: must be a TPU and the shape of a slice, such as 'v5p:4x4x4' "
            f"or 'v5e:2x4'; {hint}known: v4, v5e, v5p, v6e, tpu7x"
        )


def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError) as caught:
        compiled.find_slice("v5p:4x4x4")
    assert str(caught.value) == (
        "topology='v5p:4x4x4': to compile for a TPU that is not there takes its compiler, libtpu; "
        "pip install 'shardpipe[tpu]', into an environment of its own, for beside jax it looks for "
        "a TPU at every import unless JAX_PLATFORMS=cpu is set"
    )


def test_where_another_process_has_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(**_: str) -> None:
        raise RuntimeError("Internal error when accessing libtpu multi-process lockfile.")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(topologies, "get_topology_desc", locked)
    with pytest.raises(RuntimeError) as caught:
        compiled.find_slice("v5p:4x4x4")
    assert str(caught.value) == (
        "topology='v5p:4x4x4': another process of this machine has the TPU compiler loaded, and "
        "libtpu allows one; wait until it has ended, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 where no "
        "TPU is to be shared: compiling needs none"
    )


@pytest.mark.usefixtures("on_paper")
def test_a_file_that_says_too_little(tmp_path: Any) -> None:
    path = tmp_path / "costs.json"
    make().calibrate(*data(), topology="v5p:2x1x1").to_json(path)
    record = json.loads(path.read_text())
    del record["hardware"]["clock"]
    path.write_text(json.dumps(record))
    with pytest.raises(ScheduleError, match="lacks what a calibration says beside its costs"):
        Calibration.from_json(path)


# --- by the compiler itself ---


class Wide(nnx.Module):
    """A residual product that fills a TPU's matrix units."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros((2048, 2048), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.w[...])


@pytest.mark.slow
def test_the_compiler_itself() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler comes with libtpu")
    stages = nnx.eval_shape(lambda: [Wide() for _ in range(2)])

    def loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.mean((outputs - targets).astype(jnp.float32) ** 2)

    pipe = Pipeline(stages, 4, mesh=make_mesh(stage=2), loss_fn=loss, remat=None)
    rows = jax.ShapeDtypeStruct((4 * 2048, 2048), jnp.bfloat16)
    cal = pipe.calibrate(rows, rows, topology="v5e:2x2", split=False)
    product = 2 * 2048**3 / CHIPS["v5e"].flops  # seconds at the peak
    f, b = np.array(cal.costs.f), np.array(cal.costs.b)
    assert (product < f).all()
    assert (f < 3 * product).all()  # and what stands around it
    assert product < b[0] < b[1]  # stage 0 has no gradient for its input
    assert 2 * product < b[1] < 6 * product
    assert cal.hardware["waits"] == 0
    with pytest.raises(ValueError, match="does not know this slice"):
        pipe.calibrate(rows, rows, topology="v5e:3x7")
