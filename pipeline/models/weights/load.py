"""Loading and description of checkpoints: each process reads the slices of its own devices.

Letters: S ranks, K stages.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jax.sharding import Mesh

from collectives import STAGE
from pipeline.base.agreed.vocabulary import CrossEntropy
from pipeline.core.placement.distribute import distribute
from pipeline.layers_view.layout import Mark
from pipeline.layers_view.view import LayerView, LeafPlace, layer_view
from pipeline.models.decoders.config import DecoderConfig, as_float, with_options
from pipeline.models.decoders.decoder import Parts, build, cut_layers, next_token_loss
from pipeline.models.decoders.multi_token import WEIGHT, MultiTokenLoss
from pipeline.models.layers.attending.order import WHOLE, Context
from pipeline.models.weights.checkpoint import CONFIG, Checkpoint, open_checkpoint
from pipeline.models.weights.names import (
    EMBED,
    HEAD,
    Constant,
    Entry,
    check_layers,
    constants,
    fit_modules,
    is_bias,
    match_entries,
    state_view,
    with_biases,
)
from pipeline.models.weights.safetensors import DTYPES
from pipeline.models.weights.tables.families import family_of
from pipeline.models.weights.tables.patterns import Config, Family, Range, TensorPlan
from pipeline.pipeline import Pipeline
from pipeline.splitting.layouts import Layout, write_layout

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class LoadedFrom:
    """The source checkpoint of a pipeline's weights, an attribute of the pipeline.

    An export needs this attribute. Copies and `replace` keep it. An export checks shapes against
    `config`, and refuses a head of another size.
    """

    family: Family = field(compare=False)  # JAX compares and hashes a pipeline's attributes
    config: str


def load(
    folder: str | Path,
    num_microbatches: int = 1,
    *,
    num_stages: int | None = None,
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    dtype: Any = None,
    activations: Any = None,
    family: str | Family | None = None,
    experts: Mapping[str, Any] | None = None,
    mtp: int | None = None,
    context: Context = WHOLE,
    **options: Any,
) -> Pipeline:
    """Make a pipeline of the decoder in a checkpoint, with its weights.

    No process holds the whole model: each process reads the parts of its own devices, one weight at
    a time.

    Args:
      folder: config.json, and safetensors in one file or with an index.
      num_microbatches: M, the argument of `Pipeline`.
      num_stages: K; by default the size of the mesh's axis ``stage``, or one stage for each device,
        but at most one for each layer.
      layout: the layers of each stage (`parse_layout`), in place of ``num_stages``.
      mesh: the argument of `Pipeline`.
      dtype: the dtype of the weights; by default the dtype of most bytes of the checkpoint.
      activations: the dtype of activations; by default the dtype of the weights.
      family: replaces the family that ``model_type`` names; a name, or your own table.
      experts: options of mixtures of experts that no checkpoint contains, such as ``dispatch`` and
        ``balance_weight`` (`pipeline.decoders.ExpertsConfig`).
      mtp: the number of modules for multi-token prediction to read: 0 reads none; by default the
        number in config.json, if the files have these modules. Their loss is
        `pipeline.decoders.MultiTokenLoss`.
      context: the split of sequences over the ranks of an axis (`pipeline.layers.Context`), with
        ``batch=P("data", "context")``; by default sequences are whole.
      options: other options of `Pipeline`, such as ``loss_fn`` and ``schedule``.

    Raises:
      ValueError: files that are missing, cut short or mislabelled; an unknown family; a config that
        this decoder does not support; tensors of other sizes; or an error of `Pipeline`.
    """
    types: dict[str, Any] = {"dtype": dtype, "activations": activations, "context": context}
    if "vocabulary" in options:
        types["vocabulary"] = options["vocabulary"]
    cut: dict[str, Any] = {"num_stages": num_stages, "layout": layout, "mesh": mesh}
    made = parts(folder, family=family, experts=experts, mtp=mtp, **cut, **types)
    stages, read = made.pop("stages"), made.pop("read")
    pipe = Pipeline(stages, num_microbatches, mesh=mesh, **made | {"loss_fn": None} | options)
    read(pipe)
    return pipe


def parts(
    folder: str | Path,
    *,
    num_stages: int | None = None,
    layout: Layout | None = None,
    mesh: Mesh | None = None,
    dtype: Any = None,
    activations: Any = None,
    vocabulary: Literal["ends", "stage"] = "ends",
    family: str | Family | None = None,
    experts: Mapping[str, Any] | None = None,
    mtp: int | None = None,
    mtp_weight: float | Sequence[float] | None = None,
    context: Context = WHOLE,
) -> dict[str, Any]:
    """Make the parts of a `Pipeline` from a checkpoint, all as types, and the reader of weights.

    Args:
      folder: the folder of the checkpoint.
      num_stages: the argument of `load`; so are layout, mesh, dtype, activations and family.
      layout: the layers of each stage.
      mesh: the mesh of the pipeline.
      dtype: the dtype of the weights.
      activations: the dtype of activations.
      vocabulary: the argument of `Pipeline`.
      family: the table of names.
      experts: the argument of `load`.
      mtp: the argument of `load`.
      mtp_weight: the weight of the modules' losses, for `pipeline.decoders.MultiTokenLoss`.
      context: the argument of `load`.

    Returns:
      stages, embed, head; loss_fn, the loss of the next token; and read, a function that reads the
      weights into a pipeline.

    Raises:
      ValueError: the errors of `load`.
    """
    checkpoint = open_checkpoint(folder)
    family = choose_family(family, checkpoint.config, f"{checkpoint.folder}/config.json")
    if family.config is None:
        raise ValueError(
            f"the family {family.name!r} has no config=, so its model is one's own: make a "
            f"Pipeline of it and call pipeline.weights.read_into(pipe, folder, family=...)"
        )
    config = with_options(family.config(checkpoint.config), experts)
    check_layers(checkpoint, family, config.layers)
    config = fit_modules(config, checkpoint, family, mtp)
    devices = jax.device_count() if mesh is None else mesh.shape.get(STAGE, 1)
    counts, modules = cut_layers(config, num_stages, layout, default=devices)
    stored = common_dtype(checkpoint) if dtype is None else as_float(dtype)
    types: dict[str, Any] = {"dtype": stored, "vocabulary": vocabulary, "context": context}
    types["activations"] = stored if activations is None else as_float(activations)
    stages, embed, head = build(config, counts, mtp=modules, **types)
    loss_fn = choose_loss(config, vocabulary, mtp_weight)
    read = functools.partial(_read, checkpoint=checkpoint, family=family)
    return {"stages": stages, "embed": embed, "head": head, "loss_fn": loss_fn, "read": read}


def read_into(
    pipe: Pipeline,
    folder: str | Path,
    *,
    family: str | Family | None = None,
    config: Config | None = None,
) -> None:
    """Read a checkpoint into a pipeline of any model whose stages are lists ``blocks`` of layers.

    The pipeline's weights may be types, made under `nnx.eval_shape`: then only the arrays of the
    read weights are made. Weights keep their dtype.

    Args:
      pipe: the pipeline.
      folder: safetensors in one file or with an index, and config.json.
      family: replaces the family that ``model_type`` names; a name, or your own table.
      config: replaces config.json.

    Raises:
      ValueError: an error of `load`; or weights that have no row in the table, or other sizes.
    """
    checkpoint = open_checkpoint(folder, config)
    _read(pipe, checkpoint, choose_family(family, checkpoint.config, f"{folder}/config.json"))


def choose_family(family: str | Family | None, config: Config, where: str) -> Family:
    """Return the given family, or the family that config.json names."""
    if isinstance(family, Family):
        return family
    if family is None:
        return family_of(config, where)
    return family_of({"model_type": family}, f"family={family!r}")


def choose_loss(
    config: DecoderConfig, vocabulary: str, mtp_weight: float | Sequence[float] | None
) -> Any:
    """Choose the loss of a decoder: for the next token, or also for later tokens."""
    if config.mtp_layers:
        weight: Any = WEIGHT if mtp_weight is None else mtp_weight
        return MultiTokenLoss(weight, has_metrics=True)
    if mtp_weight is not None:
        raise ValueError(
            f"mtp_weight={mtp_weight!r} for a model without modules for multi-token prediction: "
            f"leave it out"
        )
    return CrossEntropy() if vocabulary == "stage" else next_token_loss


def common_dtype(checkpoint: Checkpoint) -> Any:
    """Return the dtype of most bytes of a checkpoint."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in DTYPES:  # other dtypes are refused later, by name
            sizes[tensor.dtype] += tensor.nbytes
    return DTYPES[sizes.most_common(1)[0][0] if sizes else "F32"]


