"""The one numerical comparison of the tests: relative to the largest entry of each array.

Processors round differently, and an entry near zero carries the rounding of its large neighbours.
So `tolerance` is a share of the largest entry of the wanted array, never of each entry.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def distance(found: Any, wanted: Any) -> float:
    """Largest difference between two arrays, over the largest absolute entry of `wanted`.

    Entries that are not finite must be equal; where one array has NaN or infinity and the other
    has not, the distance is infinite. A wanted array of zeros is compared absolutely, and a wanted
    scalar is meant for every entry.
    """
    found, wanted = (np.asarray(one) for one in (found, wanted))
    if not wanted.ndim:
        wanted = np.broadcast_to(wanted, found.shape)
    if found.shape != wanted.shape:
        raise AssertionError(f"shape {found.shape}, wanted {wanted.shape}")
    if not wanted.size:
        return 0.0
    kind = np.complex128 if np.iscomplexobj(found) or np.iscomplexobj(wanted) else np.float64
    found, wanted = found.astype(kind), wanted.astype(kind)
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(found)):
        return float("inf")
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    largest = np.abs(wanted[finite]).max()
    return float(np.abs(found[finite] - wanted[finite]).max() / (largest or 1.0))


def assert_close(found: Any, wanted: Any, *, tolerance: float = 1e-5) -> None:
    """Assert that two pytrees have equal arrays, in order, within `tolerance` of the largest entry.

    The containers may differ (an `nnx.State` beside a dictionary), and a list of numbers beside an
    array is an array; shapes may not differ.

    Raises:
      AssertionError: with the path of each array that differs, by how much, and the bound.
    """
    if isinstance(found, list | tuple) != isinstance(wanted, list | tuple):
        found, wanted = (np.asarray(one) for one in (found, wanted))
    leaves = jax.tree_util.tree_leaves_with_path(found)
    pairs = zip(leaves, jax.tree.leaves(wanted), strict=True)
    faults = []
    for (path, one), other in pairs:
        name = jax.tree_util.keystr(path) or "the array"
        try:
            far = distance(one, other)
        except AssertionError as error:
            faults.append(f"{name}: {error}")
            continue
        if not far <= tolerance:
            faults.append(f"{name}: differs by {far:.3g} of its largest entry, at most {tolerance}")
    if faults:
        raise AssertionError("\n".join(faults))
