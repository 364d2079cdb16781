"""Warnings: layers whose statistics include padding; state that no ``after_step=`` advances.

`pipeline.base.rows` says which rows and positions are data. A stage that asks it is passed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from pipeline.base.added import Adding
from pipeline.base.rows import DataStatistic
from pipeline.base.variables import metadata
from pipeline.core.rank.ends import ends_paths
from pipeline.core.rank.held import Usage
from pipeline.core.rank.local_model import LocalModel
from pipeline.core.rank.state import RankState
from pipeline.core.sharding.fit import outside

_REMEDY = (
    "the batch has padding (pipeline.training.batches), which it may count: leave out what "
    "pipeline.layers.data_mask() says is no data (a stage that calls it is not warned of), or give "
    "batches without padding"
)


def warn_of_losses_of_padding(parts: Mapping[str, Adding], warned: set[Any]) -> None:
    """Warn of parts of a model that add a loss without asking which rows are padding.

    Args:
      parts: records of their losses, by name.
      warned: of what was warned already, to which this is added.
    """
    for name, adding in parts.items():
        if adding.counts_padding:
            _warn(f"{name} calls add_loss, and {_REMEDY}", warned)


@dataclass(frozen=True, eq=False)
class DeclaredPart:
    """The declared state of a part of a model.

    Attributes:
      name: of the part.
      variables: of the state, in the order of its usage.
      usage: of their leaves.
      reads_mask: whether a call of the part has read which rows are data.
    """

    name: str
    variables: Mapping[str, Any]
    usage: Usage
    reads_mask: bool = False


def of_stages(stage: LocalModel, usage: Usage) -> DeclaredPart:
    """The declared state of the stages of one kind."""
    flat = dict(nnx.to_flat_state(stage.fixed[stage.home]))
    variables = {".".join(map(str, path)): flat[path] for path in stage.state_paths}
    return DeclaredPart(stage.part_name, variables, usage, stage.reads_mask)


def of_ends(state: RankState, usage: Usage) -> DeclaredPart:
    """The declared state of embed, head and loss."""
    flat = dict(nnx.to_flat_state(state.ends_streams[1]))
    variables = {".".join(map(str, path)): flat[path] for path in ends_paths(state)}
    return DeclaredPart("embed or head", variables, usage)


def warn_of_state(
    parts: Sequence[DeclaredPart], warned: set[Any], *, has_padding: bool, advances: bool
) -> None:
    """Warn of state that is written from padding too, and of state that nothing advances.

    Args:
      parts: of a model.
      warned: of what was warned already, to which this is added.
      has_padding: whether the batch has any.
      advances: whether an ``after_step=`` runs, or the step does not train.
    """
    for part in parts:
        written, names = iter(part.usage[0]), dict[str, list[str]]()  # names by class
        for path, variable in part.variables.items():
            leaves, kind = [next(written) for _ in jax.tree.leaves(variable)], type(variable)
            if any(leaves) and not issubclass(kind, DataStatistic):
                names.setdefault(kind.__name__, []).append(path)
            function = metadata(variable).get("after_step")
            if function and not advances:
                _warn(
                    f"{path} of {part.name} changes after a step only, and the pipeline has no "
                    f"after_step=: give it after_step={function}; if your loop calls that itself, "
                    f"give it after_step=lambda stage: None",
                    warned,
                )
        if has_padding and names and not part.reads_mask:
            text = "; ".join(f"{', '.join(of)} ({kind})" for kind, of in names.items())
            _warn(f"{part.name} writes {text}, and {_REMEDY}", warned)


def _warn(text: str, warned: set[Any]) -> None:
    if text not in warned:
        warned.add(text)
        warnings.warn(text, stacklevel=outside())
