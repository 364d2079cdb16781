"""`make_optimizer(offload=True)`: moments in host memory, updates that are bit for bit the same.

Letters: S ranks, K stages, M microbatches, D data shards.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, optimizer
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.step import Step
from tests.support import models

pytestmark = pytest.mark.usefixtures("lenient")
X, T = jax.random.normal(jax.random.key(0), (2, 8, 6))
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def pipeline(S: int = 2, *, seed: int = 0, **options: Any) -> Pipeline:
    stages = [nnx.Linear(6, 6, rngs=nnx.Rngs(seed + k)) for k in range(4)]
    mesh = options.pop("mesh", None) or make_mesh(stage=S)
    head = nnx.Linear(6, 6, rngs=nnx.Rngs(seed + 9))
    return Pipeline(stages, 4, mesh=mesh, head=head, loss_fn=models.squares, **options)


def kinds(tree: Any) -> dict[str, str]:
    """The memory of every array of a state, by its path."""
    flat = nnx.to_flat_state(tree)
    return {".".join(map(str, path)): v.get_raw_value().sharding.memory_kind for path, v in flat}


def assert_equal(found: Any, wanted: Any) -> None:
    """Bit for bit."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def trained(steps: int, compiled: bool, offload: bool, **options: Any) -> tuple[Any, Any]:
    """A pipeline and its optimizer after some steps."""
    pipe = pipeline(**options)
    opt = make_optimizer(pipe, TX, offload=offload)

    def step(pipe: Any, opt: Any) -> None:
        opt.update(pipe, pipe.value_and_grad(X, T)[1])

    run = nnx.jit(step) if compiled else step
    for _ in range(steps):
        run(pipe, opt)
    return pipe, opt


def assert_hosted(opt: Any) -> None:
    """Moments lie in host memory, counts do not."""
    found = kinds(nnx.state(opt))
    hosted = {name for name, kind in found.items() if kind == "pinned_host"}
    assert hosted == {name for name in found if "chunks" in name or "ends" in name}
    assert any("mu" in name for name in hosted)
    assert set(found) - hosted


@pytest.mark.few
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", ["plain", "zero1", "fsdp"])
def test_updates_are_equal_bit_by_bit(case, compiled):
    def options() -> dict[str, Any]:
        if case == "plain":
            return {}
        return {"mesh": make_mesh(stage=2, data=2), "data_parallel": case}

    (pipe, opt), (other, plain) = (trained(2, compiled, way, **options()) for way in (True, False))
    assert_hosted(opt)
    assert set(kinds(nnx.state(pipe)).values()) == {"device"}
    assert_equal(nnx.state(pipe, nnx.Param), nnx.state(other, nnx.Param))
    assert_equal(nnx.state(opt), nnx.state(plain))


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True])
def test_under_a_mesh_in_force(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(kind,), devices=jax.devices()[:2])
    found = []
    for offload in (True, False):
        with jax.set_mesh(mesh):
            pipe, opt = trained(2, True, offload, mesh=mesh)
            if offload:
                assert_hosted(opt)
            found.append((nnx.state(pipe, nnx.Param), nnx.state(opt)))
    assert_equal(*found)


@pytest.mark.few
def test_a_training_step_and_one_that_is_left_out():
    """A step whose loss is not finite keeps the moments, where they lie."""
    found = []
    for offload in (True, False):
        pipe = pipeline()
        step = Step(pipe, make_optimizer(pipe, TX, offload=offload), clip=1.0, ema=0.9)
        step(X, T)
        before = jax.device_get(nnx.state(step.optimizer))
        assert not step(X, T * jnp.nan).finite
        assert_equal(nnx.state(step.optimizer, ...).opt_state, before.opt_state)
        step(X, T)
        if offload:
            assert_hosted(step.optimizer)
        found.append((step.ema, nnx.state(step.optimizer), nnx.state(pipe)))
    assert_equal(*found)


@pytest.mark.few
@pytest.mark.parametrize(("saved", "loaded"), [(True, True), (True, False), (False, True)])
def test_checkpoints_go_between_memories(saved, loaded, tmp_path):
    """State saved out of one memory goes on in the other; arrays stay where they belong."""
    pipe, opt = trained(1, True, saved)
    other = pipeline(seed=50)
    new = make_optimizer(other, TX, offload=loaded)
    before = kinds(nnx.state(new))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, pipe, opt)
        checkpoints.restore(other, new)
    assert kinds(nnx.state(new)) == before
    assert_equal(nnx.state(new), nnx.state(opt))
    for one, own in ((pipe, opt), (other, new)):
        own.update(one, one.value_and_grad(X, T)[1])
    assert_equal(nnx.state(other, nnx.Param), nnx.state(pipe, nnx.Param))


def test_describe_says_where_the_state_lies():
    """Two moments of 4 layers, each of 36 + 6 floats, two layers a rank."""
    types = [nnx.eval_shape(lambda: nnx.Linear(6, 6, rngs=nnx.Rngs(0))) for _ in range(4)]
    pipe = Pipeline(types, 4, mesh=make_mesh(stage=2), loss_fn=models.squares)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    hosted, on_device = 2 * 2 * 42 * 4, []
    for offload in (True, False):
        opt = make_optimizer(pipe, optax.adam(1e-2), offload=offload)
        text = pipe.describe(x, x, optimizer=opt)
        assert (f"in host memory {hosted}: optimizer {hosted}" in text) is offload
        (said,) = re.findall(r"optimizer ([0-9,]+), batch", text)
        on_device.append(int(said.replace(",", "")))
    assert on_device[1] - on_device[0] == hosted
    assert on_device[0] < 16  # two counts


@pytest.mark.slow
def test_a_step_with_its_update_compiles_from_types():
    """State that is given away lends its memory to results of the same memory."""
    types = [nnx.eval_shape(lambda: nnx.Linear(6, 6, rngs=nnx.Rngs(0))) for _ in range(4)]
    pipe = Pipeline(types, 4, mesh=make_mesh(stage=2), loss_fn=models.squares)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    opt = make_optimizer(pipe, optax.adam(1e-2), offload=True)
    lowered = pipe.lower(x, x, optimizer=opt)
    (places, _) = lowered.out_info
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(places) if leaf.sharding}
    assert "pinned_host" in kinds
    assert lowered.compile().memory_analysis().alias_size_in_bytes > 2 * 2 * 42 * 4


@pytest.mark.parametrize("offload", [1, "stash", None])
def test_an_option_that_is_no_bool(offload):
    with pytest.raises(ValueError, match="offload") as caught:
        make_optimizer(pipeline(), TX, offload=offload)
    assert str(caught.value) == (
        f"make_optimizer(offload={offload!r}): must be True (the state of layers lies in host "
        f"memory between updates) or False"
    )


def test_devices_without_host_memory(monkeypatch):
    monkeypatch.setattr(optimizer, "has_host_memory", lambda _: False)
    with pytest.raises(ValueError, match="offload") as caught:
        make_optimizer(pipeline(), TX, offload=True)
    assert str(caught.value) == (
        "make_optimizer(offload=True): the devices of the pipeline (platform 'cpu') have no memory "
        "of the kind 'pinned_host'; leave out offload, and to keep less of the state on each "
        "device shard it over 'data' with data_parallel='zero1'"
    )
