"""A table from each weight of a pipeline to tensors of a checkpoint, in layer order.

Letters: K stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.models.weights.checkpoint import SHOWN, Checkpoint, listed
from pipeline.models.weights.tables.family import Config, Family
from pipeline.models.weights.tables.patterns import Row, TensorPlan, plan

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

    Args:
      tree: the layers of a `LayerView`.
      family: the table of names.
      config: the content of config.json.
      prefix: the prefix of tensor names.

    Raises:
      ValueError: the table has no row for a weight.
    """
    sizes = family.sizes_of(config)

    def entry(layer: int | str, pair: tuple[Row, Any]) -> Entry:
        made, number = plan(pair[0], sizes), layer if isinstance(layer, int) else None
        names = (family.tensor_name(prefix, number, part.name) for part in made.parts)
        parts = tuple(replace(part, name=n) for part, n in zip(made.parts, names, strict=True))
        return Entry(layer, replace(made, parts=parts), pair[1])

    found = [entry(EMBED, pair) for pair in _pairs(tree, EMBED, family)]
    layer = 0
    for k, stage in enumerate(tree["stages"]):
        for n, leaves in _blocks(stage, k):
            where = f"stages[{k}].{BLOCKS}[{n}]"
            pairs = _matched((*family.rows, *family.mtp), leaves, where, family)
            found += [entry(layer, pair) for pair in pairs]
            layer += 1
    return found + [entry(HEAD, pair) for pair in _pairs(tree, HEAD, family)]


def _pairs(tree: Mapping[str, Any], part: str, family: Family) -> list[tuple[Row, Any]]:
    rows = family.embed if part == EMBED else family.head
    return _matched(rows, _dotted(tree[part]), part, family)


def _blocks(stage: Mapping[str, Any], k: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the leaves of each block of a stage, by dotted path."""
    others = [name for name in stage if name != BLOCKS]
    if others:
        raise ValueError(
            f"stages[{k}] has {', '.join(map(repr, others))} in addition to {BLOCKS!r}: a stage "
            f"whose weights are read by a table of names is a list of layers called {BLOCKS!r}, "
            f"and nothing else"
        )
    blocks: Mapping[Any, Any] = stage.get(BLOCKS, {})
    found = sorted((int(n), leaves) for n, leaves in blocks.items())
    return [(n, _dotted(leaves)) for n, leaves in found]


def _dotted(tree: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in leaves_of(tree)}


def leaves_of(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List the paths and the leaves of nested mappings."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for name, below in tree.items():
        yield from leaves_of(below, (*path, name))


def _matched(
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


def check_layers(checkpoint: Checkpoint, family: Family, layers: int) -> None:
    """Check that a checkpoint has its last layer, before a model with all its layers is made.

    Args:
      checkpoint: the checkpoint.
      family: the checkpoint's family.
      layers: the number of layers in config.json.

    Raises:
      ValueError: the files have fewer layers.
    """
    if checkpoint.tensors and not has_layer(checkpoint, family, layers - 1):
        held = next(n for n in range(layers) if not has_layer(checkpoint, family, n))
        raise ValueError(
            f"{checkpoint.folder}: by config.json the model has {layers:,} layers, and the files "
            f"have {held}: correct config.json, or fetch the shards that are missing"
        )


def has_layer(checkpoint: Checkpoint, family: Family, n: int) -> bool:
    """Tell whether the files have any tensor of a layer."""
    prefix = layer_prefix(checkpoint, family, n)
    return any(name.startswith(prefix) for name in checkpoint.tensors)


def layer_prefix(checkpoint: Checkpoint, family: Family, n: int) -> str:
    """Return the prefix of a layer's tensor names."""
    return family.tensor_name(family.prefix_of(list(checkpoint.tensors)), n, "")


def with_tied_head(
    entries: Sequence[Entry], checkpoint: Checkpoint, family: Family, prefix: str
) -> Sequence[Entry]:
    """Point the entries of a shared table at the tensor that exists, the embedding's or the head's.

    Safetensors keep only one of two names of an array, which may be the head's name.

    Args:
      entries: the result of `entries_of`.
      checkpoint: the checkpoint to read.
      family: the checkpoint's family.
      prefix: the prefix of tensor names.

    Raises:
      ValueError: both tensors exist and differ.
    """
    tables = {one.layer: one for one in entries if one.plan.target == TABLE}
    if EMBED not in tables or HEAD in tables:
        return entries
    rows = [row for row in family.head if row.target == TABLE and len(row.sources) == 1]
    parts = tables[EMBED].plan.parts
    if not rows or len(parts) != 1:
        return entries
    tensors, own = checkpoint.tensors, parts[0].name
    other = family.tensor_name(prefix, None, rows[0].sources[0].name)
    if other not in tensors:
        return entries
    if own in tensors:
        if not tensors[own].equals(tensors[other]):
            raise ValueError(
                f"{checkpoint.folder}: {other} and {own} differ, and by config.json the head "
                f"shares the embedding's table, so one of them would not be used: set "
                f"tie_word_embeddings to false, or leave out the one that is not meant"
            )
        return entries
    plan = replace(tables[EMBED].plan, parts=(replace(parts[0], name=other),))
    return [replace(one, plan=plan) if one is tables[EMBED] else one for one in entries]


def check_shapes(entries: Sequence[Entry]) -> None:
    """Check the sizes of a model's weights against the table.

    Raises:
      ValueError: a list of all weights with other sizes.
    """
    wrong = [
        f"{entry.name} is {list(entry.place.shape)} in the model, and by its row and the sizes "
        f"of config.json it is {list(entry.plan.shape)}"
        for entry in entries
        if tuple(entry.place.shape) != entry.plan.shape
    ]
    if wrong:
        raise ValueError(_several(wrong))


def check_tensors(
    entries: Sequence[Entry],
    checkpoint: Checkpoint,
    family: Family,
    spare: Collection[str] = (),
) -> None:
    """Check that a checkpoint has the tensors of a model, of the right sizes, and no others.

    Args:
      entries: the model's weights.
      checkpoint: the checkpoint to read.
      family: the checkpoint's family.
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
        raise ValueError(f"{checkpoint.folder}: {_several(wrong)}")


def _several(wrong: Sequence[str]) -> str:
    more = len(wrong) - SHOWN
    return "; ".join(wrong[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
