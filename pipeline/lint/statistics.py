"""Warnings: layers whose statistics include padding; state that no ``after_step=`` updates.

`pipeline.base.rows` tells which rows and positions are data. A part that reads it gets no warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from pipeline.base.added import Adding
from pipeline.base.rows import DataStatistic
from pipeline.base.variables import metadata
from pipeline.base.warn import warn_once
from pipeline.core.step.calls.declared import Usage
from pipeline.core.step.calls.ends import ends_paths
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank

if TYPE_CHECKING:
    from pipeline.core.step.calls.opened import OpenedStep

_REMEDY = (
    "the batch has padding (pipeline.training.batches), which it may count: leave out what "
    "pipeline.layers.data_mask() says is no data (a stage that calls it first is not warned of), "
    "or give batches without padding"
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


@dataclass(frozen=True, eq=False)
class DeclaredVariable:
    """A variable of declared state.

    Attributes:
      part: the stage that has the variable, or embed, head or loss_fn.
      path: the variable's path in that part.
      variable: the variable.
      is_written: whether a call writes the variable.
      reads_mask: whether a call of the part reads which rows are data.
    """

    part: str
    path: str
    variable: Any
    is_written: bool
    reads_mask: bool


def of_stages(stage: StageKind, usage: Usage) -> list[DeclaredVariable]:
    """Return the declared state of the stages of one kind."""
    flat, written = dict(nnx.to_flat_state(stage.other_state)), iter(usage[0])
    return [
        DeclaredVariable(
            stage.part_name,
            ".".join(map(str, path)),
            flat[path],
            _any_of(written, flat[path]),
            stage.reads_mask,
        )
        for path in stage.state_paths
    ]


def of_ends(rank: Rank, usage: Usage) -> list[DeclaredVariable]:
    """Return the declared state of embed, head and loss."""
    flat, written = dict(nnx.to_flat_state(rank.ends_streams[1])), iter(usage[0])
    return [
        DeclaredVariable(
            str(path[0]),
            ".".join(map(str, path[1:])),
            flat[path],
            _any_of(written, flat[path]),
            str(path[0]) in rank.facts.mask_readers,
        )
        for path in ends_paths(rank)
    ]


def _any_of(written: Iterator[bool], variable: Any) -> bool:
    leaves = [next(written, False) for _ in jax.tree.leaves(variable)]
    return any(leaves)


def warn_of_state(step: OpenedStep) -> None:
    """Warn of state that padding changes too, and of state that no function updates after a step.

    Args:
      step: the step, with the traces of its model.
    """
    plan, rank = step.plan, step.rank
    variables = [one for _, kind, usage in step.usage for one in of_stages(kind, usage)]
    if step.usage_of_ends is not None:
        variables += of_ends(rank, step.usage_of_ends)
    warned, has_padding = plan.compiled.warned, rank.batch_part.sequences is not None
    counting: dict[str, list[str]] = {}  # texts by part
    for one in variables:
        kind, is_of_stage = type(one.variable), one.part.startswith("stages")
        if one.is_written and not one.reads_mask and not issubclass(kind, DataStatistic):
            counting.setdefault(one.part, []).append(f"{one.path} ({kind.__name__})")
        function = metadata(one.variable).get("after_step") if step.request.counts else None
        if function and not is_of_stage:
            warn_once(
                f"{one.path} of {one.part} changes after a step only, and after_step= runs on "
                f"stages only: call {function}(pipe) after each update, or move the layer into a "
                f"stage",
                warned,
            )
        elif function and plan.after_step is None:
            warn_once(
                f"{one.path} of {one.part} changes after a step only, and the pipeline has no "
                f"after_step=: give it after_step={function}; if your loop calls that itself, "
                f"give it after_step=lambda stage: None",
                warned,
            )
    for part, texts in counting.items() if has_padding else ():
        warn_once(f"{part} writes {', '.join(texts)}, and {_REMEDY}", warned)
