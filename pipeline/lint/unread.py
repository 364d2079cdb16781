"""Inputs that should change a step's result but do not, found by a trace.

Parameters that a part of a model holds and does not read are not trained: their gradients are
zeros. Adapters that were put on a whole model may be such parameters. They act when that model is
called, and a pipeline never calls it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from collectives.compat import live
from collectives.places.sizes import CONTEXT, DATA, EXPERT, TENSOR
from pipeline.base.axes import Axes, axes_in, spec_over
from pipeline.base.warn import warn_once
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.walk import axes_inside

_SHOWN = 4  # paths in a warning
_KNOWN = DATA, EXPERT, CONTEXT, TENSOR
_MEANT = dict.fromkeys(("tp", "mp", "model"), TENSOR) | dict.fromkeys(
    ("sp", "cp", "seq", "sequence", "seq_len"), CONTEXT
)
_MEANT |= {"ep": EXPERT}


def warn_of_parameters_that_nobody_reads(
    rank: Rank, bodies: Sequence[Any], ends_body: Any, warned: set[Any]
) -> None:
    """Warn of parameters that make no difference to outputs and loss.

    Args:
      bodies: [K] the jaxpr of each stage, a function of its weights.
      ends_body: the jaxpr of embed, head and loss, a function of their weights.
      warned: keys of warnings already given; the function adds to it.
    """
    texts = [*_unread_in_stages(rank, bodies), *_unread_in_ends(rank, ends_body)]
    if not texts:
        return
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    warn_once(
        f"parameters are read by no part of the model, so they are not trained: "
        f"{', '.join(texts[:_SHOWN])}{more}; what acts only where a whole model is called "
        f"(adapters put on it before it was cut) must be put on the stages, or else leave it out",
        warned,
        ("unread", *texts),
    )


def warn_of_idle_axes(rank: Rank, bodies: Sequence[Any], axes: Axes, warned: set[Any]) -> None:
    """Warn of mesh axes along which all devices compute the same values.

    Args:
      warned: keys of warnings already given; the function adds to it.
    """
    layout = rank.model.layout
    parts = *layout.chunks, *layout.chunks_rest, layout.ends, layout.ends_rest
    used = {a for part in parts for of in part for entry in of.stored for a in axes_in(entry)}
    used |= set[str]().union(*map(axes_inside, bodies))
    for axis in axes.shared:
        if axes.size([axis]) == 1 or axis in used:
            continue
        rows = axes.rows or (DATA,)
        spec = spec_over(rows, [axis]) if axis == CONTEXT else spec_over((*axes.rows, axis))
        near = difflib.get_close_matches(axis, _KNOWN, n=1, cutoff=0.5)
        name = _MEANT.get(axis, near[0] if near else DATA)
        hint = "" if axis in _KNOWN else f", call the axis {name!r} if it is that"
        text = f"P({', '.join(map(repr, spec))})"
        warn_once(
            f"the mesh axis {axis!r} of size {axes.size([axis])} is in no role: batch= splits "
            f"nothing over it, no weight names it and no forward computation uses it, so its "
            f"devices all do the same work; let it split the batch, Pipeline(..., batch={text})"
            f"{hint}, shard weights over it, or leave it out of the mesh",
            warned,
            ("idle", axis),
        )


def _unread_in_stages(rank: Rank, bodies: Sequence[Any]) -> list[str]:
    """List the paths that stages have and no stage reads."""
    had: dict[str, list[int]] = {}
    read: set[str] = set()
    used: dict[int, list[bool]] = {}  # by jaxpr: stages that are alike have one
    for k, body in enumerate(bodies):
        if id(body) not in used:
            used[id(body)] = _used(body)
        for path, is_read in _paths(StageKind(rank, (k,)).params_tree, used[id(body)]):
            had.setdefault(path, []).append(k)
            read |= {path} if is_read else set()
    return [
        f"stages[{ks[0]}].{path}" + (f" (so in {len(ks)} stages)" if len(ks) > 1 else "")
        for path, ks in had.items()
        if path not in read
    ]


def _unread_in_ends(rank: Rank, body: Any) -> list[str]:
    # Other code reads tables that all ranks share.
    used = [yes or n in rank.model.tables for n, yes in enumerate(_used(body))]
    return [
        path for path, is_read in _paths(jax.tree.structure(rank.weights.ends), used) if not is_read
    ]


def _used(body: Any) -> list[bool]:
    """Mark the inputs of a jaxpr that lead to its results."""
    _, used = live(body, keep_inputs=False)
    return used


def _paths(treedef: Any, used: list[bool]) -> Iterator[tuple[str, bool]]:
    """Yield the path of each variable of a state, and whether any of its leaves is used."""
    for path, variable in nnx.to_flat_state(jax.tree.unflatten(treedef, used)):
        if leaves := jax.tree.leaves(variable):
            yield ".".join(map(str, path)), any(leaves)
