"""A table from each weight of a pipeline to tensors of a checkpoint, in layer order.

Biases of the router's choice of experts are not parameters. A layer view contains either parameters
or declared state; here one tree contains both.

A module for multi-token prediction is a layer after all other layers (`Family.mtp`). Published
files repeat the tables of embedding and head in each module.

Letters: K stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from pipeline.layers_view.view import LayerView, LeafPlace, layer_view
from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.layers.experts.state import ExpertState
from pipeline.models.weights.checkpoint import SHOWN, Checkpoint, listed
from pipeline.models.weights.tables.patterns import (
    Config,
    Family,
    Range,
    Read,
    Row,
    TensorPlan,
    plan,
)

Path = tuple[Any, ...]
EMBED, HEAD, TABLE = "embed", "head", "table"
BLOCKS = "blocks"  # the attribute of a stage that lists its blocks


@dataclass(frozen=True)
class Entry:
    """A weight with its place in a checkpoint and in a pipeline.

    Attributes:
      layer: the layer's number, or "embed" or "head".
      plan: the composition of the weight; parts have the names of tensors.
      place: the weight's `LeafPlace`, or its type; None if no pipeline has the weight.
    """

    layer: int | str
    plan: TensorPlan
    place: Any = None

    @property
    def name(self) -> str:
        """The weight's name, such as ``layers.3.mlp.down.weight``."""
        layer = f"layers.{self.layer}" if isinstance(self.layer, int) else self.layer
        return f"{layer}.{self.plan.target}"


def entries_of(tree: Mapping[str, Any], family: Family, config: Config, prefix: str) -> list[Entry]:
    """List all weights of a model in layer order: embed, layers 0, 1, ..., head.

    Raises:
      ValueError: the table has no row for a weight.
    """
    sizes = family.sizes_of(config)

    def entry(layer: int | str, pair: tuple[Row, Any]) -> Entry:
        made, number = plan(pair[0], sizes), layer if isinstance(layer, int) else None
        names = (family.tensor_name(prefix, number, part.name) for part in made.parts)
        parts = tuple(replace(part, name=n) for part, n in zip(made.parts, names, strict=True))
        return Entry(layer, replace(made, parts=parts), pair[1])

    entries = [entry(EMBED, pair) for pair in _match_end(tree, EMBED, family)]
    layer = 0
    for k, stage in enumerate(tree["stages"]):
        for n, leaves in _list_blocks(stage, k):
            where = f"stages[{k}].{BLOCKS}[{n}]"
            pairs = _match_rows((*family.rows, *family.mtp), leaves, where, family)
            entries += [entry(layer, pair) for pair in pairs]
            layer += 1
    return entries + [entry(HEAD, pair) for pair in _match_end(tree, HEAD, family)]


def _match_end(tree: Mapping[str, Any], part: str, family: Family) -> list[tuple[Row, Any]]:
    rows = family.embed if part == EMBED else family.head
    return _match_rows(rows, _dotted(tree[part]), part, family)


