"""A checkpoint fits every pipeline of the layers that it holds, and the model without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.checkpoints import Checkpoints
from tests.support import split_axes
from tests.support.close import assert_close
from tests.support.grids import effort
from tests.support.stage_meshes import meshes_of
from tests.training import runs
from tests.training.runs import assert_same_parameters, optimizer_of, pipeline_of, plain_of, train

Make = Callable[[int], Any]  # a seed, to a model


def on_meshes_of_ranks(seed: int) -> Pipeline:
    meshes: Any = meshes_of({"data": 2}, {"data": 2})
    options: Any = {"engine": "programs", "mesh": None, "stage_meshes": meshes}
    return pipeline_of([9, 7], 2, seed=seed, **options)


FIRST: dict[str, Make] = {
    "16 layers": lambda seed: pipeline_of([2] * 8, 4, seed=seed),
    "30 layers": lambda seed: pipeline_of([8, 8, 7, 7], 4, seed=seed),
    "tied": lambda seed: pipeline_of([2] * 8, 4, seed=seed, tied=True),
}
THEN: dict[str, tuple[str, Make]] = {
    "S=2, data=4": ("16 layers", lambda seed: pipeline_of([8, 8], 2, data=4, seed=seed)),
    "S=1": ("16 layers", lambda seed: pipeline_of([16], 1, seed=seed)),
    "zb_v": ("16 layers", lambda s: pipeline_of([1] * 16, 8, M=16, schedule="zb_v", seed=s)),
    "vocabulary": ("16 layers", lambda s: pipeline_of([4] * 4, 4, vocabulary="stage", seed=s)),
    "fsdp": ("16 layers", lambda s: pipeline_of([4] * 4, 4, data=2, data_parallel="fsdp", seed=s)),
    "unlike": ("16 layers", lambda seed: pipeline_of([5, 3, 6, 2], 4, seed=seed)),
    "meshes of ranks": ("16 layers", on_meshes_of_ranks),
    "plain": ("16 layers", lambda seed: plain_of([16], seed=seed)),
    "30 in 3": ("30 layers", lambda seed: pipeline_of([10] * 3, 3, seed=seed)),
    "30 plain": ("30 layers", lambda seed: plain_of([30], seed=seed)),
    "tied, vocabulary": (
        "tied",
        lambda s: pipeline_of([4] * 4, 4, tied=True, vocabulary="stage", seed=s),
    ),
    "tied, plain": ("tied", lambda seed: plain_of([1] * 16, seed=seed, tied=True)),
}
FAST = "S=2, data=4", "tied, vocabulary"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    """A folder with a checkpoint of a model and an optimizer, and both."""
    known: dict[str, tuple[Path, Any, Any]] = {}

    def one(name: str) -> tuple[Path, Any, Any]:
        if name not in known:
            model = FIRST[name](0)
            optimizer = optimizer_of(model)
            if name == "16 layers":  # for the others moments are zeros here
                train(model, optimizer, 0, 2)
            folder = tmp_path_factory.mktemp("run")
            with Checkpoints(folder) as checkpoints:
                checkpoints.save(2, model, optimizer)
            known[name] = folder, model, optimizer
        return known[name]

    return one


@pytest.mark.few
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in THEN]
)
def test_parameters_are_the_same_to_the_bit(name: str, saved: Any) -> None:
    first, make = THEN[name]
    folder, model, of_model = saved(first)
    other = make(1)
    optimizer = optimizer_of(other)
    with pytest.raises(AssertionError):
        assert_same_parameters(model, other)
    assert Checkpoints(folder).restore(other, optimizer) == 2
    assert_same_parameters(model, other)
    assert int(optimizer.step.get_value()) == int(of_model.step.get_value())
    for one, two in zip(runs.moments(model, of_model), runs.moments(other, optimizer), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=effort(n, (), ("S=2, data=4", "zb_v"))) for n in THEN]
)
def test_losses_go_on_as_if_the_run_had_stayed(name: str, tmp_path: Path) -> None:
    first, make = THEN[name]
    model = FIRST[first](0)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, model, optimizer)
        other = make(1)
        of_other = optimizer_of(other)
        checkpoints.restore(other, of_other)
    stayed, went = train(model, optimizer, 2, 20), train(other, of_other, 2, 20)
    assert_close(went, stayed)


@pytest.mark.slow
def test_a_checkpoint_of_the_plain_model_restores_in_a_pipeline(tmp_path: Path) -> None:
    plain = plain_of([4])
    optimizer = optimizer_of(plain)
    stayed = train(plain, optimizer, 0, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, plain, optimizer)
        pipe = pipeline_of([1] * 4, 2, seed=1)
        of_pipe = optimizer_of(pipe)
        checkpoints.restore(pipe, of_pipe)
        assert_same_parameters(plain, pipe)
        stayed, went = train(plain, optimizer, 2, 2), train(pipe, of_pipe, 2, 2)
        assert_close(went, stayed)
        checkpoints.save(4, pipe, of_pipe)
        parts = plain_of([2, 2], seed=3)
        as_parts = {"stages": list(parts.stages), "embed": parts.embed, "head": parts.head}
        assert checkpoints.restore(as_parts, ignore=("optimizer",)) == 4
    assert_same_parameters(pipe, parts)


def test_a_tensor_axis_makes_no_difference(tmp_path: Path) -> None:
    one, two = runs.cut_over_tensor(4, 1, seed=0), runs.cut_over_tensor(2, 2, seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, one)
        checkpoints.restore(two)
    assert "tensor" in str(jax.tree.leaves(nnx.state(two, nnx.Param))[0].sharding.spec)
    own, other = (
        jax.device_get(pipe.to_layers(nnx.as_pure(nnx.state(pipe, nnx.Param))))
        for pipe in (one, two)
    )
    jax.tree.map(np.testing.assert_array_equal, own, other)


@pytest.mark.slow
def test_losses_go_on_over_a_tensor_axis(tmp_path: Path) -> None:
    x, t = jax.random.normal(jax.random.key(0), (2, 16, runs.WIDTH))
    one, two = runs.cut_over_tensor(4, 1, seed=0), runs.cut_over_tensor(2, 2, seed=1)
    optimizers = [make_optimizer(pipe, optax.adamw(1e-3)) for pipe in (one, two)]

    def losses(pipe: Any, optimizer: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            loss, grads = pipe.value_and_grad(x, t)
            optimizer.update(pipe, grads)
            found.append(float(loss))
        return found

    with jax.numpy_dtype_promotion("standard"), Checkpoints(tmp_path) as checkpoints:
        losses(one, optimizers[0], 2)
        checkpoints.save(2, one, optimizers[0])
        checkpoints.restore(two, optimizers[1])
        stayed, went = losses(one, optimizers[0], 20), losses(two, optimizers[1], 20)
    assert_close(went, stayed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"expert": 2, "data": 2}, {"expert": 4}),
        ({"expert": 4}, {"data": 2}),
        ({"context": 2, "data": 2}, {"context": 4}),
    ],
    ids=str,
)
def test_another_size_of_a_row_or_position_axis(
    first: dict[str, int], then: dict[str, int], tmp_path: Path, standard_promotion: None
) -> None:
    """Experts' weights and moments are stored whole, and laid over the axis that there is."""
    kind = split_axes.Attention if "context" in first else split_axes.Experts

    def make(axes: dict[str, int], seed: int) -> tuple[Pipeline, Any]:
        spec = split_axes.spec_of(kind, data=True) if {*axes} - {"data"} else P("data")
        stages = [kind(nnx.Rngs(seed + k)) for k in range(2)]
        options: dict[str, Any] = {"mesh": make_mesh(stage=2, **axes), "batch": spec}
        pipe = Pipeline(stages, 2, loss_fn=split_axes.squares, data_parallel="zero1", **options)
        return pipe, make_optimizer(pipe, optax.adam(1e-2))

    batch = split_axes.batch()
    pipe, optimizer = make(first, 0)
    optimizer.update(pipe, pipe.value_and_grad(*batch)[1])
    other, of_other = make(then, 7)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, pipe, optimizer)
        assert checkpoints.restore(other, of_other) == 1
    losses = []
    for one, of_one in ((pipe, optimizer), (other, of_other)):
        for _ in range(2):
            loss, grads = one.value_and_grad(*batch)
            of_one.update(one, grads)
            losses.append(loss)
    assert_close(losses[2:], losses[:2])
    assert_close(other.to_layers(nnx.state(other)), pipe.to_layers(nnx.state(pipe)))
