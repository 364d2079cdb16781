"""The contents of a checkpoint: leaves by name in layer order, plain values, a data position.

Names are paths in the model without a pipeline: ``model.layers.3.up``, ``model.head.kernel``,
``optimizer.opt_state.0.mu.layers.3.up``, ``shaped.ema.layers.3.up``. Layers are numbered across all
stages. A stage whose parameters are all in one list of modules (a stage of several blocks) counts
as that many layers. So names do not depend on the number of stages.

A part that `pipeline.split` made of equations keeps variables by their paths in the whole model.
Their names are these paths, ``model.of_model.blocks.3.up``, in any part.
"""

from __future__ import annotations

import base64
import functools
import importlib.metadata
import math
import operator
import pathlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import optax
from flax import nnx

from collectives.transfer import is_elsewhere
from pipeline.base.arguments import hint_at, is_whole
from pipeline.base.tree import Tree
from pipeline.layers_view.leaves import (
    LayerLeaf,
    optimizer_leaves,
    pipeline_leaves,
    plain_leaves,
    shaped_leaves,
    tree_leaves,
)
from pipeline.layers_view.view import key_name
from pipeline.optimizer import PipelineOptimizer
from pipeline.pipeline import Pipeline
from pipeline.training.checkpoints.together import everyone
from pipeline.training.layer_names import name_layer, number_layers

Path = tuple[Any, ...]
Part = Literal["optimizer", "shaped", "plain", "data"]
SEVERAL = "stages", "embed", "head"  # keys of a model given as a dictionary of modules
TYPE = "shardpipe type"  # the key, in a JSON dictionary, of the name of another type
OF_MODEL = "of_model"  # attribute of a part that `split` made


class Contents:
    """The leaves of a model, its optimizer and other trees, by name.

    Args:
      model: a pipeline, a module, or ``{"stages": [K modules], "embed": module, "head": module}``.
      shaped: trees like the model's parameters, by name; loaded leaves are written to them.
    """

    def __init__(
        self,
        model: Any,
        optimizer: nnx.Optimizer[Any] | None,
        shaped: dict[str, Tree] | Mapping[str, Tree] | None,
    ) -> None:
        self.model = model
        self.leaves: dict[str, LayerLeaf] = {}
        self._numbers = number_layers(model)
        self._add("model", _model_leaves(model))
        if optimizer is not None:
            self._add("optimizer", _optimizer_leaves(model, optimizer))
        for name, tree in (shaped or {}).items():
            put = functools.partial(operator.setitem, shaped, name)
            of_pipe = isinstance(model, Pipeline)
            found = shaped_leaves(model, tree, put) if of_pipe else tree_leaves(tree, put)
            self._add(f"shaped.{name}", found)

    def _add(self, prefix: str, leaves: Iterator[LayerLeaf]) -> None:
        found = list(leaves)
        # A variable that several parts have, such as a random stream, is a leaf of each part.
        parts = Counter(map(_in_model, (leaf.path for leaf in found)))
        for leaf in found:
            own = _in_model(leaf.path)
            path = own if own and parts[own] == 1 else name_layer(leaf.path, self._numbers)
            name = ".".join(map(str, (prefix, *path)))
            if name in self.leaves:
                raise ValueError(
                    f"two leaves have the name {name}; give attributes and keys names without dots"
                )
            self.leaves[name] = leaf


def _in_model(path: Path) -> Path:
    """Return a variable's path in the model that `split` cut; () for variables of other parts."""
    if OF_MODEL not in path:
        return ()
    at = path.index(OF_MODEL)
    first = at - 1 if path[at - 1] in SEVERAL[1:] else at - 2
    if first < 0 or path[first] not in SEVERAL:
        return ()
    return (*path[:first], *path[at:])


def _model_leaves(model: Any) -> Iterator[LayerLeaf]:
    if isinstance(model, Pipeline):
        yield from pipeline_leaves(model)
    elif isinstance(model, nnx.Module):
        yield from plain_leaves(model)
    elif isinstance(model, Mapping) and "stages" in model and set(model) <= set(SEVERAL):
        parts: dict[Path, Any] = {("stages", k): one for k, one in enumerate(model["stages"])}
        parts |= {(name,): model[name] for name in SEVERAL[1:] if model.get(name) is not None}
        for prefix, module in parts.items():
            for leaf in plain_leaves(module):
                yield LayerLeaf((*prefix, *leaf.path), leaf.cell, leaf.place)
    else:
        raise ValueError(
            f"model is of type {type(model).__name__}; give a Pipeline, an nnx.Module, or a "
            f"dictionary of modules: {{'stages': [...], 'embed': ..., 'head': ...}}"
        )


