"""NaN in a step: the stage and the microbatch that compute it first (``jax_debug_nans``).

JAX looks for NaN in the results of a jitted function and then repeats the function op by op. A
kernel with refs and collectives cannot be repeated so. So the kernel runs without JAX's check, and
its results are checked here. If a result has NaN, the model is run again without a pipeline, stage
after stage.

NaN may depend on a microbatch's random keys and on ``compute_dtype``, so stages are called with
both, as in the kernel. `pipeline.training.generation` also calls stages one after another, but
without these keys and this dtype.

Letters: K stages, M microbatches, D data shards, b rows of a microbatch on one shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import DATA, STAGE
from pipeline.base.precision import NAN_CHECKS, as_computed
from pipeline.base.tree import Leaves, Tree, combine, is_float, partition
from pipeline.core.model.loss import LossModule, take_loss
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.model.randomness import fold, split_streams
from pipeline.core.model.stage import Definition, StagePosition
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.ends import embedded, headed, lost
from pipeline.core.step.calls.slices import on_whole


def run_watched(
    run: Callable[..., Any],
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    *,
    takes_loss: bool,
    **options: Any,
) -> Any:
    """Run an entry point of the kernel, and look for NaN and infinities in its results.

    Raises:
      FloatingPointError: a result has NaN or infinity.
    """
    kinds = [k for k, on in NAN_CHECKS.items() if getattr(jax.config, on)]
    with _watching(()):
        found = run(plan, model, weights, batch, **options)
        if not _bad(found, kinds):
            return found
        if not takes_loss:
            model = dataclasses.replace(model, loss_fn=None)
        text = _Search(plan, model, weights, batch, kinds).text()
    raise FloatingPointError(text)


@contextlib.contextmanager
def _watching(kinds: Sequence[str]) -> Iterator[None]:
    with jax.debug_nans("NaN" in kinds), jax.debug_infs("infinity" in kinds):
        yield


def _bad(tree: Tree, kinds: list[str]) -> list[bool]:
    """Return a bool for each leaf, True if it has a NaN or an infinity; [] if no leaf has one.

    ``kinds`` selects NaN, infinity or both.
    """
    tests = [{"NaN": jnp.isnan, "infinity": jnp.isinf}[kind] for kind in kinds]
    found = [
        is_float(x) and any(bool(jnp.any(test(x))) for test in tests) for x in jax.tree.leaves(tree)
    ]
    return found if any(found) else []


@dataclasses.dataclass(frozen=True)
class _NamedPart:
    """Embedding, a stage, or the head with the loss.

    Attributes:
      name: the name in messages.
      call: function of (params, x, batch, microbatch) on one data shard, which returns the output.
      params: the part's parameters.
    """

    name: str
    call: Callable[..., Tree]
    params: Tree


class _Search:
    """A search for the first NaN or infinity, which runs the model part by part."""

    def __init__(
        self, plan: Plan, model: Model, weights: Weights, batch: Batch, kinds: list[str]
    ) -> None:
        self._plan, self._model, self._kinds = plan, model, kinds
        self._weights, self._batch = weights, batch

    def text(self) -> str:
        """Return a message about the first bad value."""
        what, option = self._kinds[0], NAN_CHECKS[self._kinds[0]]
        others = set(self._plan.axes.names) - {DATA, STAGE}
        is_many = self._plan.stage_meshes is not None
        if others or is_many or self._model.tables.is_used or not _is_here(self._weights):
            return (
                f"a step of the pipeline returns {what} ({option}); its stages cannot be run by "
                f"themselves where weights are shared out over ranks: look for it on one mesh of "
                f"stage and data, in one process, with vocabulary='ends'"
            )
        return self._first() or (
            f"a step of the pipeline returns {what} ({option}), and the same stages run one after "
            f"another compute none: sums over microbatches overflow, or rounding differs; try a "
            f"wider grad_dtype= or compute_dtype="
        )

    def _first(self) -> str:
        parts = self._parts()
        for part in parts:
            for (path, _), bad in zip(
                jax.tree_util.tree_leaves_with_path(part.params),
                _bad(part.params, self._kinds),
                strict=False,
            ):
                if bad:
                    where = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
                    return f"{part.name} is given {self._said} in its weights: {where}"
        for microbatch in range(self._plan.schedule.num_microbatches):
            if found := self._in_microbatch(parts, microbatch):
                return found
        return ""

    @property
    def _said(self) -> str:
        return f"{self._kinds[0]} ({NAN_CHECKS[self._kinds[0]]})"

    def _in_microbatch(self, parts: list[_NamedPart], microbatch: int) -> str:
        shards = self._plan.axes.num_rows
        batch = self._batch.map_rows(
            lambda x: self._rows(x)[:, microbatch],
            lambda x: jnp.broadcast_to(x, (shards, *x.shape)),
        )
        x, pullbacks = batch.inputs, []
        if _bad(x, self._kinds):
            return f"inputs hold {self._said}, in microbatch {microbatch}"
        for part in parts:
            y, pullback = self._run(part, x, batch, microbatch)
            if _bad(y, self._kinds):
                again = functools.partial(self._run, part, x, batch, microbatch)
                op = self._op_by_op(again)
                return self._message(part, "forward", microbatch, op)
            x = y
            pullbacks.append((part, pullback))
        if self._model.loss_fn is None:
            return ""
        dy: Leaves = [jnp.ones_like(x[0]), *map(jnp.zeros_like, partition(x[1:])[0])]
        for part, pullback in reversed(pullbacks):
            found = pullback(dy)
            if _bad(found, self._kinds):
                op = self._op_by_op(functools.partial(pullback, dy))
                return self._message(part, "backward", microbatch, op)
            dy = found[1]
        return ""

    def _run(self, part: _NamedPart, x: Tree, batch: Batch, microbatch: int) -> tuple[Tree, Any]:
        """Run a part on all data shards, and return its output and pullback."""
        floats, others = partition(x)
        types: list[Tree] = []

        def on_shard(params: Tree, floats: Leaves, others: Leaves, batch: Batch) -> Any:
            y = part.call(params, combine(x, floats, others), batch, microbatch)
            types[:] = [jax.tree.map(lambda leaf: leaf, y)]
            return partition(y)

        run = jax.vmap(on_shard, in_axes=(None, 0, 0, 0), axis_name=DATA)
        y, pullback, y_others = jax.vjp(
            lambda params, floats: run(params, floats, others, batch),
            part.params,
            floats,
            has_aux=True,
        )
        return combine(types[0], y, y_others), pullback

    def _op_by_op(self, again: Callable[[], Any]) -> str:
        """Run again operation by operation, and return JAX's message about the operation."""
        try:
            with _watching(self._kinds), jax.disable_jit():
                again()
        except FloatingPointError as error:
            return str(error).partition(". ")[0].rstrip(".")
        return "no operation by itself does"

    def _message(self, part: _NamedPart, way: str, microbatch: int, op: str) -> str:
        rows = len(jax.tree.leaves(self._batch)[0]) // self._plan.axes.num_rows
        size = rows // self._plan.schedule.num_microbatches
        shards = " of each data shard" if self._plan.axes.num_rows > 1 else ""
        return (
            f"{part.name} is the first to compute {self._said}, in its {way} pass of microbatch "
            f"{microbatch}, rows {microbatch * size} to {(microbatch + 1) * size - 1}{shards}; run "
            f"op by op: {op}"
        )

    def _rows(self, x: jax.Array) -> jax.Array:
        """Reshape [N, ...] to [D, M, b, ...]."""
        num_microbatches = self._plan.schedule.num_microbatches
        return x.reshape(self._plan.axes.num_rows, num_microbatches, -1, *x.shape[1:])

    def _parts(self) -> list[_NamedPart]:
        model, weights = self._model, self._weights
        params, rest = weights.ends, weights.ends_rest
        embed, head, loss = (
            self._caller(model.ends, rest, method, computes=method is not lost)
            for method in (embedded, headed, lost)
        )
        parts = [self._stage(k, position) for k, position in enumerate(model.stages)]
        if model.has_embed:
            call = lambda p, x, _, m: embed(p, m, x)  # noqa: E731
            parts.insert(0, _NamedPart("embed", call, params))

        model = self._model

        def last(params: Tree, x: Tree, batch: Batch, microbatch: int) -> Tree:
            y = head(params, microbatch, x) if model.has_head else x
            if model.loss_fn is None:
                return y
            loss_fn: Any = model.loss_fn
            if isinstance(loss_fn, LossModule):
                loss_fn = lambda y, t: loss(params, microbatch, (y, t))  # noqa: E731
            taken = take_loss(loss_fn, y, batch.targets, has_aux=model.has_aux)
            return taken.total, taken.weight, *taken.sums

        return [*parts, _NamedPart("head or loss_fn", last, params)]

    def _stage(self, k: int, position: StagePosition) -> _NamedPart:
        weights = self._weights
        params, rest = (
            jax.tree.map(lambda x: x[position.rank], tree[position.chunk])
            for tree in (weights.chunks, weights.chunks_rest)
        )
        params = position.views.params.part_of(params)
        rest = position.views.rest.part_of(rest)
        run = self._caller(position.definition, rest, on_whole)
        call = lambda p, x, batch, m: run(p, m, x, batch.extras)[0]  # noqa: E731
        return _NamedPart(f"stages[{k}]", call, params)

    def _caller(
        self, definition: Definition, rest: Tree, method: Any, *, computes: bool = True
    ) -> Callable[..., Tree]:
        streams, fixed = split_streams(rest)
        dtype, axes = self._model.compute_dtype, self._plan.axes.split

        def run(params: Tree, microbatch: int, *given: Any) -> Tree:
            own = nnx.merge_state(fold(streams, microbatch, axes), fixed)
            found = definition.call(method, as_computed(params, dtype), own, *given)
            return as_computed(found, dtype) if computes else found

        return run


def _is_here(tree: Tree) -> bool:
    return all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))
