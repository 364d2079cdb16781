"""Effects of a stage beside its results, which have to happen once for each microbatch.

A print may be repeated, as under `jax.checkpoint`. A callback to the host that counts, logs or
writes must not, and nobody would notice that it is. A check of `checkify` may be repeated on
the same data, and must not be made on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from collectives.compat import has_check, may_not_repeat
from pipeline.core.autodiff.jaxpr.primitives import jaxprs_of
from pipeline.core.step.calls.groups import GroupedModel
from pipeline.core.step.calls.local_model import LocalModel


def check_permutes(bodies: Sequence[Any]) -> None:
    """Refuse `jax.lax.ppermute` in a stage where all virtual CPU devices meet in it.

    Ranks of other stages run other actions meanwhile: they would not come, or with a permute of
    their own, and numbers would get mixed.

    Args:
      bodies: the jaxprs of stages, or of embed, head and loss.

    Raises:
      ValueError: there is one.
    """
    for axis in filter(None, map(_permuted, bodies)):
        raise ValueError(
            f"a stage calls jax.lax.ppermute over the axis {axis!r}; virtual CPU devices of one "
            f"process all meet in it, those of other stages too, which run other actions "
            f"meanwhile; use collectives.exchange or collectives.ring_shift, in which the ranks of "
            f'{axis!r} alone meet, or bubbles="masked" on CPU (GPUs and TPUs need neither)'
        )


def _permuted(jaxpr: Any) -> str:
    """The axis of the first `ppermute` in a jaxpr, also within loops and calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            axes = eqn.params["axis_name"]
            return str(axes[0] if isinstance(axes, tuple) else axes)
        if axis := next(filter(None, map(_permuted, jaxprs_of(eqn))), ""):
            return axis
    return ""


def check_effects(local: LocalModel, *, again: bool, masked: bool) -> None:
    """Refuse a stage with side effects where it runs more often than its microbatches say.

    Args:
      local: a rank's part of the model.
      again: whether a backward runs a stage's forward again.
      masked: whether a stage runs in bubbles too.

    Raises:
      ValueError: it calls back to the host, or checks what bubbles hold.
    """
    if not (again or masked):
        return
    kinds = [g.local for g in local.groups] if isinstance(local, GroupedModel) else [local]
    for kind in kinds:
        arguments = *kind.stage_arguments(kind.home, 0), kind.blank
        effects = jax.make_jaxpr(kind.stage)(*arguments).effects
        if masked and has_check(effects):
            raise ValueError(
                'a stage has a check (checkify.check), and with bubbles="masked" it also runs in '
                "bubbles, on no data: the check would fail of what no microbatch holds; use "
                'bubbles="skip" (and no auto_axes on virtual CPU devices, where they mask bubbles)'
            )
        if may_not_repeat(effects):
            what = 'with remat="stage" a backward runs its forward again'
            remedy = "remat=None"
            if masked:
                what = 'with bubbles="masked" it also runs in bubbles, on no data'
                remedy = 'bubbles="skip" and remat=None'
            raise ValueError(
                f"a stage has a side effect (io_callback), and {what}: it would happen more often "
                f"than once per microbatch; use {remedy}, or jax.debug.callback for what may be "
                f"repeated"
            )
