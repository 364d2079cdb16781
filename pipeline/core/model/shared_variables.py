"""Variables that several stages share.

Stages run on different ranks, so a variable that two stages share would be stored twice. This does
no harm for constants. A shared random stream would give all its stages equal masks, unlike in the
plain model, so each stage gets its own stream. Copies of a shared weight would diverge silently, so
they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from pipeline.base.variables import raw
from pipeline.core.model.stage import Ends, is_stacked

Owners = Mapping[int, str]  # id of a variable to the path at which it was found first


def unshared(stages: Any, embed: Any, head: Any, loss_fn: Any = None) -> tuple[Any, Ends]:
    """Copy modules so that they share no random stream; the originals are unchanged.

    Raises:
      ValueError: a stage shares a weight with another stage, or with embed, head or loss.
    """
    if is_stacked(stages):
        return stages, Ends(embed, head, loss_fn)
    owners: dict[int, str] = {}
    copies: list[Any] = []
    for k, stage in enumerate(stages):
        copies.append(_with_own_streams(stage, owners, k))
        owners |= _owners(stage, f"stages[{k}]", owners)
    _owners(embed, "embed", owners)
    _owners(head, "head", owners)
    _owners(loss_fn, "loss_fn", owners)
    # Embed, head and loss may share variables with each other.
    return copies, _with_own_streams(Ends(embed, head, loss_fn), owners, len(copies))


def _owners(module: Any, name: str, owners: Owners) -> dict[int, str]:
    """Map the ids of a module's variables to paths; refuse weights that an earlier module owns."""
    names = {}
    for path, variable in nnx.iter_graph(module) if isinstance(module, nnx.Module) else ():
        if not isinstance(variable, nnx.Variable):
            continue
        where = ".".join([name, *map(str, path)])
        is_weight = isinstance(variable, nnx.Param) and not _is_abstract(variable)
        if is_weight and id(variable) in owners:
            raise ValueError(
                f"{where} is the same {type(variable).__name__} as {owners[id(variable)]}: each "
                f"would have a value, a gradient and an update of its own, on its own rank; give "
                f"every stage weights of its own (nnx.clone), or tie embed= and head=, which may "
                f"share"
            )
        names[id(variable)] = where
    return names


def _is_abstract(variable: Any) -> bool:
    return isinstance(raw(variable), jax.ShapeDtypeStruct)


def _with_own_streams(module: Any, owners: Owners, number: int) -> Any:
    """Copy the module, with a new key for each random stream that an earlier module has."""
    graph = list(nnx.iter_graph(module)) if isinstance(module, nnx.Module) else []
    shared = {
        path
        for path, variable in graph
        if isinstance(variable, nnx.RngKey) and id(variable) in owners
    }
    if not shared or any(_is_abstract(v) for _, v in graph if isinstance(v, nnx.RngKey)):
        return module
    graphdef, state = nnx.split(module)
    flat = dict(nnx.to_flat_state(state))
    for path in shared:
        flat[path] = flat[path].replace(jax.random.fold_in(flat[path].get_value(), number))
    return nnx.merge(graphdef, nnx.from_flat_state(flat), copy=True)
