"""Warnings of statistics over rows: of padding that they count, of steps that do not advance them.

`pipeline.base.rows` says which rows and positions are data. A layer that asks it is passed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from pipeline.base.added import Adding
from pipeline.base.rows import DataStatistic
from pipeline.base.variables import metadata
from pipeline.core.rank.held import Usage
from pipeline.core.rank.local_model import LocalModel
from pipeline.core.sharding.fit import outside

_REMEDY = (
    "the batch has padding (pipeline.training.batches), which it counts: leave out what "
    "pipeline.layers.data_mask() says is no data, or give batches without padding"
)


def warn_of_losses_of_padding(parts: Mapping[str, Adding], warned: set[Any]) -> None:
    """Warn of parts of a model that add a loss over all rows of a batch with padding.

    Args:
      parts: records of their losses, by name.
      warned: of what was warned already, to which this is added.
    """
    for name, adding in parts.items():
        if adding.counts_padding:
            _warn(f"{name} calls add_loss, and {_REMEDY}", warned)


def warn_of_state_of_padding(stage: LocalModel, usage: Usage, warned: set[Any]) -> None:
    """Warn of declared state that a stage writes from all rows of a batch with padding.

    Args:
      stage: the stages of one kind.
      usage: of the leaves of their declared state.
      warned: of what was warned already, to which this is added.
    """
    if stage.state.seen.sequences is None or stage.asks_for_padding:
        return
    flat, written = dict(nnx.to_flat_state(stage.fixed[stage.home])), iter(usage[0])
    names: dict[str, list[str]] = {}  # of variables, by their class
    for path in stage.state_paths:
        leaves = [next(written) for _ in jax.tree.leaves(flat[path])]
        kind = type(flat[path])
        if any(leaves) and not issubclass(kind, DataStatistic):
            names.setdefault(kind.__name__, []).append(".".join(map(str, path)))
    if names:
        text = "; ".join(f"{', '.join(of)} ({kind})" for kind, of in names.items())
        _warn(f"{stage.part_name} writes {text}, and {_REMEDY}", warned)


def warn_of_missing_after_step(stage: LocalModel, warned: set[Any]) -> None:
    """Warn of declared state that only an ``after_step=`` changes, in a pipeline without one.

    Args:
      stage: the stages of one kind.
      warned: of what was warned already, to which this is added.
    """
    flat = dict(nnx.to_flat_state(stage.fixed[stage.home]))
    for path in stage.state_paths:
        if function := metadata(flat[path]).get("after_step"):
            name = f"{stage.part_name}.{'.'.join(map(str, path))}"
            _warn(
                f"{name} changes after a step only, and the pipeline has no after_step=: give it "
                f"after_step={function}; or, where your loop calls that itself, a function of a "
                f"stage that does nothing",
                warned,
            )


def _warn(text: str, warned: set[Any]) -> None:
    if text not in warned:
        warned.add(text)
        warnings.warn(text, stacklevel=outside())
