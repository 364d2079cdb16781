"""Neighbours of a mesh are neighbours on the chips: hops counted on slices of several shapes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from jax.experimental import mesh_utils

from collectives import make_mesh
from collectives.places.layout import _snake, _tour
from collectives.places.torus import Torus, ring_hops, torus_of
from tests.support.chips import V5E, V5P, Chip, hosts, tpu


def links(mesh: Any, axis: str) -> tuple[list[int], list[int]]:
    """Hops between neighbours along an axis, each number once, and from the last to the first."""
    torus = torus_of(list(mesh.devices.flat))
    assert torus is not None
    index = mesh.axis_names.index(axis)
    hops = np.moveaxis(ring_hops(mesh.devices, index, torus), index, 0)
    return sorted(set(hops[:-1].flat)), sorted(set(hops[-1].flat))


# Neighbours on stage, its way back; neighbours on tensor, its way back.
@pytest.mark.parametrize(
    ("kind", "chips", "sizes", "stage", "tensor"),
    [
        (V5E, (2, 4), {"stage": 8}, ([1], [1]), None),
        (V5E, (2, 4), {"stage": 4, "data": 2}, ([1], [1]), None),
        (V5E, (2, 4), {"stage": 4, "tensor": 2}, ([1], [3]), ([1], [1])),
        (V5E, (4, 4), {"stage": 16}, ([1], [1]), None),
        (V5E, (4, 4), {"stage": 8, "data": 2}, ([1], [1]), None),
        (V5E, (4, 4), {"stage": 4, "data": 2, "tensor": 2}, ([1], [3]), ([1], [1])),
        # Pairs of chips side by side in two columns of pairs: one step between columns is of two.
        (V5E, (4, 4), {"stage": 8, "tensor": 2}, ([1, 2], [2]), ([1], [1])),
        # A ring of four chips is 2 x 2, so the next one is two links away.
        (V5E, (4, 4), {"stage": 4, "tensor": 4}, ([2], [2]), ([1], [1])),
        (V5E, (16, 16), {"stage": 16, "data": 16}, ([1], [1]), None),
        (V5P, (4, 4, 4), {"stage": 8, "data": 2, "tensor": 4}, ([1], [1]), ([1], [1])),
        (V5P, (4, 4, 4), {"stage": 64}, ([1], [1]), None),
        (V5P, (4, 4, 4), {"stage": 16, "data": 4}, ([1], [1]), None),
        (V5P, (8, 8, 8), {"stage": 8, "data": 16, "tensor": 4}, ([1], [1]), ([1], [1])),
        (V5P, (2, 2, 2), {"stage": 8}, ([1], [1]), None),
        (V5P, (2, 2, 3), {"stage": 4, "data": 3}, ([1], [1]), None),
    ],
)
def test_hops(kind: str, chips: Any, sizes: Any, stage: Any, tensor: Any) -> None:
    devices = tpu(kind, *chips)
    mesh = make_mesh(devices=devices, **sizes)
    assert set(mesh.devices.flat) == set(devices)
    assert links(mesh, "stage") == stage
    if tensor:
        assert links(mesh, "tensor") == tensor


SHAPES = [
    (V5E, (2, 4)),
    (V5E, (4, 4)),
    (V5E, (8, 8)),
    (V5P, (2, 2, 4)),
    (V5P, (4, 4, 4)),
    (V5P, (2, 2, 3)),
]


@pytest.mark.few
@pytest.mark.parametrize(("kind", "chips"), SHAPES)
def test_never_more_hops_than_the_layout_of_jax(kind: str, chips: tuple[int, ...]) -> None:
    devices = tpu(kind, *chips)
    torus = torus_of(devices)
    assert torus is not None
    better = 0
    powers = [n for n in (1, 2, 4, 8, 16, 32) if len(devices) % n == 0]
    for stage, tensor in itertools.product(powers, powers):
        if len(devices) % (stage * tensor):
            continue
        shape = (len(devices) // (stage * tensor), stage, tensor)
        theirs = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        ours = make_mesh(stage=stage, data=None, tensor=tensor, devices=devices).devices
        hops = [
            [int(ring_hops(grid, axis, torus).sum()) for axis in (2, 1, 0)]
            for grid in (ours, theirs)
        ]
        assert hops[0] <= hops[1]
        better += hops[0] < hops[1]
    assert better


def test_a_snake_takes_single_steps() -> None:
    for lengths in [(5,), (2, 3), (3, 2, 4)]:
        walk = np.array(_snake(lengths))
        assert len({tuple(place) for place in walk}) == len(walk) == math.prod(lengths)
        assert set(np.abs(np.diff(walk, axis=0)).sum(axis=1)) == {1}


@pytest.mark.parametrize("lengths", [(2, 2), (2, 5), (6, 3), (2, 3, 4), (4, 3, 3)])
def test_a_tour_also_comes_back_by_one(lengths: tuple[int, ...]) -> None:
    walk = np.array(_tour(lengths))
    assert len({tuple(place) for place in walk}) == len(walk) == math.prod(lengths)
    assert set(np.abs(walk - np.roll(walk, 1, axis=0)).sum(axis=1)) == {1}


@pytest.mark.parametrize("lengths", [(), (4,), (3, 3), (3, 4), (2, 1)])
def test_no_tour_along_a_line_or_an_odd_number_of_rows(lengths: tuple[int, ...]) -> None:
    assert _tour(lengths) == []


def test_which_lines_are_closed() -> None:
    def closed(kind: str, *chips: int) -> Any:
        torus = torus_of(tpu(kind, *chips))
        return torus and torus.closed

    assert closed(V5P, 4, 4, 8) == (True, True, True, False)
    assert closed(V5P, 2, 4, 4) == (False, False, False, False)
    assert closed(V5E, 16, 16) == (True, True, False, False)
    assert closed(V5E, 8, 16) == (False, True, False, False)
    assert closed("some other TPU", 16, 16) == (False, False, False, False)


class Client:
    """Client of a slice of 128 chips."""

    def devices(self) -> range:
        return range(128)


def test_a_part_of_a_slice_is_not_closed() -> None:
    chips = [Chip(**vars(chip) | {"client": Client()}) for chip in tpu(V5P, 4, 4, 4)]
    assert torus_of(chips) == Torus((4, 4, 4, 1), (False, False, False, False))


def test_two_cores_of_a_chip_have_no_link_between_them() -> None:
    chips = [
        Chip(id=2 * n + core, platform="tpu", coords=(n, 0, 0), core_on_chip=core)
        for n in range(2)
        for core in range(2)
    ]
    mesh = make_mesh(stage=2, tensor=2, devices=chips)
    assert [[d.id for d in row] for row in mesh.devices[0]] == [[0, 1], [2, 3]]
    assert links(mesh, "tensor") == ([0], [0])
    assert links(mesh, "stage") == ([1], [1])


def test_what_fills_no_box_stays_in_the_order_given() -> None:
    chips = tpu(V5E, 2, 4)
    corner = [chip for chip in chips if chip.coords[:2] in {(0, 0), (1, 0), (0, 1)}]
    mesh = make_mesh(stage=3, devices=corner[::-1])
    assert list(mesh.devices.flat) == corner[::-1]


def in_one_process(chips: list[Any]) -> list[Any]:
    return [Chip(**vars(chip) | {"process_index": 0}) for chip in chips]


def test_a_part_that_is_a_box_is_walked_to_and_fro() -> None:
    mesh = make_mesh(stage=4, devices=in_one_process(tpu(V5E, 2, 4)))
    assert [chip.coords[:2] for chip in mesh.devices.flat] == [(0, 0), (0, 1), (1, 1), (1, 0)]


def test_an_odd_square_has_no_closed_tour() -> None:
    mesh = make_mesh(stage=9, devices=in_one_process(tpu(V5P, 3, 3)))
    assert links(mesh, "stage") == ([1], [4])


def test_data_crosses_slices() -> None:
    chips = tpu(V5E, 4, 4) + tpu(V5E, 4, 4, slice_index=1)
    mesh = make_mesh(stage=8, data=4, devices=chips[::-1])
    slices = [{chip.slice_index for chip in row.flat} for row in mesh.devices]
    assert slices == [{0}, {0}, {1}, {1}]
    alone = make_mesh(stage=8, data=2, devices=chips[:16])
    assert (mesh.devices[:2] == alone.devices).all()


def test_a_long_pipeline_crosses_slices_once() -> None:
    chips = tpu(V5E, 4, 4) + tpu(V5E, 4, 4, slice_index=1)
    mesh = make_mesh(stage=8, tensor=4, devices=chips)
    assert [{chip.slice_index for chip in row.flat} for row in mesh.devices[0]] == [
        *[{0}] * 4,
        *[{1}] * 4,
    ]


def test_tensor_never_crosses_slices() -> None:
    chips = tpu(V5E, 2, 2) + tpu(V5E, 2, 2, slice_index=1)
    with pytest.raises(ValueError) as caught:
        make_mesh(stage=1, tensor=8, devices=chips)
    assert str(caught.value) == (
        "data=1 stage=1 on 2 slices of 4/4 devices: slices are joined by slow links, so only data "
        "and stage cross them, each slice with the same part; make data or stage a multiple of 2"
    )


def test_hosts_stay_in_line() -> None:
    mesh = make_mesh(stage=4, data=2, tensor=2, devices=hosts(4, 4, 4, 4)[::-1])
    homes = [[{d.process_index for d in row} for row in table] for table in mesh.devices]
    assert homes == [[{0}, {0}, {1}, {1}], [{2}, {2}, {3}, {3}]]
