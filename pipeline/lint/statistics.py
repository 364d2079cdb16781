"""Warnings: layers whose statistics include padding; state that no ``after_step=`` updates.

`pipeline.base.rows` tells which rows and positions are data. A part that reads it gets no warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import nnx

from pipeline.base.added import Adding
from pipeline.base.rows import DataStatistic, Padded
from pipeline.base.variables import metadata
from pipeline.base.warn import warn_once
from pipeline.core.step.calls.declared import Usage
from pipeline.core.step.calls.ends import ends_paths

if TYPE_CHECKING:
    from pipeline.core.step.calls.opened import OpenedStep
    from pipeline.core.step.calls.rank import Rank

_REMEDY = (
    "the batch has padding (pipeline.training.batches), which it may count: leave out what "
    "pipeline.layers.data_mask() says is no data (a stage that calls it first is not warned of), "
    "or give batches without padding"
)


def warn_of_means_of_padding(rank: Rank, warned: set[Any]) -> None:
    """Warn of a loss that is a mean over all rows where `padded` has added some."""
    is_padded = any(
        isinstance(node, Padded)
        for node in jax.tree.leaves(rank.batch.targets, is_leaf=lambda x: isinstance(x, Padded))
    )
    if is_padded and rank.loss.is_mean:
        warn_once(
            "targets are padded, and the loss is a mean that counts the rows of padding: give "
            "loss_fn=masked(loss_fn), with masked from pipeline.training.batches, or return "
            "(sum, weight) with the weights of targets.counts",
            warned,
        )


def warn_of_losses_of_padding(parts: Mapping[str, Adding], warned: set[Any]) -> None:
    """Warn of parts of a model that add a loss without asking which rows are padding.

    Args:
      parts: by name of a part, the record of the losses that the part adds.
      warned: keys of warnings already given; the function adds to it.
    """
    for name, adding in parts.items():
        if adding.counts_padding:
            warn_once(f"{name} calls add_loss, and {_REMEDY}", warned)


class _DeclaredVariable(NamedTuple):
    """A variable of declared state.

    Attributes:
      part: the stage that has the variable, or embed, head or loss_fn.
      path: the variable's path in that part.
      reads_mask: whether a call of the part reads which rows are data.
    """

    part: str
    path: str
    variable: Any
    is_written: bool
    reads_mask: bool


def _declared_variables(step: OpenedStep) -> Iterator[_DeclaredVariable]:
    """Yield the declared state of the stages of each kind, and of embed, head and loss."""
    rank = step.rank
    for _, kind, usage in step.usage:
        for path, variable, is_written in _with_usage(kind.other_state, kind.state_paths, usage):
            where = ".".join(map(str, path))
            yield _DeclaredVariable(kind.part_name, where, variable, is_written, kind.reads_mask)
    if step.usage_of_ends is not None:
        of_ends = rank.ends_streams[1], ends_paths(rank), step.usage_of_ends
        for (end, *path), variable, is_written in _with_usage(*of_ends):
            reads_mask = str(end) in rank.facts.mask_readers
            where = ".".join(map(str, path))
            yield _DeclaredVariable(str(end), where, variable, is_written, reads_mask)


def _with_usage(
    state: Any, paths: Sequence[Any], usage: Usage
) -> Iterator[tuple[Sequence[Any], Any, bool]]:
    """Yield each declared variable with its path, and whether a call writes any of its leaves."""
    flat, written = dict(nnx.to_flat_state(state)), iter(usage[0])
    for path in paths:
        leaves = [next(written, False) for _ in jax.tree.leaves(flat[path])]
        yield path, flat[path], any(leaves)


def warn_of_state(step: OpenedStep) -> None:
    """Warn of state that padding changes too, or that no function updates after a step."""
    plan, rank = step.plan, step.rank
    warned, has_padding = plan.compiled.warned, rank.batch_part.sequences is not None
    counting: dict[str, list[str]] = {}  # texts by part
    for declared in _declared_variables(step):
        kind, is_of_stage = type(declared.variable), declared.part.startswith("stages")
        if declared.is_written and not declared.reads_mask and not issubclass(kind, DataStatistic):
            counting.setdefault(declared.part, []).append(f"{declared.path} ({kind.__name__})")
        function = metadata(declared.variable).get("after_step") if step.request.counts else None
        changes = f"{declared.path} of {declared.part} changes after a step only"
        if function and not is_of_stage:
            warn_once(
                f"{changes}, and after_step= runs on stages only: call {function}(pipe) after each "
                f"update, or move the layer into a stage",
                warned,
            )
        elif function and plan.after_step is None:
            warn_once(
                f"{changes}, and the pipeline has no after_step=: give it after_step={function}; "
                f"if your loop calls that itself, give it after_step=lambda stage: None",
                warned,
            )
    for part, texts in counting.items() if has_padding else ():
        warn_once(f"{part} writes {', '.join(texts)}, and {_REMEDY}", warned)
