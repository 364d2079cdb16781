"""The ranks that run embed and head, and the checks of `vocabulary=`.

With ``vocabulary="ends"`` the first rank runs the embed and the last rank the head. With
``vocabulary="stage"`` every rank has a part of the words of their tables. N is the number of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.base.agreed.vocabulary import CrossEntropy, SplitEmbedding, SplitHead, Table, marked
from pipeline.base.tree import Tree, is_float, shape_text
from pipeline.core.model.stage import Ends
from schedules.clocks.shared import Shared

_NAMES = {"embed": "VocabularyEmbedding", "head": "VocabularyHead"}
_REMEDY = {  # for an end that computes more than the class that ranks can share
    "embed": "let the first stage do the rest",
    "head": "do the rest in its norm= or its features()",
    "loss_fn": "give CrossEntropy() itself, with weights in the targets",
}


@dataclass(frozen=True)
class Tables:
    """The parameters of embed and head that are sharded by words over the ranks.

    Attributes:
      embed, head: the index of each table among the leaves; -1 if the table is not shared.
      embed_words, head_words: N of each table.
      embed_parts, head_parts: whether each rank of ``tensor`` has its own positions.
      paths: the paths of the tables in `Ends`.
    """

    embed: int = -1
    head: int = -1
    embed_words: int = 0
    head_words: int = 0
    embed_parts: bool = False
    head_parts: bool = False
    paths: tuple[Any, ...] = ()

    @property
    def is_used(self) -> bool:
        return max(self.embed, self.head) >= 0

    def __contains__(self, index: int) -> bool:
        return index in (self.embed, self.head)


def find_tables(params: Tree, ends: Ends, shared: Shared) -> Tables:
    """Find the tables of embed and head that all ranks share; other tables are skipped."""
    flat = nnx.to_flat_state(params)
    # A table that embed and head share is listed with the embedding.
    path_of = {id(node): path for path, node in nnx.iter_graph(ends)}
    place_of = {path: n for n, (path, _) in enumerate(flat)}
    places = {part: place_of[path_of[id(getattr(ends, part).table)]] for part in shared}
    paths = tuple(flat[n][0] for n in sorted(set(places.values())))
    about: dict[str, Any] = dict(places)
    for part in shared:
        end = getattr(ends, part)
        about |= {f"{part}_words": end.words, f"{part}_parts": end.sequence_parallel}
    return Tables(**about, paths=paths)


def parts_of(state: Tree) -> list[str]:
    """Map each leaf of the ends' state to its part: "embed", "head" or "loss_fn"."""
    flat = nnx.to_flat_state(state)
    return [str(path[0]) for path, variable in flat for _ in jax.tree.leaves(variable)]


def stages_of_ends(state: Tree, last: int) -> list[int]:
    """List the stage whose rank has each leaf of the ends' state; ``last`` is the last stage."""
    return [0 if part == "embed" else last for part in parts_of(state)]


def choose_shared(mode: Any, embed: Any, head: Any, loss_fn: Any) -> Shared:
    """Choose the ends that all ranks share.

    Raises:
      ValueError: an end cannot be split by vocabulary.
    """
    if mode == "ends":
        return ()
    ends = {"embed": embed, "head": head}
    kinds = {"embed": marked(embed, SplitEmbedding), "head": marked(head, SplitHead)}
    shared = tuple(name for name, kind in kinds.items() if kind is not None)
    if not shared:
        text = " and ".join(f"{name} of type {type(end).__name__}" for name, end in ends.items())
        raise ValueError(
            f"vocabulary='stage' with {text}: ranks can share a "
            f"pipeline.vocabulary.VocabularyEmbedding and a VocabularyHead; give at least one of "
            f"them, or vocabulary='ends'"
        )
    if "head" in shared and loss_fn is not None and not isinstance(loss_fn, CrossEntropy):
        what = f"of type {type(loss_fn).__name__}"
        text = what if isinstance(loss_fn, nnx.Module) else repr(loss_fn)
        raise ValueError(
            f"vocabulary='stage' with loss_fn={text}: no rank has all logits of a row, so "
            f"the loss is one that can be summed over ranks; give "
            f"loss_fn=pipeline.vocabulary.CrossEntropy(), with weights in the targets for what "
            f"does not count, or vocabulary='ends'"
        )
    parts: list[tuple[str, Any, Any]] = [(name, ends[name], kinds[name]) for name in shared]
    if "head" in shared and loss_fn is not None:
        parts.append(("loss_fn", loss_fn, CrossEntropy))
    for name, end, kind in parts:
        if type(end).__call__ is not kind.__call__:
            raise ValueError(
                f"vocabulary='stage': {name} of type {type(end).__name__} has a __call__ of its "
                f"own, and ranks that share the words compute what {kind.__name__} does; "
                f"{_REMEDY[name]}, or use vocabulary='ends'"
            )
    if isinstance(loss_fn, nnx.Module) and any(_shares(loss_fn, ends[name]) for name in shared):
        raise ValueError(
            f"vocabulary='stage': loss_fn of type {type(loss_fn).__name__} uses the table that all "
            f"ranks share, of which none has all rows; give it a table of its own, or "
            f"vocabulary='ends'"
        )
    for name, other in (("embed", head), ("head", embed)):
        if name not in shared and isinstance(ends[name], nnx.Module) and _shares(ends[name], other):
            raise ValueError(
                f"vocabulary='stage': {name} of type {type(ends[name]).__name__} uses the table "
                f"that all ranks share; make it a pipeline.vocabulary.{_NAMES[name]} too, "
                f"or give vocabulary='ends'"
            )
    return shared


def _shares(module: nnx.Module, other: Any) -> bool:
    """Tell whether a module holds the table of another module."""
    tables = (variable for _, variable in nnx.iter_graph(module) if isinstance(variable, Table))
    return any(variable is other.table for variable in tables)


def check_activations(activations: Sequence[Tree]) -> None:
    """Raise ValueError unless all activations are one float array of one type."""
    first, *others = (
        ", ".join(map(shape_text, jax.tree.leaves(activation))) for activation in activations
    )
    (leaf, *more) = jax.tree.leaves(activations[0])
    if more or not is_float(leaf):
        raise ValueError(
            f"vocabulary='stage' with activations of {first}: all ranks embed words and do the "
            f"head of one array of floats; let stages take and return one, or use "
            f"vocabulary='ends'"
        )
    for k, other in enumerate(others):
        if other != first:
            raise ValueError(
                f"vocabulary='stage': stages[0] takes {first}, stages[{k}] returns {other} (per "
                f"microbatch and data shard); with it all activations have one type: change the "
                f"stages, or use vocabulary='ends'"
            )


def check_words(inputs: Tree) -> None:
    """Raise ValueError unless inputs are one array of integers: words for a shared embedding."""
    leaves = jax.tree.leaves(inputs)
    if len(leaves) != 1 or not jnp.issubdtype(leaves[0].dtype, jnp.integer):
        raise ValueError(
            f"inputs have leaves of {', '.join(str(x.dtype) for x in leaves)}: with "
            f"vocabulary='stage' they are one array of integers, the words to embed; pass the rest "
            f"as extras"
        )