def _read(pipe: Pipeline, checkpoint: Checkpoint, family: Family) -> None:
    view, state = layer_view(pipe), state_view(pipe)
    entries = match_entries(with_biases(view.tree, state), checkpoint, family)
    plans: dict[Any, Any] = {entry.place: entry.plan for entry in entries}
    _Reading(pipe, view, checkpoint, plans).run()
    if state is not None:
        _Reading(pipe, state, checkpoint, {**constants(state), **plans}).run()
    pipe.loaded_from = LoadedFrom(family, json.dumps(checkpoint.config, indent=2))


@dataclass(frozen=True)
class _Reading:
    """A reader that fills the arrays of a pipeline, one by one.

    Attributes:
      plans: for each weight, by its place in the view, the plan to read it.
    """

    pipe: Pipeline
    view: LayerView
    checkpoint: Checkpoint
    plans: Mapping[Any, TensorPlan | Constant]

    def run(self) -> None:
        variables = dict(nnx.to_flat_state(nnx.state(self.pipe)))
        for path, places in self.view.by_array.items():
            variable, fill = variables[path], functools.partial(self._array, [*places.values()])
            old = variable.get_raw_value()
            variable.set_raw_value(made_of_parts(old.shape, old.dtype, old.sharding, fill))
        for variable in variables.values():
            value = variable.get_raw_value()
            if isinstance(variable, Mark) and isinstance(value, jax.ShapeDtypeStruct):
                made = distribute(np.zeros(value.shape, value.dtype), value.sharding)
                variable.set_raw_value(made)

    def _array(self, places: Sequence[LeafPlace], out: np.ndarray, at: Ranges) -> None:
        """Read a device's part of an array."""
        for place in places:
            plan = self.plans.get(place)
            if plan is None:
                continue
            if place.row is None:
                self._leaf(plan, place, out, at)
            elif at[0][0] <= place.row < at[0][1]:
                self._leaf(plan, place, out[place.row - at[0][0], ...], at[1:])

    def _leaf(
        self, plan: TensorPlan | Constant, place: LeafPlace, out: np.ndarray, at: Ranges
    ) -> None:
        """Read a leaf into a device's part of its row; the rest of the row stays zero."""
        part = None if place.part is None else place.part.part
        if part is None:
            plan.fill(out, at, self._map)
            return
        low, high = max(part[0], at[0][0]), min(part[1], at[0][1])
        if low >= high:
            return
        dest, inner = out[low - at[0][0] : high - at[0][0]], (low - part[0], high - part[0])
        if len(place.shape) == len(at):  # the leaf has a part of the row's first dim
            plan.fill(dest, (inner, *at[1:]), self._map)
        else:
            whole = plan.read(self._map, out.dtype)
            dest[...] = whole.reshape(-1)[slice(*inner)]

    def _map(self, name: str) -> np.ndarray:
        return self.checkpoint.tensors[name].array()


