"""The Llama-family decoder through `Pipeline`, on meshes of data, stage and tensor."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.layers import attend_slice, rotary, rotate
from tests.examples.llama_cases import FAMILIES, MICROBATCHES, OPTIONS, check, data
from tests.support import models
from tests.support.grids import covering

MESHES = ("2x2x2", "1x4x2", "2x4x1", "4x2x1", "1x2x2")
ASKED = [name for name in OPTIONS if name != "replicated"]
GRID = list(itertools.product(MESHES, FAMILIES, ASKED))
FAST = [
    ("2x4x1", "eager_1f1b", "words, tied, fsdp"),
    ("1x2x2", "1f1b", "words, sequence"),
]
SLOW = [
    ("1x4x2", "zb_v", "plain"),
    ("2x2x2", "zb_v", "sequence, gathered"),
    ("2x2x2", "1f1b", "sequence, tied, zero1"),
    *covering(GRID, FAST),
]
LARGE = list(itertools.product(("2x2x4", "2x4x2"), FAMILIES, OPTIONS))
LARGE_SLOW = [
    ("2x4x2", "interleaved_1f1b", "sequence, fsdp"),
    ("2x2x4", "1f1b", "words, tied, fsdp"),
]


def cases() -> list[Any]:
    def marks(case: tuple[str, ...]) -> list[pytest.MarkDecorator]:
        if case in FAST:
            return []
        of_ci = case == SLOW[0] or (case in SLOW[:8] and case[0] == "2x2x2")
        return [pytest.mark.slow] if of_ci else [pytest.mark.slow, pytest.mark.exhaustive]

    return [pytest.param(*case, marks=marks(case)) for case in GRID]


def large_cases() -> list[Any]:
    """Every two values of different factors meet; most of them where there is time."""

    def marks(case: tuple[str, ...]) -> list[pytest.MarkDecorator]:
        rare = [] if case == LARGE_SLOW[0] else [pytest.mark.exhaustive]
        return [pytest.mark.slow, *rare]

    chosen = [*LARGE_SLOW, *covering(LARGE, LARGE_SLOW)]
    return [pytest.param(*case, marks=marks(case)) for case in chosen]


@pytest.mark.slow
def test_fewer_heads_of_keys_than_tensor_ranks() -> None:
    pipe = check("1x2x4", "1f1b", "replicated")
    weight = pipe.chunks[0].blocks[0].attention.qkv.keys_values.get_value()
    assert weight.sharding.spec == P("stage")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "family", "options"), cases())
def test_parity(mesh: str, family: str, options: str) -> None:
    check(mesh, family, options)


def on_sixteen(*case: str) -> subprocess.CompletedProcess[str]:
    """A case in a process of its own: the other tests count on eight devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=16"
    return subprocess.run(
        [sys.executable, "-m", "tests.examples.llama_cases", *case],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("mesh", "family", "options"), large_cases())
def test_parity_on_sixteen_devices(mesh: str, family: str, options: str) -> None:
    done = on_sixteen(mesh, family, options)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_sixteen_devices_are_not_more() -> None:
    """And a case that fails is seen to."""
    done = on_sixteen("2x4x4", "1f1b", "plain")
    assert done.returncode != 0
    wanted = "data=2 stage=4 tensor=4 needs 32 devices, but there are 16"
    assert wanted in done.stderr


# --- an axis left to the compiler ---


@pytest.mark.parametrize(
    ("mesh", "family", "options"),
    [
        ("2x2x2", "1f1b", "tied"),
        pytest.param("1x4x2", "zb_v", "plain", marks=pytest.mark.exhaustive),
        pytest.param("2x2x2", "eager_1f1b", "fsdp", marks=pytest.mark.exhaustive),
        pytest.param("2x2x2", "gpipe", "zero1", marks=pytest.mark.exhaustive),
        pytest.param("1x2x4", "interleaved_1f1b", "tied", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_parity_with_tensor_left_to_the_compiler(mesh: str, family: str, options: str) -> None:
    """The modules call no collective: the compiler divides their products."""
    pipe = check(mesh, family, options, auto_axes=("tensor",), engine="programs")
    blocks = pipe.chunks[0].blocks[0]
    fsdp = "data" if options == "fsdp" else None
    assert blocks.mlp.gate_up.get_value().sharding.spec == P("stage", fsdp, None, "tensor")


@pytest.mark.parametrize("family", ["1f1b", pytest.param("zb_v", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_parity_of_a_decoder_of_flax_alone(family: str) -> None:
    """Blocks of flax's own layers, which know of no mesh; `sharding=` says what is cut."""
    chunks, words = FAMILIES[family], 64
    stages = [Block(nnx.Rngs(k)) for k in range(2 * chunks)]
    embed = nnx.Embed(words, WIDTH, rngs=nnx.Rngs(100))
    head = nnx.Linear(WIDTH, words, use_bias=False, rngs=nnx.Rngs(101))
    tokens, targets = data(16)
    targets = jnp.maximum(targets, 0)

    def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    want = models.reference(stages, tokens, targets, loss, embed=embed, head=head)
    pipe = Pipeline(
        stages,
        MICROBATCHES,
        schedule=family,
        mesh=make_mesh(data=2, stage=2, tensor=2),
        embed=embed,
        head=head,
        loss_fn=loss,
        sharding=by_role,
        auto_axes=("tensor",),
        engine="programs",
    )
    models.assert_matches(pipe, pipe.value_and_grad(tokens, targets), want)
    assert pipe.chunks[0].query.kernel.get_value().sharding.spec == P("stage", None, "tensor")
    assert pipe.chunks[0].down.kernel.get_value().sharding.spec == P("stage", "tensor")


WIDTH, HEADS, KV_HEADS, HIDDEN = 32, 8, 4, 48


def by_role(path: str, _: Any) -> tuple[Any, ...] | None:
    columns, rows = ("query", "key_value", "gate", "up"), ("out", "down")
    parts = path.split(".")
    if parts[-1] != "kernel":
        return None
    return (None, "tensor") if parts[0] in columns else ("tensor",) if parts[0] in rows else None


class Block(nnx.Module):
    """A block of Llama as one writes it without a thought of meshes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        width = WIDTH // HEADS
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.query, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.key_value = linear(WIDTH, 2 * KV_HEADS * width)
        self.gate, self.up = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        h = self.norms[0](x)
        query = self.query(h).reshape(b, t, HEADS, -1)
        key, value = jnp.split(self.key_value(h).reshape(b, t, KV_HEADS, -1), 2, axis=-1)
        turns = rotary(jnp.arange(t)[None], d // HEADS)
        read, _ = attend_slice(rotate(query, *turns), rotate(key, *turns), value, None)
        x = x + self.out(read.reshape(b, t, d))
        h = self.norms[1](x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))
