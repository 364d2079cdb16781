"""Axes of a mesh: which it has and in what order, which devices it takes, what is refused."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from collectives import DATA, STAGE, TENSOR, describe_mesh, make_mesh
from collectives.places.sizes import factorizations, fitting
from tests.support.chips import V5E, V5P, hosts, tpu


def ids(mesh: Any) -> Any:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def test_tensor_is_the_nearest_axis_and_further_axes_lie_before_it() -> None:
    mesh = make_mesh(tensor=2, context=2, stage=2, expert=1)
    assert mesh.axis_names == (DATA, STAGE, "context", "expert", TENSOR)
    assert mesh.axis_names == ("data", "stage", "context", "expert", "tensor")
    assert mesh.axis_types == (AxisType.Auto,) * 5
    assert ids(mesh) == [[[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]]


def test_an_axis_exists_if_it_is_named() -> None:
    assert make_mesh(stage=4).axis_names == ("data", "stage")
    assert dict(make_mesh(stage=4, tensor=1).shape) == {"data": 1, "stage": 4, "tensor": 1}


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"stage": 2, "data": None}, (4, 2)),
        ({"stage": None}, (1, 8)),
        ({"stage": 2, "data": 2, "tensor": None}, (2, 2, 2)),
        ({"stage": 2, "data": None, "context": 4}, (1, 2, 4)),
    ],
)
def test_none_takes_what_the_others_leave(sizes: Any, found: tuple[int, ...]) -> None:
    assert tuple(make_mesh(**sizes).shape.values()) == found


def test_each_process_gives_equally_many() -> None:
    mesh = make_mesh(stage=2, tensor=2, devices=hosts(4, 3))
    assert ids(mesh) == [[[0, 1], [4, 5]]]


NEAREST = (
    "data=2 stage=4 tensor=2, data=1 stage=8 tensor=2, data=2 stage=8 tensor=1, "
    "data=2 stage=2 tensor=4, data=4 stage=2 tensor=2, data=2 stage=1 tensor=8 "
    "(the nearest of 15)"
)
FILL_16 = (
    "data=2 stage=4 tensor=2, data=2 stage=2 tensor=4, data=4 stage=2 tensor=2, "
    "data=1 stage=8 tensor=2, data=2 stage=8 tensor=1, data=2 stage=1 tensor=8 "
    "(the nearest of 15)"
)


@pytest.mark.parametrize(
    ("devices", "sizes", "message"),
    [
        (
            hosts(16),
            {"stage": 5, "tensor": 2, "data": 2},
            (
                f"data=2 stage=5 tensor=2 needs 20 devices, but there are 16; these fill them: "
                f"{NEAREST}"
            ),
        ),
        (
            hosts(6),
            {"stage": 4, "data": None},
            (
                "data=None stage=4: the 6 devices cannot be shared equally by 4; these fill them: "
                "data=1 stage=6, data=2 stage=3, data=3 stage=2, data=6 stage=1"
            ),
        ),
        (
            hosts(2),
            {"stage": 4, "data": None},
            (
                "data=None stage=4 needs 4 devices, but there are 2; these fill them: "
                "data=1 stage=2, data=2 stage=1"
            ),
        ),
        (
            hosts(4, 4, 4, 3),
            {"stage": 15},
            (
                "data=1 stage=15 needs 15 devices, the same number from each of 4 processes, but "
                "processes 0-2 have 4 devices each, process 3 has 3 devices; use a multiple of 4 "
                "devices, at most 12, or start processes that hold equal numbers"
            ),
        ),
        (
            hosts(1, 2),
            {"stage": 3},
            (
                "data=1 stage=3 needs 3 devices, the same number from each of 2 processes, but "
                "process 0 has 1 device, process 1 has 2 devices; use a multiple of 2 devices, at "
                "most 2, or start processes that hold equal numbers"
            ),
        ),
        (
            hosts(4, 4, 4, 4),
            {"stage": 3, "tensor": 2, "data": 2},
            (
                f"tensor=2: a group of 2 devices would straddle processes unevenly, since each of "
                f"4 gives 3; make tensor a divisor or a multiple of 3; these fill 16 devices: "
                f"{FILL_16}"
            ),
        ),
        (
            hosts(4, 4, 4),
            {"stage": 3, "tensor": 2, "data": 2},
            (
                "stage=3 tensor=2: a group of 6 devices would straddle processes unevenly, since "
                "each of 3 gives 4; make stage * tensor a divisor or a multiple of 4; these fill "
                "12 devices: data=3 stage=2 tensor=2, data=1 stage=3 tensor=4, data=1 stage=6 "
                "tensor=2, data=6 stage=1 tensor=2, data=3 stage=4 tensor=1, data=3 stage=1 "
                "tensor=4 (the nearest of 10)"
            ),
        ),
    ],
)
def test_sizes_that_do_not_fit(devices: Any, sizes: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_mesh(devices=devices, **sizes)
    assert str(caught.value) == message


MISSING = "stage= is missing: give the number of ranks, or None for what others leave"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"stage": 2, "tensor": "2"}, "tensor='2': must be an integer >= 1"),
        (
            {"stage": 2.5, "data": 0},
            "data=0: must be an integer >= 1; stage=2.5: must be an integer >= 1",
        ),
        (
            {"stage": None, "data": None},
            "data=None and stage=None: only one axis can take what the others leave",
        ),
        (
            {"stage": 2, "tensr": 2},
            (
                "axis 'tensr': looks like 'tensor' misspelt; write tensor, or choose a name that "
                "is not so close"
            ),
        ),
        (
            {"stage": 2, "Data": 2},
            (
                "axis 'Data': looks like 'data' misspelt; write data, or choose a name that is not "
                "so close"
            ),
        ),
        ({"data": 4}, MISSING),
        (
            {"stages": 4},
            (
                "axis 'stages': looks like 'stage' misspelt; write stage, or choose a name that is "
                f"not so close; {MISSING}"
            ),
        ),
        (
            {"Stage": 2, "data": 0},
            (
                "axis 'Stage': looks like 'stage' misspelt; write stage, or choose a name that is "
                f"not so close; {MISSING}; data=0: must be an integer >= 1"
            ),
        ),
        ({"stage": 2, "a b": 2}, "axis 'a b': must be a Python identifier, such as 'context'"),
        (
            {"stage": 2, "lambda": 0},
            (
                "axis 'lambda': must be a Python identifier, such as 'context'; lambda=0: must be "
                "an integer >= 1"
            ),
        ),
    ],
)
def test_bad_axes(sizes: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_mesh(**sizes)
    assert str(caught.value) == message


@given(number=st.integers(1, 200), parts=st.integers(1, 4))
def test_factorizations_are_all_there_once(number: int, parts: int) -> None:
    found = list(factorizations(number, parts))
    assert found == sorted(set(found))
    assert {math.prod(one) for one in found} == {number}
    # For each prime to the power e, the ways to write e as a sum of `parts` numbers.
    count, left = 1, number
    for prime in range(2, number + 1):
        power = 0
        while left % prime == 0:
            left, power = left // prime, power + 1
        count *= math.comb(power + parts - 1, parts - 1)
    assert len(found) == count


def test_what_fits_keeps_the_sizes_that_were_right() -> None:
    text = fitting({"data": 4, "stage": 8, "tensor": 3}, 64)
    assert text.startswith("data=4 stage=8 tensor=2, ")


def test_picture_of_one_host() -> None:
    mesh = make_mesh(stage=2, data=2)
    assert describe_mesh(mesh) == (
        "mesh data 2 x stage 2: 4 devices (cpu), 4 more idle\n"
        "data 0   device\n"
        "stage 0  0\n"
        "stage 1  1\n"
        "data 1   device\n"
        "stage 0  2\n"
        "stage 1  3"
    )


def test_picture_of_hosts() -> None:
    mesh = make_mesh(stage=2, data=2, tensor=2, context=2, devices=hosts(4, 4, 4, 4))
    assert describe_mesh(mesh, tables=2) == (
        "mesh data 2 x stage 2 x context 2 x tensor 2: 16 devices (cpu), "
        "processes 0-3 have 4 devices each\n"
        "data 0, context 0  tensor 0  tensor 1\n"
        "stage 0            0 p0      1 p0\n"
        "stage 1            4 p1      5 p1\n"
        "data 0, context 1  tensor 0  tensor 1\n"
        "stage 0            2 p0      3 p0\n"
        "stage 1            6 p1      7 p1\n"
        "... and 2 more tables\n"
        "stage neighbours on different processes: 8 of 8\n"
        "tensor neighbours on different processes: 0 of 8"
    )


def test_picture_of_a_slice() -> None:
    mesh = make_mesh(stage=4, tensor=2, devices=tpu(V5E, 2, 4))
    assert describe_mesh(mesh) == (
        "mesh data 1 x stage 4 x tensor 2: 8 devices (TPU v5 lite), "
        "processes 0-1 have 4 devices each\n"
        "data 0   tensor 0      tensor 1\n"
        "stage 0  0 p0 (0,0,0)  1 p0 (1,0,0)\n"
        "stage 1  2 p0 (0,1,0)  3 p0 (1,1,0)\n"
        "stage 2  4 p1 (0,2,0)  5 p1 (1,2,0)\n"
        "stage 3  6 p1 (0,3,0)  7 p1 (1,3,0)\n"
        "stage neighbours: 1 hop x 6; from the last back to the first: 3 hops x 2\n"
        "tensor neighbours: 1 hop x 4; from the last back to the first: 1 hop x 4"
    )


def test_picture_of_two_slices_in_few_columns() -> None:
    chips = tpu(V5P, 2, 2) + tpu(V5P, 2, 2, slice_index=1)
    mesh = make_mesh(stage=2, tensor=4, devices=chips)
    assert describe_mesh(mesh, width=50) == (
        "mesh data 1 x stage 2 x tensor 4: 8 devices (TPU v5), processes 0-1 have 4 devices each\n"
        "data 0   tensor 0              ...\n"
        "stage 0  0 s0 p0 (0,0,0)       ...\n"
        "stage 1  100000 s1 p1 (0,0,0)  ...\n"
        "stage neighbours: another slice x 4; from the last back to the first: another slice x 4\n"
        "tensor neighbours: 1 hop x 6; from the last back to the first: 1 hop x 2"
    )


def test_picture_of_a_mesh_made_elsewhere() -> None:
    mesh = jax.make_mesh((2, 4), ("tensor", "stage"), axis_types=(AxisType.Auto,) * 2)
    assert describe_mesh(mesh) == (
        "mesh tensor 2 x stage 4: 8 devices (cpu)\n"
        "         tensor 0  tensor 1\n"
        "stage 0  0         4\n"
        "stage 1  1         5\n"
        "stage 2  2         6\n"
        "stage 3  3         7"
    )
