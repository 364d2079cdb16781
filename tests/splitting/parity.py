"""A model that was split against the model itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, split
from tests.support.close import assert_close


def cross_entropy(logits, targets):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -chosen.mean()


def squares(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def plain(model, loss_fn, targets, args, kwargs, call):
    """Loss and gradients without a pipeline."""
    call = call or (lambda model, *args, **kwargs: model(*args, **kwargs))

    def loss(model):
        return loss_fn(call(model, *args, **kwargs), targets)

    return nnx.jit(nnx.value_and_grad(loss))(model)


def check_parts(
    model,
    parts,
    loss_fn,
    targets,
    *args,
    ranks=2,
    call=None,
    pipe=None,
    microbatches=2,
    tolerance=1e-5,
    **kwargs,
):
    """Loss, and gradients of all parameters that the model uses; returns the pipeline."""
    loss, grads = plain(model, loss_fn, targets, args, kwargs, call)
    inputs, extras = parts.inputs(*args, **kwargs)
    options = {"num_microbatches": microbatches, "mesh": make_mesh(stage=ranks), **(pipe or {})}
    pipe = Pipeline(**parts, loss_fn=loss_fn, **options)
    found, own = pipe.value_and_grad(inputs, targets, extras=extras)
    assert_close(found, loss)
    assert_same(
        parts.from_layers(pipe.to_layers(own)), grads, unused=parts.unused, tolerance=tolerance
    )
    return pipe


def check(
    model,
    loss_fn,
    targets,
    *args,
    num_stages=2,
    call=None,
    pipe=None,
    ranks=2,
    microbatches=2,
    options=None,
    **kwargs,
):
    """Split a model, and `check_parts`; returns the parts and the pipeline."""
    parts = split(model, num_stages, *args, call=call, **(options or {}), **kwargs)
    of_pipe = {"ranks": ranks, "pipe": pipe, "microbatches": microbatches}
    return parts, check_parts(model, parts, loss_fn, targets, *args, call=call, **of_pipe, **kwargs)


def assert_same(found, wanted, *, unused=(), tolerance=1e-5):
    found, wanted = (dict(nnx.to_flat_state(tree)) for tree in (found, wanted))
    missing = {".".join(map(str, path)) for path in set(wanted) - set(found)}
    assert missing == set(unused)
    assert not set(found) - set(wanted)
    for path, value in found.items():
        scale = max(1.0, 1 / max(float(np.abs(wanted[path][...]).max()), 1e-30))
        assert_close({path: value[...]}, {path: wanted[path][...]}, tolerance=tolerance * scale)
