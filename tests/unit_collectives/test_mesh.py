"""Meshes: layout, choice of devices, and every refusal by its full message."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

import collectives
from collectives import mesh as mesh_module


def ids(mesh: Mesh) -> list[list[int]]:
    return [[device.id for device in row] for row in mesh.devices]


def test_stage_is_the_fastest_axis_and_the_axes_are_auto() -> None:
    mesh = collectives.make_mesh(stage=4, data=2)
    assert mesh.axis_names == (collectives.DATA, collectives.STAGE) == ("data", "stage")
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert ids(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_takes_the_first_devices_it_needs() -> None:
    assert ids(collectives.make_mesh(stage=2)) == [[0, 1]]
    chosen = jax.devices()[::-2]
    assert ids(collectives.make_mesh(stage=1, data=3, devices=chosen)) == [[7], [5], [3]]


def test_check_mesh_returns_the_mesh() -> None:
    mesh = collectives.make_mesh(stage=2)
    assert collectives.check_mesh(mesh) is mesh


class FakeTpu:
    """Stands in for a device of a TPU slice."""

    platform = "tpu"


def test_a_whole_tpu_slice_is_laid_out_along_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def create(shape: Any, devices: Any, **options: Any) -> np.ndarray:
        calls.append((shape, devices, options))
        return np.array(devices, dtype=object)[::-1].reshape(shape)

    monkeypatch.setattr(mesh_utils, "create_device_mesh", create)
    devices: Any = [FakeTpu() for _ in range(8)]
    grid = mesh_module._arrange(devices, (2, 4), whole=True)
    assert calls == [((2, 4), devices, {"allow_split_physical_axes": True})]
    assert grid[0, 0] is devices[-1]
    # Four of eight need not form a box of the torus.
    part = mesh_module._arrange(devices[:4], (1, 4), whole=False)
    assert len(calls) == 1
    assert list(part[0]) == devices[:4]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"stage": 8, "data": 2},
            (
                "data=2 stage=8 needs 16 devices, but there are 8; these fill them: "
                "data=1 stage=8, data=2 stage=4, data=4 stage=2, data=8 stage=1"
            ),
        ),
        (
            {"stage": 1, "devices": []},
            "data=1 stage=1 needs 1 devices, but there are 0; these fill them: none",
        ),
        ({"stage": 0}, "stage=0: must be an integer >= 1"),
        ({"stage": 2, "data": -1}, "data=-1: must be an integer >= 1"),
        ({"stage": 2.0}, "stage=2.0: must be an integer >= 1"),
        ({"stage": True}, "stage=True: must be an integer >= 1"),
        ({"stage": np.int8(0)}, f"stage={np.int8(0)!r}: must be an integer >= 1"),
        ({"stage": np.True_}, f"stage={np.True_!r}: must be an integer >= 1"),
        ({"stage": 2, "data": np.float64(2)}, f"data={np.float64(2)!r}: must be an integer >= 1"),
    ],
)
def test_bad_sizes(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        collectives.make_mesh(**sizes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "sizes", [{"stage": 3}, {"stage": 1, "data": 2}, {"stage": 2, "tensor": 4}]
)
def test_one_cpu_device_is_told_how_it_becomes_several(sizes: dict[str, Any]) -> None:
    """Issue 38: the message named no way to have virtual devices."""
    with pytest.raises(ValueError, match="but there are 1; ") as caught:
        collectives.make_mesh(devices=jax.devices()[:1], **sizes)
    assert str(caught.value).endswith(
        "; the CPU is one device: to have 8 virtual ones, set the environment variable "
        "XLA_FLAGS=--xla_force_host_platform_device_count=8, or call "
        'jax.config.update("jax_num_cpu_devices", 8), before jax is first used'
    )
    with pytest.raises(ValueError) as caught:
        collectives.make_mesh(stage=3, devices=jax.devices()[:2])
    assert "XLA_FLAGS" not in str(caught.value)


@pytest.mark.parametrize("number", [np.int32, np.array, jnp.array])
def test_sizes_may_be_integers_of_any_kind(number: Any) -> None:
    mesh = collectives.make_mesh(stage=number(2), data=None, tensor=number(2))
    assert mesh == collectives.make_mesh(stage=2, data=None, tensor=2)
    assert {type(size) for size in mesh.shape.values()} == {int}


def test_a_mesh_without_a_stage_axis() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    with pytest.raises(ValueError) as caught:
        collectives.check_mesh(mesh)
    assert str(caught.value) == (
        "mesh has the axes ('data', 'model'), but a pipeline runs along an axis 'stage': rename "
        "one of them, or build the mesh with collectives.make_mesh(stage=..., data=...)"
    )


def test_something_that_is_no_mesh() -> None:
    with pytest.raises(TypeError) as caught:
        collectives.check_mesh((2, 4))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "mesh=(2, 4): must be a jax.sharding.Mesh; collectives.make_mesh(stage=...) builds one"
    )
