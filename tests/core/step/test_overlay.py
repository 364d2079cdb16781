"""Lists of different leaves in shared cells: nothing overlaps, nothing is larger than needed."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.model.overlay import Cell, Leaf, Spot, View, overlay, unnamed

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
leaves = st.builds(Leaf, st.sampled_from("ab"), st.sampled_from("uvwxyz").map(tuple), shapes)
lists = st.lists(
    st.lists(leaves, max_size=6, unique_by=lambda leaf: leaf.name), min_size=1, max_size=4
)


@pytest.mark.slow
@given(lists)
def test_the_cells_of_a_group_are_as_large_as_its_longest_list(given):
    cells, _ = overlay(given)
    for group in "ab":
        sizes = [sum(math.prod(x.shape) for x in own if x.group == group) for own in given]
        stored = sum(math.prod(cell.shape) for cell in cells if cell.group == group)
        assert stored == max(sizes)


@pytest.mark.slow
@settings(max_examples=30)
@given(lists)
def test_what_is_filled_in_is_read_again(given):
    cells, spots = overlay(given)
    for own, found in zip(given, spots, strict=True):
        values = [np.full(leaf.shape, 1.0 + n, np.float32) for n, leaf in enumerate(own)]
        view = View(jax.tree.structure(values), found)
        empty = [np.zeros(cell.shape, np.float32) for cell in cells]
        filled = view.fill(empty.copy, values)
        for a, b in zip(view.tree(filled), values, strict=True):
            np.testing.assert_array_equal(a, b)
        for leaf, spot in zip(own, found, strict=True):
            assert cells[spot.cell].group == leaf.group
        # The padding is untouched, so its gradient is zero.
        assert sum(np.count_nonzero(x) for x in filled) == sum(x.size for x in values)


@pytest.mark.slow
@given(lists)
def test_a_column_has_one_name(given):
    cells, _ = overlay(given)
    names = [cell.name for cell in cells if cell.name is not None]
    assert len(names) == len(set(names))


def leaf(name, *shape):
    return Leaf("a", (name,), shape)


def test_lists_that_are_prefixes_become_columns():
    long = [leaf("x", 2, 3), leaf("y", 4), leaf("z", 5)]
    cells, spots = overlay([long[:2], long, long[:1]])
    assert cells == [Cell("a", ("x",), (2, 3)), Cell("a", ("y",), (4,)), Cell("a", ("z",), (5,))]
    whole = [Spot(n, None, own.shape) for n, own in enumerate(long)]
    assert spots == [tuple(whole[:2]), tuple(whole), tuple(whole[:1])]


def test_layers_stacked_in_one_leaf_are_rows_of_a_column():
    cells, spots = overlay([[leaf("w", 7, 3, 3)], [leaf("w", 8, 3, 3)]])
    assert cells == [Cell("a", ("w",), (8, 3, 3))]
    assert spots == [(Spot(0, (0, 7), (7, 3, 3)),), (Spot(0, None, (8, 3, 3)),)]


def test_what_no_rank_can_afford_is_flat():
    cells, spots = overlay([[leaf("x", 2, 3), leaf("y", 4)], [leaf("z", 3, 3)]])
    assert cells == [Cell("a", None, (10,))]
    assert spots == [(Spot(0, (0, 6), (2, 3)), Spot(0, (6, 10), (4,))), (Spot(0, (0, 9), (3, 3)),)]


def test_a_name_that_begins_another_is_no_column_beside_it():
    """A module cannot have both a variable `w` and a module `w` that holds `kernel`."""
    a, b = Leaf("a", ("w",), (2, 2)), Leaf("b", ("w", "kernel"), (3, 3))
    cells, _ = overlay([[a], [b]])
    assert cells == [Cell("a", ("w",), (2, 2)), Cell("b", None, (9,))]


def test_unnamed_leaves_of_one_type_share_in_their_order():
    types = [jax.ShapeDtypeStruct(s, np.float32) for s in ((2,), (3,), (2,))]
    first, _, third = unnamed(types)
    assert (first.group, first.shape) == (third.group, third.shape)
    assert first.group == (np.float32, None)
    assert first.name != third.name
    assert unnamed(types[::-1])[0] == first
