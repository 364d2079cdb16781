"""bench/cycles.py: cycles of actions, out of programs written here."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest


def load() -> Any:
    """The file alone: the package around it is for processes that have not imported jax."""
    path = Path(__file__).parents[2] / "bench" / "cycles.py"
    spec = importlib.util.spec_from_file_location("cycles_of_bench", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load()
Cycles, Contradiction = bench.Cycles, bench.ContradictionError

IN = "jit(step)/ticks0_9/while/body"


def fusion(name: str, count: int) -> str:
    return (
        f'  %fusion.{count} = f32[] fusion(), kind=kLoop, metadata={{op_name="{name}"}}, '
        f'backend_config={{"estimated_cycles":"{count}"}}'
    )


def loop(what: str, name: str) -> str:
    return (
        f"  %while.{what} = (s32[]) while(%x), condition=%{what}_cond, body=%{what}_body, "
        f'metadata={{op_name="{name}"}}'
    )


def counts(limit: int) -> list[str]:
    return [f"  %constant.1 = s32[] constant({limit})", "  ROOT %lt = pred[] compare(%i, %n)"]


ONCE = ["  ROOT %get-tuple-element.1 = pred[] get-tuple-element(%x), index=0"]
KERNEL = (
    "  %splash_mha_dq_no_residuals.1 = bf16[4,1024,64] custom-call(%q), "
    'custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2,2]{2,1,0}, '
    f'bf16[1,4,1024,64]{{3,2,1,0}}}}, metadata={{op_name="{IN}/slot1/B0/while/body/call"}}'
)
PROGRAM = {
    "block_cond": counts(4),
    "block_body": [
        fusion(f"{IN}/slot0/F0_first/while/body/while/body/dot", 100),
        "  %x.1 = f32[] copy()",
    ],
    "first_cond": ONCE,
    "first_body": [loop("block", f"{IN}/slot0/F0_first/while/body/while"), fusion("no scope", 7)],
    "back_cond": ONCE,
    "back_body": [KERNEL, fusion(f"{IN}/slot1/B0/while/body/add", 20)],
    "head_cond": ONCE,
    "head_body": [fusion(f"{IN}/slot1/head/while/body/dot", 30)],
    "ticks_cond": counts(9),
    "ticks_body": [
        loop("first", f"{IN}/slot0/F0_first/while"),
        loop("back", f"{IN}/slot1/B0/while"),
        loop("head", f"{IN}/slot1/head/while"),
        fusion(f"{IN}/select", 3),
    ],
    "main": [loop("ticks", "jit(step)/ticks0_9/while"), fusion("jit(step)/add", 1000)],
}


def program(**changes: list[str]) -> str:
    texts = [
        ("ENTRY " if name == "main" else "")
        + f"%{name} (x: f32[]) -> f32[] {{\n"
        + "\n".join(lines)
        + "\n}"
        for name, lines in {**PROGRAM, **changes}.items()
    ]
    return "\n\n".join(["HloModule step", *texts])


def test_cycles_are_summed_by_action_and_times_the_trips_within() -> None:
    operations = 3 * 2 * 4 * (2 * 3 / 2 * 512**2) * 64
    assert bench.cycles(program()) == {
        ("slot0", "F0_first"): Cycles(4 * 100 + 7),
        ("slot1", "B0"): Cycles(20, operations / bench.RATE / bench.EFFICIENCY),
        ("slot1", "head"): Cycles(30),
        ("", "ticks"): Cycles(3),
        ("", "step"): Cycles(1000),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_cond": ["  ROOT %lt = pred[] compare(%i, %n)"]},
            "the trips of a loop are not known: block_cond",
        ),
        (
            {"back_body": [re.sub("splash_mha_dq", "of_somebody", KERNEL)]},
            (
                "a kernel that is not counted: %of_somebody_no_residuals.1 = bf16[4,1024,64] "
                'custom-call(%q), custom_call_target="tpu_custom_call", operand_layout_cons'
            ),
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(changes: dict[str, list[str]], message: str) -> None:
    with pytest.raises(Contradiction) as caught:
        bench.cycles(program(**changes))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (
            (Cycles(99e6), Cycles(300e6), 100e6, 0.0),
            "F takes 9.9e+07 cycles, and its products alone 1e+08 at the full rate",
        ),
        (
            (Cycles(200e6), Cycles(399e6), 100e6, 0.0),
            "B takes 3.99e+08 cycles, and has twice the products of F, which takes 2e+08",
        ),
        (
            (Cycles(100e6, 30e6), Cycles(300e6), 100e6, 10e6),
            "the kernels of F take 3e+07 cycles, and those of its layers 1e+07",
        ),
    ],
)
def test_what_no_chip_can_do_is_refused(figures: tuple[Any, ...], message: str) -> None:
    with pytest.raises(Contradiction) as caught:
        bench.see_that_they_agree(*figures)
    assert str(caught.value) == message
    bench.see_that_they_agree(Cycles(90e6, 10e6), Cycles(200e6), 100e6, 10e6)
