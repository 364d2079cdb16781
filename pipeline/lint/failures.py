"""Reasons why a part of a model cannot be traced on its arguments.

Letters: K stages. Activation k, 0 <= k <= K, is the input of stage k. A stage that cannot take its
input fails somewhere inside. So the stage is traced on changes of one leaf that fit its weights.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.base.rows import BatchPart, Padded
from pipeline.base.stacks import REMEDY
from pipeline.base.tree import Tree, blank, path_text, shape_text, types_text
from pipeline.core.model.model import Batch
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.lint.effects import check_constraint_error

_REFUSALS = (TypeError, ValueError, LookupError, AttributeError)
_MOST_TRIALS = 200
_OF_TRACED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)
_OF_TYPES = ("concrete values", "unhashable type: 'DynamicJaxprTracer'")
_WITHOUT_EXTRAS = {
    "embed": "give embed such an array as a part of inputs, a dictionary or a tuple",
    "head": "let the last stage use such an array (pool there, for example), or return it beside "
    "its output, which is what the head is given",
    "loss_fn": "give the loss such an array as a part of targets, a dictionary or a tuple",
}


def explain_part(rank: Rank, part: str, argument: Tree, error: Exception) -> None:
    """Add a note to an exception: the part of the model that raised it, and the part's arguments.

    Args:
      part: embed, head or loss_fn.

    Raises:
      ValueError: the error of `_check_static`.
    """
    _check_static(part, argument, error)
    error.add_note(f"{part} was given {types_text(argument)}")
    is_masked = getattr(rank.model.loss_fn, "is_masked", False)
    if part == "loss_fn" and isinstance(argument[1], Padded) and not is_masked:
        error.add_note(
            "targets are padded: Pipeline(loss_fn=masked(loss_fn)), with masked from "
            "pipeline.training.batches, leaves out the rows of padding; or let the loss read "
            "targets.targets and targets.counts"
        )
    if isinstance(error, TypeError) and re.search("missing .* argument", str(error)):
        extras = rank.batch.extras
        names = f"extras {', '.join(map(repr, extras))}" if extras else "extras"
        error.add_note(f"{names} go to stages alone, by name; {_WITHOUT_EXTRAS[part]}")


def explain_stage(
    rank: Rank, k: int, before: list[Tree], run: Callable[[Tree], Any], error: Exception
) -> None:
    """Add a note to an exception of a stage: the stage's arguments.

    Args:
      before: types of activations 0 to k.
      run: traces the stage on an activation of a type.

    Raises:
      ValueError: a clearer error, if there is one.
    """
    _check_static(f"stages[{k}]", before[k], error)
    check_constraint_error(f"stages[{k}]", error)
    if rank.model.stack > 1 and isinstance(error, TypeError | ValueError):
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"stages[{k}] cannot run on {types_text(before[k])} ({first}); stages is one "
            f"module whose arrays all have a leading axis of {rank.model.stack}: {REMEDY}"
        ) from error
    _check_call(rank, k, error)
    _note_what_is_tracked(error, rank.axes)
    if k > 0 and isinstance(error, _REFUSALS):
        stage = StageKind(rank, (k,))
        weights = jax.eval_shape(lambda: stage.example()[0])
        if text := _accepted(run, before[k::-1], weights, f"stages[{k - 1}] returns"):
            raise ValueError(
                f"stages[{k}] takes {text} (per microbatch and data shard); neighbours agree on "
                f"the activation between them: change either stage"
            ) from error
    source = f"what stages[{k - 1}] returns: " if k else ""
    error.add_note(f"stages[{k}] was given {source}{types_text(before[k])}")


def _check_call(rank: Rank, k: int, error: Exception) -> None:
    """Replace Python's error about a stage's call by one that names ``extras=`` or ``__call__``.

    Raises:
      TypeError: stage k has no ``__call__``; or ``extras=`` has an argument that stage k does not
        take, or lacks one that it takes.
    """
    words = re.search(r"(not callable|unexpected keyword|missing \d+ required)(.*)", str(error))
    if not isinstance(error, TypeError) or words is None:
        return
    stages: list[Any] = []

    def look(module: Any) -> jax.Array:
        stages.append(module)
        return jnp.zeros(())

    StageKind(rank, (k,)).look(look)
    if not callable(stages[0]):
        raise TypeError(
            f"stages[{k}] is a {type(stages[0]).__name__}, which has no __call__: define "
            f"__call__(self, x) that returns the input of the next stage"
        ) from error
    (_, *parameters) = inspect.signature(stages[0].__call__).parameters.values()
    # The error may be that of a module within the stage.
    is_own = str(error).startswith(f"{type(stages[0]).__call__.__qualname__}()")
    if not is_own or any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    extras, takes = rank.batch.extras, [one.name for one in parameters]
    has = f"extras= has {', '.join(map(repr, extras))}" if extras else "there are no extras="
    for name in re.findall(r"'(\w+)'", words[2]):
        if "unexpected" in words[1] and name in extras and name not in takes:
            others = ", ".join(map(repr, takes)) or "no extras"
            raise TypeError(
                f"extras= has {name!r}, and stages[{k}] takes {others}: rename it, or let every "
                f"stage take it"
            ) from error
        if "missing" in words[1] and name in takes:
            raise TypeError(
                f"stages[{k}] takes {name!r} after its input, and {has}: give extras={{{name!r}: "
                f"array}} with leaves [N, ...], or give the argument a default"
            ) from error


def _check_static(part: str, argument: Tree, error: Exception) -> None:
    """Replace JAX's error about a traced value, if the value is a number in an activation.

    Args:
      argument: types of its argument; for a loss a pair, outputs and targets.

    Raises:
      ValueError: the error is about a traced value, and an activation has a number.
    """
    is_type = isinstance(error, TypeError) and any(text in str(error) for text in _OF_TYPES)
    if not (is_type or isinstance(error, _OF_TRACED_VALUES)):
        return
    is_loss = part == "loss_fn"
    argument, what = (argument[0], "the outputs") if is_loss else (argument, "its activation")
    for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
        if leaf.shape:
            continue
        raise ValueError(
            f"{part} needs a value while it is traced, and was given {shape_text(leaf)} as "
            f"{path_text(path)} of {what}: activations are sent as arrays, so a Python "
            f"bool or number in one is traced in the next stage; give what says how to compute to "
            f"the constructors of the stages, or choose by jnp.where or jax.lax.cond"
        ) from error


def check_that_it_is_a_stack(rank: Rank, types: list[Tree]) -> None:
    """Check that the one module given for all stages is not a single stage.

    Raises:
      ValueError: the module computes a stage's output also from whole arrays in place of their
        rows, and from arrays with a number of rows that is no multiple of K.
    """
    K = rank.model.stack
    stage, rows = StageKind(rank, (0,)), 2 * K + 1

    def whole(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else jnp.broadcast_to(leaf, (K, *leaf.shape))

    def resized(leaf: Any) -> Any:
        return jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype)

    def run() -> Tree:
        weights, fixed, (streams, extras, part, _, *where) = stage.example()
        batch = Batch((), (), extras, rank.batch.specs and ((), (), rank.batch.specs[2]))
        extras = batch.map_rows(resized, lambda leaf: leaf).extras
        side = streams, extras, part, BatchPart(), *where
        x = jax.tree.map(resized, blank(types[0], ()))
        weights, fixed = list(map(whole, weights)), jax.tree.map(whole, fixed)
        return stage.stage(weights, fixed, side, x).value

    try:
        with jax.numpy_rank_promotion("allow"):
            outputs = jax.eval_shape(run)
    except Exception:  # noqa: BLE001  a stack fails on whole arrays
        return
    if [y.shape for y in jax.tree.leaves(outputs)] == [
        (rows, *y.shape[1:]) for y in jax.tree.leaves(types[1])
    ]:
        raise ValueError(
            f"stages is one module whose arrays all have a leading axis of {K}; it is taken for "
            f"{K} stages, and computes the same shapes as one stage: {REMEDY}"
        )


def _note_what_is_tracked(error: Exception, varying: tuple[str, ...]) -> None:
    """Add a note to an error: the types that values have here and would lack under `jax.jit`."""
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    axes = sorted(manual - {*varying})
    if axes:
        error.add_note(
            f"the mesh has the axis {' and '.join(map(repr, axes))}, so a stage runs as under "
            f"jax.shard_map(check_vma=True): where fresh arrays meet values that vary over mesh "
            f"axes (the carry of a loop, a branch, a Pallas kernel), wrap what holds no collective "
            f"in collectives.local, or mark the fresh array with collectives.vary; a weight whose "
            f"metadata or sharding= names the axis is here its rank's part: if the layers know "
            f"nothing of that, leave the axis to the compiler by auto_axes={tuple(axes)!r}"
        )


def _accepted(
    run: Callable[[Tree], Any], activations: list[Tree], weights: list[Any], returns: str
) -> str:
    """Say which other activation a stage accepts; "" if none is found.

    That is an earlier activation of another structure; or this one, if a leaf has the dtype of a
    weight, or one of its dims has the size of a weight's dim.
    """
    leaves, treedef = jax.tree.flatten(activations[0])
    for other in activations[1:]:
        structure: Any = jax.tree.structure(other)
        if structure != treedef:
            with contextlib.suppress(*_REFUSALS):
                run(other)
                return f"an activation of structure {structure}, but {returns} {treedef}"
    sizes = sorted({size for weight in weights for size in weight.shape})
    dtypes = dict.fromkeys([*(weight.dtype for weight in weights), jnp.dtype("int32")])
    changes: list[tuple[int, Any]] = []
    for n, leaf in enumerate(leaves):
        changes += [(n, leaf.update(dtype=dtype)) for dtype in dtypes if dtype != leaf.dtype]
        for axis in reversed(range(1, leaf.ndim)):
            shapes = [(*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]) for size in sizes]
            changes += [(n, leaf.update(shape=to)) for to in shapes if to != leaf.shape]
    for n, new in changes[:_MOST_TRIALS]:
        with contextlib.suppress(*_REFUSALS):
            run(jax.tree.unflatten(treedef, [*leaves[:n], new, *leaves[n + 1 :]]))
            path, _ = jax.tree_util.tree_leaves_with_path(activations[0])[n]
            wanted = f"{shape_text(new)} as {path_text(path)} of its activation"
            return f"{wanted}, but {returns} {shape_text(leaves[n])}"
    return ""