def made_of_parts(
    shape: Sequence[int], dtype: Any, sharding: Any, fill: Callable[[np.ndarray, Ranges], None]
) -> jax.Array:
    """Make an array from the parts of this process's devices, one after the other.

    Args:
      fill: a function that writes a part into an array of zeros, given the range of each dim.
    """
    held: dict[Ranges, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        ranges = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        held.setdefault(ranges, []).append(device)
    arrays = []
    for ranges, devices in held.items():
        part = np.zeros([stop - start for start, stop in ranges], dtype)
        fill(part, ranges)
        # Wait for each part, or several parts would be in host memory at once.
        arrays += [jax.block_until_ready(jax.device_put(part, device)) for device in devices]
        del part
    make = jax.make_array_from_single_device_arrays
    return make(tuple(shape), sharding, arrays, dtype=dtype)


def inspect(
    folder: str | Path,
    *,
    num_stages: int | None = None,
    layout: Layout | None = None,
    names: bool = False,
) -> str:
    """Read the headers of a checkpoint, check all of them, and describe the contents.

    Args:
      folder: a folder in the Hugging Face layout.
      num_stages: K, to list the contents of each stage.
      layout: the layers of each stage, in place of ``num_stages``.
      names: whether to list every tensor with the weight that contains it.

    Raises:
      ValueError: the errors of `pipeline.weights.load`.
    """
    checkpoint = open_checkpoint(folder)
    config, entries = describe_checkpoint(checkpoint)
    tensors = checkpoint.tensors
    parts = [(entry, part) for entry in entries for part in entry.plan.parts]
    dtypes = Counter(tensors[part.name].dtype for _, part in parts)
    files = sorted({tensor.file.name for tensor in tensors.values()})
    total = config.layers + config.mtp_layers
    per_layer: dict[int | str, int] = dict.fromkeys((EMBED, *range(total), HEAD), 0)
    for entry, part in parts:
        per_layer[entry.layer] += tensors[part.name].nbytes
    shared = ", shared with the head" if config.tied else ""
    heads = f"{config.heads} heads on {config.kv_heads} of keys and values, {config.head_dim} wide"
    others = f"MLP {config.hidden}; {config.vocabulary:,} words{shared}"
    ahead = f" and {config.mtp_layers} for multi-token prediction" if config.mtp_layers else ""
    numbers = sum(math.prod(entry.plan.shape) for entry in entries)
    lines = [
        f"{folder}: {checkpoint.config.get('model_type')}, the Hugging Face layout",
        f"  {config.layers} layers{ahead} of width {config.width}, {heads}; {others}",
        f"  {numbers:,} parameters in {len(parts)} tensors, {sum(per_layer.values()):,} bytes: "
        + ", ".join(f"{count} {name}" for name, count in dtypes.most_common()),
        f"  {len(files)} file{'s' * (len(files) > 1)}: {files[0]}"
        + (f" to {files[-1]}" if len(files) > 1 else ""),
    ]
    if layout is not None or num_stages is not None:
        counts, modules = cut_layers(config, num_stages, layout)
        lines.append(f"  {len(counts)} stages, {write_layout(counts, modules)}")
        for k, count in enumerate(counts):
            first, module = sum(counts[:k]), config.layers + sum(modules[:k])
            layers = *range(first, first + count), *range(module, module + modules[k])
            size = sum(per_layer[n] for n in layers)
            ends = [end for end, stage in ((EMBED, 0), (HEAD, len(counts) - 1)) if stage == k]
            text = f"layers {first} to {first + count - 1}" if count else "no layers"
            text += f" and {modules[k]} for multi-token prediction" if modules[k] else ""
            with_ends = "".join(f", and {end} with {per_layer[end]:,}" for end in ends)
            lines.append(f"    stage {k}: {text}, {size:,} bytes{with_ends}")
    if names:
        lines += [
            f"  {part.name} {list(part.shape)} -> {entry.name} {list(entry.plan.shape)}"
            for entry, part in parts
        ]
    return "\n".join(lines)


def describe_checkpoint(checkpoint: Checkpoint) -> tuple[DecoderConfig, list[Entry]]:
    """Return the decoder of a checkpoint, and its weights by the family's table."""
    where = f"{checkpoint.folder}/{CONFIG}"
    family = family_of(checkpoint.config, where)
    if family.config is None:
        raise ValueError(f"{where}: the family {family.name!r} says nothing of its config")
    config = family.config(checkpoint.config)
    check_layers(checkpoint, family, config.layers)
    config = fit_modules(config, checkpoint, family)
    # A table that embedding and head share belongs to the embedding.
    model = Parts(*build(config, [config.layers]))
    state = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, is_bias)))
    tree: Any = unflatten_mapping({tuple(path): leaf.get_raw_value() for path, leaf in state})
    tree = {EMBED: {}, HEAD: {}, **tree, "stages": [tree["stages"][0]]}
    return config, match_entries(tree, checkpoint, family)
