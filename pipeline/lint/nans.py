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
from typing import Any, NamedTuple

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
    """Run an entry point of the kernel, and look for NaN and infinities in its results."""
    kinds = [k for k, on in NAN_CHECKS.items() if getattr(jax.config, on)]
    with _watching(()):
        results = run(plan, model, weights, batch, **options)
        if not _bad(results, kinds):
            return results
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
    is_bad = [
        is_float(x) and any(bool(jnp.any(test(x))) for test in tests) for x in jax.tree.leaves(tree)
    ]
    return is_bad if any(is_bad) else []


class _NamedPart(NamedTuple):
    """Embedding, a stage, or the head with the loss.

    Attributes:
      call: function of (params, x, batch, microbatch) on one data shard, which returns the output.
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
        self._value = f"{kinds[0]} ({NAN_CHECKS[kinds[0]]})"

    def text(self) -> str:
        """Return a message about the first bad value."""
        what, option = self._kinds[0], NAN_CHECKS[self._kinds[0]]
        others = set(self._plan.axes.names) - {DATA, STAGE}
        is_many = self._plan.stage_meshes is not None
        is_here = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(self._weights))
        if others or is_many or self._model.tables.is_used or not is_here:
            return (
                f"a step of the pipeline returns {what} ({option}); its stages cannot be run by "
                f"themselves where weights are shared out over ranks: look for it on one mesh of "
                f"stage and data, in one process, with vocabulary='ends'"
            )
        parts = self._parts()
        texts = map(functools.partial(self._in_microbatch, parts), range(self._num_microbatches))
        nothing = (
            f"a step of the pipeline returns {what} ({option}), and the same stages run one after "
            f"another compute none: sums over microbatches overflow, or rounding differs; try a "
            f"wider grad_dtype= or compute_dtype="
        )
        return self._in_weights(parts) or next(filter(None, texts), nothing)

    @property
    def _num_microbatches(self) -> int:
        return self._plan.schedule.num_microbatches

    def _in_weights(self, parts: list[_NamedPart]) -> str:
        for part in parts:
            paths = jax.tree_util.tree_leaves_with_path(part.params)
            for (path, _), bad in zip(paths, _bad(part.params, self._kinds), strict=False):
                if bad:
                    where = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
                    return f"{part.name} is given {self._value} in its weights: {where}"
        return ""

    def _in_microbatch(self, parts: list[_NamedPart], microbatch: int) -> str:
        shards, count = self._plan.axes.num_rows, self._num_microbatches
        batch = self._batch.map_rows(  # [N, ...] to [D, M, b, ...]
            lambda x: x.reshape(shards, count, -1, *x.shape[1:])[:, microbatch],
            lambda x: jnp.broadcast_to(x, (shards, *x.shape)),
        )
        x, pullbacks = batch.inputs, []
        if _bad(x, self._kinds):
            return f"inputs hold {self._value}, in microbatch {microbatch}"
        for part in parts:
            run = functools.partial(self._run, part, x, batch, microbatch)
            x, pullback = run()
            if _bad(x, self._kinds):
                return self._message(part, "forward", microbatch, run)
            pullbacks.append((part, pullback))
        if self._model.loss_fn is None:
            return ""
        dy: Leaves = [jnp.ones_like(x[0]), *map(jnp.zeros_like, partition(x[1:])[0])]
        for part, pullback in reversed(pullbacks):
            run = functools.partial(pullback, dy)
            gradients = run()
            if _bad(gradients, self._kinds):
                return self._message(part, "backward", microbatch, run)
            dy = gradients[1]
        return ""

    def _run(self, part: _NamedPart, x: Tree, batch: Batch, microbatch: int) -> tuple[Tree, Any]:
        """Run a part on all data shards, and return its output and pullback."""
        floats, others = partition(x)
        types: list[Tree] = []

        def on_shard(params: Tree, floats: Leaves, others: Leaves, batch: Batch) -> Any:
            y = part.call(params, combine(x, floats, others), batch, microbatch)
            types[:] = [jax.tree.map(lambda leaf: leaf, y)]
            return partition(y)

        on_shards = jax.vmap(on_shard, in_axes=(None, 0, 0, 0), axis_name=DATA)
        run = lambda params, floats: on_shards(params, floats, others, batch)  # noqa: E731
        y, pullback, y_others = jax.vjp(run, part.params, floats, has_aux=True)
        return combine(types[0], y, y_others), pullback

    def _message(
        self, part: _NamedPart, way: str, microbatch: int, again: Callable[[], Any]
    ) -> str:
        """Run a part again operation by operation, and say which operation is bad."""
        op = "no operation by itself does"
        try:
            with _watching(self._kinds), jax.disable_jit():
                again()
        except FloatingPointError as error:
            op = str(error).partition(". ")[0].rstrip(".")
        shards = self._plan.axes.num_rows
        size = len(jax.tree.leaves(self._batch)[0]) // shards // self._num_microbatches
        return (
            f"{part.name} is the first to compute {self._value}, in its {way} pass of microbatch "
            f"{microbatch}, rows {microbatch * size} to {(microbatch + 1) * size - 1}"
            f"{' of each data shard' if shards > 1 else ''}; run op by op: {op}"
        )

    def _parts(self) -> list[_NamedPart]:
        model, params, rest = self._model, self._weights.ends, self._weights.ends_rest
        parts = [self._stage(k, position) for k, position in enumerate(model.stages)]
        embed, head, loss = (
            self._caller(model.ends, rest, method, computes=method is not lost)
            for method in (embedded, headed, lost)
        )
        if model.has_embed:
            call = lambda p, x, _, m: embed(p, m, x)  # noqa: E731
            parts.insert(0, _NamedPart("embed", call, params))

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
        views, weights = position.views, self._weights
        params, rest = (
            view.part_of(jax.tree.map(lambda x: x[position.rank], tree[position.chunk]))
            for view, tree in ((views.params, weights.chunks), (views.rest, weights.chunks_rest))
        )
        run = self._caller(position.definition, rest, on_whole)
        call = lambda p, x, batch, m: run(p, m, x, batch.extras)[0]  # noqa: E731
        return _NamedPart(f"stages[{k}]", call, params)

    def _caller(
        self, definition: Definition, rest: Tree, method: Any, *, computes: bool = True
    ) -> Callable[..., Tree]:
        streams, fixed = split_streams(rest)
        dtype, axes = self._model.compute_dtype, self._plan.axes.split

        def run(params: Tree, microbatch: int, *arguments: Any) -> Tree:
            state = nnx.merge_state(fold(streams, microbatch, axes), fixed)
            y = definition.call(method, as_computed(params, dtype), state, *arguments)
            return as_computed(y, dtype) if computes else y

        return run