def _list_blocks(stage: Mapping[str, Any], k: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the leaves of each block of a stage, by dotted path."""
    others = [name for name in stage if name != BLOCKS]
    if others:
        raise ValueError(
            f"stages[{k}] has {', '.join(map(repr, others))} in addition to {BLOCKS!r}: a stage "
            f"whose weights are read by a table of names is a list of layers called {BLOCKS!r}, "
            f"and nothing else"
        )
    blocks: Mapping[Any, Any] = stage.get(BLOCKS, {})
    return sorted((int(n), _dotted(leaves)) for n, leaves in blocks.items())


def _dotted(tree: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in flatten_mapping(tree).items()}


def _match_rows(
    rows: Sequence[Row], leaves: Mapping[str, Any], where: str, family: Family
) -> list[tuple[Row, Any]]:
    """Return the rows whose weight is in ``leaves``, in the order of the table."""
    known = {row.target for row in rows}
    if unknown := [name for name in leaves if name not in known]:
        raise ValueError(
            f"{where} has {listed(unknown)}, for which the family {family.name!r} has no row; its "
            f"rows are {', '.join(known)}"
        )
    return [(row, leaves[row.target]) for row in rows if row.target in leaves]


def match_entries(tree: Mapping[str, Any], checkpoint: Checkpoint, family: Family) -> list[Entry]:
    """List all weights of a model, with their tensors in a checkpoint, and check all of them.

    Raises:
      ValueError: a weight has no row in the table, or other sizes than its tensors.
    """
    prefix = family.prefix_of(list(checkpoint.tensors))
    entries = entries_of(tree, family, checkpoint.config, prefix)
    entries = with_tied_head(entries, checkpoint, family, prefix)
    check_shapes(entries)
    check_tensors(entries, checkpoint, family, spare_names(entries, checkpoint, family))
    return entries


def check_layers(checkpoint: Checkpoint, family: Family, layers: int) -> None:
    """Check that a checkpoint has its last layer, before a model with all its layers is made."""
    if checkpoint.tensors and not has_layer(checkpoint, family, layers - 1):
        held = next(n for n in range(layers) if not has_layer(checkpoint, family, n))
        raise ValueError(
            f"{checkpoint.folder}: by config.json the model has {layers:,} layers, and the files "
            f"have {held}: correct config.json, or fetch the shards that are missing"
        )


def has_layer(checkpoint: Checkpoint, family: Family, n: int) -> bool:
    prefix = layer_prefix(checkpoint, family, n)
    return any(name.startswith(prefix) for name in checkpoint.tensors)


def layer_prefix(checkpoint: Checkpoint, family: Family, n: int) -> str:
    return family.tensor_name(family.prefix_of(list(checkpoint.tensors)), n, "")


def with_tied_head(
    entries: list[Entry], checkpoint: Checkpoint, family: Family, prefix: str
) -> list[Entry]:
    """Point the entries of a shared table at the tensor that exists, the embedding's or the head's.

    Safetensors keep only one of two names of an array, which may be the head's name.

    Raises:
      ValueError: both tensors exist and differ.
    """
    tables = {entry.layer: entry for entry in entries if entry.plan.target == TABLE}
    rows = [row for row in family.head if row.target == TABLE and len(row.sources) == 1]
    if EMBED not in tables or HEAD in tables or not rows or len(tables[EMBED].plan.parts) != 1:
        return entries
    table, (part,) = tables[EMBED], tables[EMBED].plan.parts
    other = family.tensor_name(prefix, None, rows[0].sources[0].name)
    if other not in checkpoint.tensors:
        return entries
    if part.name in checkpoint.tensors:
        why = "by config.json the head shares the embedding's table"
        remedy = "set tie_word_embeddings to false, or leave out the one that is not meant"
        _check_equal(checkpoint, other, part.name, why, remedy)
        return entries
    plan = replace(table.plan, parts=(replace(part, name=other),))
    return [replace(entry, plan=plan) if entry is table else entry for entry in entries]


def _check_equal(checkpoint: Checkpoint, copy: str, name: str, why: str, remedy: str) -> None:
    """Check that a tensor repeats another, which a model reads in place of both."""
    if not checkpoint.tensors[name].equals(checkpoint.tensors[copy]):
        raise ValueError(
            f"{checkpoint.folder}: {copy} and {name} differ, and {why}, so one of them would not "
            f"be used: {remedy}"
        )


def check_shapes(entries: Sequence[Entry]) -> None:
    """Check the sizes of a model's weights against the table."""
    wrong = [
        f"{entry.name} is {list(entry.place.shape)} in the model, and by its row and the sizes "
        f"of config.json it is {list(entry.plan.shape)}"
        for entry in entries
        if tuple(entry.place.shape) != entry.plan.shape
    ]
    if wrong:
        raise ValueError(_join_faults(wrong))


def check_tensors(
    entries: Sequence[Entry], checkpoint: Checkpoint, family: Family, spare: Collection[str] = ()
) -> None:
    """Check that a checkpoint has the tensors of a model, of the right sizes, and no others.

    Args:
      spare: names of tensors that may exist and need not be read.

    Raises:
      ValueError: a list of the first few faults.
    """
    wrong, used = [], set()
    for entry in entries:
        for part in entry.plan.parts:
            used.add(part.name)
            tensor = checkpoint.tensors.get(part.name)
            if tensor is None:
                wrong.append(f"{part.name} is missing; expected {list(part.shape)}")
                continue
            if tensor.shape != part.shape:
                wrong.append(
                    f"{tensor.file.name}: {part.name} is {list(tensor.shape)}, and by the sizes "
                    f"of config.json it is {list(part.shape)}"
                )
            try:
                tensor.readable()
            except ValueError as error:
                wrong.append(str(error))
    tied = {s.name.removeprefix(".") for row in family.head for s in row.sources}
    # A tied head's table may be in the files too.
    unread = [
        name
        for name in checkpoint.tensors
        if name not in used and not family.ignores(name) and name not in {*tied, *spare}
    ]
    if unread:
        wrong.append(
            f"{listed(unread)}: in the files, and no weight of the model that config.json describes"
        )
    if wrong:
        raise ValueError(f"{checkpoint.folder}: {_join_faults(wrong)}")


def _join_faults(wrong: Sequence[str]) -> str:
    more = len(wrong) - SHOWN
    return "; ".join(wrong[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


BIAS, LOAD = "bias", "load"


@dataclass(frozen=True)
class Constant:
    """A plan (`pipeline.models.weights.tables.patterns.TensorPlan`) of state that no file holds."""

    value: float
    shape: tuple[int, ...]

    def read(self, read: Read, dtype: Any) -> np.ndarray:
        del read
        return np.full(self.shape, self.value, dtype)

    def fill(self, out: np.ndarray, index: Sequence[Range], read: Read) -> None:
        del index, read
        out[...] = self.value


def is_bias(path: Sequence[Any], variable: Any) -> bool:
    """Tell whether a variable is state that a checkpoint holds."""
    return isinstance(variable, ExpertState) and path[-1] == BIAS


def state_view(pipe: Any) -> LayerView | None:
    """The layer view of the state of experts; None if there is none."""
    state = list(nnx.to_flat_state(nnx.state(pipe, ExpertState)))
    return layer_view(pipe, state=ExpertState) if state else None


def with_biases(tree: Mapping[str, Any], view: LayerView | None) -> Mapping[str, Any]:
    """Add the leaves of biases to their layers in a view's tree of parameters."""
    if view is None:
        return tree
    stages = []
    for params, state in zip(tree["stages"], view.tree["stages"], strict=True):
        biases = {path: x for path, x in flatten_mapping(state).items() if path[-1] == BIAS}
        stages.append(
            unflatten_mapping({**flatten_mapping(params, keep_empty_nodes=True), **biases})
        )
    return {**tree, "stages": stages}


def constants(view: LayerView) -> dict[LeafPlace, Constant]:
    """Make plans for state that no file holds.

    The state ``load``, each expert's part of all choices, starts as 1 / (number of experts). All
    other arrays start as zeros.
    """
    return {
        place: Constant(1 / place.shape[0] if path[-1] == LOAD else 0.0, place.shape)
        for path, place in view.places.items()
        if path[0] == "stages"
    }


Copies = dict[int | str, list[tuple[str, Entry]]]  # by layer: names, each with its table


def fit_modules(
    config: DecoderConfig, checkpoint: Checkpoint, family: Family, mtp: int | None = None
) -> DecoderConfig:
    """Set a config's number of modules for multi-token prediction to the number to read.

    Args:
      mtp: the number of modules; None for the number in config.json if the files have them, else 0.

    Raises:
      ValueError: the number is neither 0 nor all, or the files have only some modules.
    """
    if mtp not in (None, 0, config.mtp_layers) or isinstance(mtp, bool):
        raise ValueError(
            f"mtp={mtp!r}: by config.json this model has {config.mtp_layers} modules for "
            f"multi-token prediction; give that number, 0 to leave them out, or no mtp="
        )
    numbers = _numbers(config, checkpoint)
    held = sum(has_layer(checkpoint, family, n) for n in numbers)
    if mtp == 0 or (mtp is None and not held):  # transformers saves no modules
        return replace(config, mtp_layers=0)
    if held < config.mtp_layers:
        raise ValueError(
            f"{checkpoint.folder}: by config.json the model has {config.mtp_layers} modules for "
            f"multi-token prediction, after layer {config.layers - 1}, and the files have {held}: "
            f"fetch the shards that are missing, or give mtp=0"
        )
    return config


def copies_of(entries: Sequence[Entry], family: Family, prefix: str) -> Copies:
    """Find the tensors that repeat a table, by layer."""
    tables = {one.layer: one for one in entries if one.plan.target == TABLE}
    own = {row.target for row in family.mtp}
    layers = [one.layer for one in entries if one.plan.target in own]
    return {
        n: [
            (family.tensor_name(prefix, n, name), tables.get(part, tables[EMBED]))
            for name, part in family.mtp_copies
        ]
        for n in dict.fromkeys(layers)
        if isinstance(n, int)
    }


def each_tensor(
    entries: Sequence[Entry], copies: Copies, split: Callable[[Entry], Mapping[str, Any]]
) -> Iterator[tuple[int | str, str, Any]]:
    """List (layer, name, value) of the tensors of a checkpoint in layer order.

    Args:
      split: the tensors of a weight by name: arrays, or their types.
    """
    for layer, own in itertools.groupby(entries, key=lambda entry: entry.layer):
        for entry in own:
            yield from ((layer, name, value) for name, value in split(entry).items())
        for name, table in copies.get(layer, ()):
            (value,) = split(table).values()
            yield layer, name, value


def spare_names(entries: Sequence[Entry], checkpoint: Checkpoint, family: Family) -> set[str]:
    """Find the tensors that need not be read: repeated tables, or omitted modules.

    Raises:
      ValueError: a table differs from its copy.
    """
    copies = copies_of(entries, family, family.prefix_of(list(checkpoint.tensors)))
    if not copies:
        return _left_out(checkpoint, family)
    names = set()
    for name, entry in (pair for pairs in copies.values() for pair in pairs):
        first = entry.plan.parts[0].name
        if name in checkpoint.tensors and first in checkpoint.tensors:
            why = "a module for multi-token prediction shares the main model's tables"
            remedy = "leave out the one that is not meant, or give mtp=0"
            _check_equal(checkpoint, name, first, why, remedy)
            names.add(name)
    return names


def _left_out(checkpoint: Checkpoint, family: Family) -> set[str]:
    """Return the tensors of modules that config.json counts but the model lacks."""
    if not family.mtp or family.config is None:
        return set()
    numbers = _numbers(family.config(checkpoint.config), checkpoint)
    starts = tuple(layer_prefix(checkpoint, family, n) for n in numbers)
    return {name for name in checkpoint.tensors if name.startswith(starts)}


def _numbers(config: DecoderConfig, checkpoint: Checkpoint) -> range:
    """Return the layer numbers of the modules for multi-token prediction in config.json.

    They follow the numbers of all other layers. There are at most as many as tensors, also if
    config.json has a larger number.
    """
    return range(config.layers, config.layers + min(config.mtp_layers, len(checkpoint.tensors)))
