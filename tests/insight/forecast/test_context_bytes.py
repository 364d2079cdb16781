"""Bytes over `context`: by formula, as predicted from the traced step, and in compiled HLO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.decoders import DecoderConfig, LatentConfig
from pipeline.insight.forecast import traffic
from pipeline.layers import Attention, Context, context_bytes
from pipeline.models.decoders.attention import LatentAttention, Types
from tests.support import models
from tests.support.hlo import Sent

M, R, ROWS, T, D = 2, 2, 4, 16, 16


class Block(nnx.Module):
    """Attention over the axis; four heads that read two."""

    def __init__(self, rngs: nnx.Rngs, *, way):
        options = {"context_axis": "context", "context": way, "head_dim": 8}
        self.attention = Attention(D, 4, 2, rngs, **options)

    def __call__(self, x, segments=None):
        return x + self.attention(x, segments=segments)


class LatentBlock(nnx.Module):
    """Latent attention over the axis: four heads of 8 and 5 numbers out of a latent of 6 and 2."""

    def __init__(self, rngs: nnx.Rngs, *, way):
        latent = LatentConfig(query_rank=None, rank=6, nope=6, rope=2, value=5)
        sizes = {"heads": 4, "kv_heads": 4, "head_dim": 8, "hidden": 8, "latent": latent}
        config = DecoderConfig(vocabulary=8, width=D, layers=1, **sizes)
        context = Context("context", way)
        self.attention = LatentAttention(config, 0, rngs, Types(jnp.float32, context=context))

    def __call__(self, x, segments=None):
        return x + self.attention(x, segments=segments)


@pytest.mark.parametrize(
    ("way", "packed", "kind"),
    [
        ("allgather", True, Block),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("ring", True, Block),
                ("ulysses", True, Block),
                ("allgather", False, Block),
                ("allgather", True, LatentBlock),
                ("ulysses", True, LatentBlock),
                ("ring", True, LatentBlock),
            ]
        ],
    ],
)
def test_bytes_by_formula(way, packed, kind):
    """A rank runs every layer once forward and once backward for each microbatch."""
    pipe = Pipeline(
        models.build(kind, 2, way=way),
        M,
        mesh=make_mesh(stage=2, context=R, devices=jax.devices()[: 2 * R]),
        schedule="gpipe",
        loss_fn=models.squares,
        remat=None,
        batch=P("data", "context"),
    )
    x = jax.ShapeDtypeStruct((ROWS, T, D), jnp.float32)
    extras = {"segments": jax.ShapeDtypeStruct((ROWS, T), jnp.int32)} if packed else None
    found = traffic.predict_traffic(pipe.plan, *pipe._operands(x, x, extras))
    sent = Sent(pipe.lower(x, x, extras=extras).compile().as_text(), pipe.plan.training, pipe.mesh)
    both = context_bytes(
        Context("context", way),
        R,
        rows=ROWS // M,
        length=T,
        heads=4,
        kv_heads=2,
        head_dim=8,
        itemsize=4,
        packed=packed,
        **({"latent": 8, "value_dim": 5} if kind is LatentBlock else {}),
    )
    kinds = {"all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
    for one in (found.sent, sent.bytes):
        over = [v for (axes, kind), v in one.items() if axes == ("context",) and kind in kinds]
        assert sum(over).tolist() == pytest.approx([M * sum(both)] * 2)
    lines = pipe.describe(x, x, extras=extras).splitlines()
    assert any(line.startswith("  over context ") for line in lines)
