"""A checkpoint of a model that runs as equations fits every cut of it (issue 43)."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, split
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.checkpoints.contents import Contents
from tests.splitting import models
from tests.splitting.parity import squares
from tests.support.close import assert_close


def pipeline_of(model, stages: int, *args):
    parts = split(model, stages, *args)
    mesh = make_mesh(stage=2)
    pipe = Pipeline(**parts, num_microbatches=2, loss_fn=squares, mesh=mesh)
    return parts, pipe, make_optimizer(pipe, optax.adam(1e-3))


ARGS = jax.random.normal(jax.random.key(0), (4, 4, 4, 2)), jnp.arange(4)


@pytest.mark.usefixtures("lenient")
def test_names_do_not_depend_on_the_cut() -> None:
    """Names of weights and moments are paths in the model; embed, stages and head share them."""
    found = []
    for stages in (2, 4):
        _, pipe, optimizer = pipeline_of(models.UNet(), stages, *ARGS)
        found.append(set(Contents(pipe, optimizer, None).leaves))
    assert found[0] == found[1]
    assert "model.of_model.downs.1.conv.kernel" in found[0]
    assert "optimizer.opt_state.0.mu.of_model.time.bias" in found[0]


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
def test_a_checkpoint_of_two_stages_goes_into_four(tmp_path: Path) -> None:
    parts, pipe, optimizer = pipeline_of(models.UNet(), 2, *ARGS)
    assert parts.why
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, pipe, optimizer)
    other = models.UNet()
    nnx.update(other, jax.tree.map(jnp.zeros_like, nnx.state(other, nnx.Param)))
    of_four, wide, of_wide = pipeline_of(other, 4, *ARGS)
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.restore(wide, of_wide) == 1
    found = of_four.from_layers(wide.to_layers(nnx.state(wide, nnx.Param)))
    wanted = parts.from_layers(pipe.to_layers(nnx.state(pipe, nnx.Param)))
    assert_close(dict(nnx.to_flat_state(found)), dict(nnx.to_flat_state(wanted)), tolerance=0)
