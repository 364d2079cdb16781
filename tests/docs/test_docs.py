"""The tables of the docs are what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jax.experimental import mesh_utils

from collectives import make_mesh
from collectives.places.torus import ring_hops, torus_of
from schedules import Costs, build, simulate
from tests.support.chips import V5E, V5P, tpu
from tests.support.sizes import CHUNKS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "schedules.md"
COLUMNS = [
    {"clock": "event"},
    {"clock": "lockstep", "pattern": "single"},
    {"clock": "lockstep"},
    {"clock": "lockstep", "partners": True},
]
UNEVEN = Costs(f=1, i=1.2, w=0.8)


def table() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").partition("\n## What lockstep costs\n")[2]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE)
    return [[name, *map(str.strip, cells.split("|"))] for name, cells in rows]


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0])
def test_what_lockstep_costs(row):
    name, *cells = row
    V = CHUNKS.get(name, 2 if name in ("interleaved_1f1b", "looped_bfs") else 1)
    schedule = build(name, num_ranks=8, num_microbatches=32, num_stages=8 * V)
    found = [simulate(schedule, **options).efficiency for options in COLUMNS]
    found += [
        simulate(schedule, UNEVEN, **options).efficiency
        for options in (COLUMNS[0], COLUMNS[2], COLUMNS[3])
    ]
    assert [f"{value:.3f}".lstrip("0") for value in found] == cells


def test_the_table_is_found():
    assert len(table()) == 11


def hops_table() -> list[list[str]]:
    text = (DOCS.parent / "bench" / "notes" / "meshes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (v\S+ [\dx]+) \|(.*)\|$", text, re.MULTILINE)
    return [[name, *map(str.strip, cells.split("|"))] for name, cells in rows]


@pytest.mark.parametrize("row", hops_table(), ids=lambda row: f"{row[0]}, {row[1]}")
def test_hops_on_a_slice(row):
    slice_name, sizes, *cells = row
    kind, chips = slice_name.split()
    devices = tpu({"v5e": V5E, "v5p": V5P}[kind], *map(int, chips.split("x")))
    data, stage, tensor = map(int, sizes.split(" x "))
    found = []
    for grid in (
        mesh_utils.create_device_mesh(
            (data, stage, tensor), devices, allow_split_physical_axes=True
        ),
        make_mesh(data=data, stage=stage, tensor=tensor, devices=devices).devices,
    ):
        hops = ring_hops(grid, 1, torus_of(devices))
        around = ring_hops(grid, 2, torus_of(devices)).sum(axis=2)
        found += [set(hops[:, :-1].flat), set(hops[:, -1].flat), set(around.flat)]
    assert [", ".join(map(str, sorted(one))) for one in found] == cells


def test_the_hops_are_found():
    assert len(hops_table()) == 9