def _optimizer_leaves(model: Any, optimizer: Any) -> Iterator[LayerLeaf]:
    if not isinstance(optimizer, nnx.Optimizer):
        raise ValueError(
            f"optimizer is of type {type(optimizer).__name__}; give what "
            f"pipeline.make_optimizer(pipe, tx) or nnx.Optimizer(model, tx, wrt=...) returns"
        )
    if not isinstance(model, Pipeline):
        return plain_leaves(optimizer)
    plan = optimizer.state_plan(model) if isinstance(optimizer, PipelineOptimizer) else None
    return optimizer_leaves(model, optimizer, plan)


# --- the manifest ---


def describe(
    step: int,
    state: Contents,
    plain: Mapping[str, Any] | None,
    data: Any,
    metrics: Mapping[str, float] | None,
    topic: str,
) -> dict[str, Any]:
    """Make the manifest of a checkpoint, without the digests of its files."""
    if not is_whole(step, 0, numpy=True):
        raise ValueError(f"step={step!r}: must be an integer >= 0, the steps that were done")
    position = None if data is None else _position(data)
    return {
        "step": int(step),
        "layout": _layout(state.model),
        "leaves": {name: _described(leaf) for name, leaf in state.leaves.items()},
        "plain": {name: _json(f"plain[{name!r}]", value) for name, value in (plain or {}).items()},
        "data": None if data is None else everyone(topic, position),
        "metrics": {name: _number(name, value) for name, value in (metrics or {}).items()},
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax", "flax", "orbax-checkpoint")
        },
    }


def _described(leaf: LayerLeaf) -> dict[str, Any]:
    said = {"shape": list(leaf.shape), "dtype": leaf.cell.value.dtype.name}
    return said | ({"kind": leaf.cell.kind} if leaf.cell.kind else {})


def _layout(model: Any) -> dict[str, Any] | None:
    """Describe the saved model's layout for human readers; no code reads the description."""
    if not isinstance(model, Pipeline):
        return None
    schedule = model.schedule
    return {
        "stages_of_ranks": [list(held) for held in schedule.stages_of],
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "mesh": {str(axis): int(size) for axis, size in model.mesh.shape.items()},
        "shared_vocabulary": list(model.plan.shared),
    }


def _json(what: str, value: Any) -> Any:
    """Convert a value to JSON; an array of one number becomes the number.

    A tuple becomes a dictionary with the key `TYPE` (the text "tuple") and the key "items" (a
    list). So does a dictionary with the key `TYPE` or a key that is no text: its type is "dict",
    and its items are pairs.
    """
    if isinstance(value, Mapping):
        if TYPE not in value and all(isinstance(key, str) for key in value):
            return {key: _json(f"{what}[{key!r}]", member) for key, member in value.items()}
        return {TYPE: "dict", "items": _json(what, [[*pair] for pair in value.items()])}
    if isinstance(value, list | tuple):
        found = [_json(f"{what}[{n}]", member) for n, member in enumerate(value)]
        return {TYPE: "tuple", "items": found} if isinstance(value, tuple) else found
    if hasattr(value, "dtype") and hasattr(value, "item") and value.size == 1:
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ValueError(f"{what} is {value}, which JSON cannot represent; give a finite number")
    raise ValueError(
        f"{what} is of type {type(value).__name__}; give numbers, texts, lists and dictionaries of "
        f"them, and arrays that are like the parameters as shaped="
    )


def of_json(value: Any) -> Any:
    """Convert the JSON of `_json` back to its value."""
    if isinstance(value, list):
        return [of_json(member) for member in value]
    if not isinstance(value, dict):
        return value
    if TYPE not in value:
        return {key: of_json(member) for key, member in value.items()}
    items = of_json(value["items"])
    return tuple(items) if value[TYPE] == "tuple" else dict(items)


