"""Blocks of splash attention: which are chosen, and that gradients do not depend on them.

Letters: t = positions, c = width of a head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pipeline.layers import attend_slice
from pipeline.models.layers import kernels
from pipeline.models.layers.kernels import TABLE, SplashBlocks, choose_blocks
from tests.support.chips import V5E, V5P
from tests.support.close import assert_close
from tests.support.group import normal

V6E = "TPU v6 lite"


def side(kind: str, t: int, *, c: int = 128, bytes_each: int = 2, window: int | None = None) -> str:
    """Blocks of the forward and of the backward, in words."""
    one = choose_blocks(kind, t, c, bytes_each, window)
    backward = "one kernel" if one.fused else "two kernels"
    return f"{one.q} x {one.kv}, {one.q_backward} x {one.kv_backward} by {backward}"


def test_the_choice_by_length_and_chip():
    large = "2048 x 2048, 2048 x 2048 by one kernel"
    small = "512 x 512, 512 x 512 by two kernels"
    assert side(V6E, 8192) == side(V6E, 32768) == large
    assert side(V6E, 4096) == side(V6E, 6144) == "1024 x 512, 2048 x 512 by two kernels"
    assert side(V6E, 2048) == side(V6E, 8192 + 512) == small
    assert side(V5E, 8192) == side(V5P, 8192) == side("cpu", 8192) == small
    # Twice the bytes, a wider head, or a window that large blocks would not pass over.
    assert side(V6E, 8192, bytes_each=4) == side(V6E, 8192, c=256) == small
    assert side(V6E, 8192, window=1024) == small
    assert side(V6E, 384) == "128 x 128, 128 x 128 by two kernels"


def test_blocks_divide_the_lengths_that_take_them():
    for rows in TABLE.values():
        for least, blocks in rows:
            for size in (blocks.q, blocks.kv, blocks.q_backward, blocks.kv_backward):
                assert least % size == 0
                assert size % min(size, blocks.compute) == 0


FUSED = SplashBlocks(256, 256, 256, 256, compute=128, fused=True)
CASES = {
    "fused": (FUSED, {}),
    "fused, segments": (FUSED, {"segments": True}),
    "fused, soft cap": (FUSED, {"softcap": 5.0}),
    "fused, unequal": (SplashBlocks(128, 256, 256, 128, compute=128, fused=True), {}),
    "two kernels, unequal": (SplashBlocks(256, 128, 512, 128, compute=128), {"segments": True}),
}


NAMES = [pytest.param(name, marks=() if name == "fused" else pytest.mark.slow) for name in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_do_not_depend_on_blocks(name):
    """Interpreted: two blocks each way of 512 positions, four heads that read two."""
    blocks, options = CASES[name]
    t, c = 512, 8
    q, k, v, weight = (normal(1, t, heads, c, seed=s) for s, heads in enumerate((4, 2, 2, 4)))
    given = {"softcap": options.get("softcap")}
    if options.get("segments"):
        given["segments"] = (jnp.arange(t) // 200)[None]

    def by_blocks(q, k, v):
        return jnp.sum(weight * kernels.splash(q, k, v, blocks=blocks, **given))

    def by_formula(q, k, v):
        found = attend_slice(q, k, v, None, implementation="chunked", **given)[0]
        return jnp.sum(weight * found)

    found = jax.jit(jax.value_and_grad(by_blocks, argnums=(0, 1, 2)))(q, k, v)
    wanted = jax.jit(jax.value_and_grad(by_formula, argnums=(0, 1, 2)))(q, k, v)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(one, other, tolerance=1e-4)


def test_a_layer_takes_the_blocks_of_its_chip(monkeypatch):
    """The kind of device of the mesh chooses; a table of one small row stands for the real one."""
    seen = []
    monkeypatch.setattr(kernels, "device_kind", lambda: V6E)
    monkeypatch.setitem(TABLE, V6E, ((256, FUSED),))
    sizes = SplashBlocks.sizes
    monkeypatch.setattr(SplashBlocks, "sizes", lambda self: [seen.append(self), sizes(self)][1])
    q = jax.ShapeDtypeStruct((1, 512, 4, 8), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.bfloat16)
    jax.eval_shape(kernels.splash, q, k, k)
    assert seen == [FUSED]