def _number(name: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        shown = f"{value!r:.60}" if not isinstance(value, int) else "an integer beyond float64"
        raise ValueError(f"metrics[{name!r}]={shown}: must be a number") from None
    return number if math.isfinite(number) else None


# --- the position in the data ---


def _position(data: Any) -> Any:
    if not callable(getattr(data, "get_state", None)):
        raise ValueError(
            f"data is of type {type(data).__name__}, which has no get_state(); give the iterator, "
            f"as grain's, with get_state() and set_state(state)"
        )
    state = data.get_state()
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    return {"json": _json("data.get_state()", state)}


def own_position(folder: pathlib.Path, positions: list[Any]) -> Any:
    """Read this process's position in the data."""
    count, index = jax.process_count(), jax.process_index()
    if all(one == positions[0] for one in positions):
        index = 0
    elif len(positions) != count:
        raise ValueError(
            f"{folder} has the positions of {len(positions)} processes in the data, which differ, "
            f"and {count} restore it; use as many, an iterator of global positions, or "
            f"ignore=('data',) to start at the beginning"
        )
    found = positions[index]
    return base64.b64decode(found["bytes"]) if "bytes" in found else of_json(found["json"])


# --- comparison ---


def check_ignored(ignore: Collection[str]) -> None:
    """Check the names of what is not to be restored: parts of a checkpoint, and paths of leaves."""
    known = get_args(Part)
    for name in [ignore] if isinstance(ignore, str) else ignore:
        part, _, path = str(name).partition(".")
        fits = path and part in ("model", "optimizer", "shaped")
        if isinstance(ignore, str) or not (name in known or fits):
            raise ValueError(
                f"ignore={ignore!r}: must be a tuple of {', '.join(map(repr, known))} and names "
                f"such as 'model.head', what of a checkpoint is not restored"
            )


def select_leaves(
    folder: pathlib.Path,
    said: Mapping[str, Any],
    state: Contents,
    ignore: Collection[str],
    *,
    strict: bool,
) -> tuple[dict[str, LayerLeaf], dict[str, str]]:
    """Choose the leaves to restore.

    Returns:
      The leaves by name, and for each leaf that is left, although its part of the checkpoint is
      restored, a line of text by its name.

    Raises:
      ValueError: a leaf differs, and may not be left.
    """
    parts = get_args(Part)
    saved = {
        name: leaf for name, leaf in said["leaves"].items() if name.partition(".")[0] not in ignore
    }
    given = {name: _described(leaf) for name, leaf in state.leaves.items()}
    named = {path: {n for n in given | saved if _is_at(n, path)} for path in {*ignore} - {*parts}}
    for path, names in named.items():
        if not names:
            modules = {_module_of(name) for name in given | saved}
            raise ValueError(
                f"ignore={ignore!r}: neither {folder} nor what is restored has leaves of {path}"
                f"{hint_at(path, modules)}"
            )
    different = {name for name in given | saved if saved.get(name) != given.get(name)}
    may_differ = set() if strict else {n for n in different if n.partition(".")[0] in parts}
    left = may_differ.union(*named.values())
    if wrong := [name for name in given | saved if name in different - left]:
        more = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        raise ValueError(f"{folder} {_different(wrong, saved, given, more)}")
    lines = {
        name: f"{name}: {_typed(saved[name]) if name in saved else 'nothing'} in the checkpoint, "
        f"{_typed(given[name]) + ' stays' if name in given else 'and no place for it'}"
        for name in given | saved
        if name in left
    }
    return {name: leaf for name, leaf in state.leaves.items() if name not in left}, lines


def start_means(
    state: Contents, left: Collection[str], ignore: Collection[str]
) -> dict[str, LayerLeaf]:
    """Set the leaves of means that are left to the model's weights, which are restored already.

    The result has these leaves by name; their arrays are not stored yet. Means on devices of other
    processes are set by those.
    """
    names = [n for n in left if n.startswith("shaped.") and n in state.leaves]
    names = [name for name in names if not any(_is_at(name, path) for path in ignore)]
    weights = Contents(state.model, None, None).leaves if names else {}
    means = {}
    for name in names:
        mean = state.leaves[name]
        weight = weights.get(f"model.{name.split('.', 2)[2]}")
        if weight is not None and weight.shape == mean.shape:
            if not is_elsewhere(mean.cell.value):
                mean.write(weight.read().astype(mean.cell.value.dtype))
            means[name] = mean
    return means


def _is_at(name: str, path: str) -> bool:
    """Tell whether a leaf is at a path, or is a moment or a mean of a leaf of the model there."""
    part, _, rest = name.partition(".")
    of, _, inner = path.partition(".")
    return f"{name}.".startswith(f"{path}.") or (
        of == "model" != part and f".{inner}." in f".{rest}."
    )


def _module_of(name: str) -> str:
    """Return the path of a leaf's layer, or its first two names if it is in no layer."""
    names = name.split(".")
    return ".".join(names[: 3 if names[1:2] == ["layers"] else 2])


def continue_schedules(optimizer: nnx.Optimizer[Any], left: dict[str, str]) -> None:
    """Set the counts of optax's schedules that are left to the optimizer's step; say so in lines.

    Counts on devices of other processes are set by those.
    """
    for kind in ("ScaleByScheduleState", "WrappedScheduleState"):
        for keys, state in optax.tree.get_all_with_path(optimizer.opt_state, kind):
            path = map(str, map(key_name, keys))
            name = ".".join(("optimizer.opt_state", *path, "count"))
            if name not in left:
                continue
            left[name] = left[name].replace(" stays", ", which continues at the step")
            count = state.count.get_value()
            if not is_elsewhere(count):  # the optimizer's step is on the same devices
                steps = optimizer.step.get_value().astype(count.dtype)
                state.count.set_value(jax.device_put(steps, count.sharding))


def check_same(
    folder: pathlib.Path, said: Mapping[str, Any], given: Mapping[str, Any], ignore: Collection[str]
) -> None:
    """Check that a checkpoint has the values that are given, and no others."""
    for part, value in given.items():
        if part in ignore:
            continue
        has = said[part] if part == "data" else (said[part] or None)
        if (has is None) != (not value if part == "plain" else value is None):
            raise ValueError(
                f"{folder} holds no {part}, and {part}= is given: leave it out, or give "
                f"ignore=({part!r},)"
                if has is None
                else f"{folder} holds {part}, and none is given: give {part}=, or "
                f"ignore=({part!r},) to leave it there"
            )
    if "plain" not in ignore and given["plain"]:
        for name in [*given["plain"], *said["plain"]]:
            if name not in said["plain"] or name not in given["plain"]:
                raise ValueError(
                    f"{folder}: plain[{name!r}] is only in "
                    f"{'the checkpoint' if name in said['plain'] else 'what is restored'}; give "
                    f"{', '.join(map(repr, said['plain']))}"
                )


def _different(
    wrong: Sequence[str], saved: Mapping[str, Any], own: Mapping[str, Any], more: str
) -> str:
    name, part = wrong[0], wrong[0].partition(".")[0]
    leave = f", or ignore=({part!r},) to leave it there" if part in get_args(Part) else ""
    if leave and any(other.startswith(f"{part}.") for other in own):
        leave += ", or strict=False to keep what fits"
    modules = {_module_of(other) for other in wrong if other.startswith("model.")}
    if part == "model" and len(modules) == 1 and len(wrong) < len(own):
        leave = f", or ignore=({modules.pop()!r},) to leave it as it is given"
    remedy = f"give the {part} that was saved{leave}"
    if name not in own:
        return (
            f"holds {name}, {_typed(saved[name])}, which has no place in what is restored{more}; "
            f"{remedy}"
        )
    other = "optimizer" if part == "optimizer" else "model"
    remedy = f"it is a checkpoint of another {other}: {remedy}"
    if name not in saved:
        advice = f"{remedy}{_advice(name, saved)}"
        return f"has nothing for {name}, {_typed(own[name])}{more}; {advice}"
    return (
        f"holds {name} as {_typed(saved[name])}, and what is restored has {_typed(own[name])}"
        f"{more}; {remedy}"
    )


def _advice(name: str, saved: Mapping[str, Any]) -> str:
    """Return advice for a pipeline's checkpoint and a model with other attributes."""
    parts = {one.split(".")[1] for one in saved if one.startswith("model.")}
    of, part, *_ = name.split(".")
    if of != "model" or "layers" not in parts or part in {"layers", "embed", "head"}:
        return ""
    return (
        "; it holds the layers of a pipeline: for a model with other attributes give its parts, "
        '{"stages": [K modules], "embed": module, "head": module}, which may be modules of the '
        "model itself"
    )


def _typed(said: Mapping[str, Any]) -> str:
    kind = f" of {said['kind']}" if "kind" in said else ""
    return f"{said['dtype']}[{','.join(map(str, said['shape']))}]{kind}"
