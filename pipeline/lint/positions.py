"""Checks of parts of a model that get some of the positions of a sequence.

Under ``slices=`` a part is called with one slice after the other; under ``batch=P("data",
"context")`` each rank has a part of the positions. A part that mixes positions would silently
compute something else than on whole sequences, and no shape shows it. A part has a method
``call_slice``, or says ``mixes_positions = False``, or is a layer of flax that treats each position
by itself; any other part is tried on numbers (`pipeline.lint.trial`), once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline.base.axes import axes_in
from pipeline.base.tree import Leaves, Tree, blank, combine, partition, signature
from pipeline.base.warn import warn, warn_once
from pipeline.core.options.plan import Plan
from pipeline.core.step.calls.activations import Activations
from pipeline.core.step.calls.ends import embed, finish, take_loss_of
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank, Slices
from pipeline.core.step.calls.slices import CALL_SLICE
from pipeline.lint.trial import FEW, Cut, TooLargeError, Trial, TrialError

# Relative errors by rounding: on normal numbers, whose sum may be small, and on positive numbers.
_LOSS_TOLERANCES = {False: 1e-4, True: 1e-5}
_TO_SLICE = {
    "stages": "give it a method call_slice(x, earlier, part, **extras) that returns (y, own), as "
    "pipeline.layers.Attention has",
    "embed": "give it a method call_slice(inputs, earlier, part) that returns (x, ()) and takes "
    "places from part.places(t), or give it positions as a part of inputs",
    "head": "let the last stage do what mixes positions",
    "loss_fn": "shift targets before they are cut, as pipeline.training.batches.next_tokens does, "
    "and return (sum, weight)",
}
_TO_SPLIT = {
    "stages": "for causal attention use pipeline.layers.Attention(..., context_axis={axis!r}), or "
    "take slices= in place of the axis; where a position reads later ones too, as in an encoder, "
    "fetch what other ranks hold by a collective over {axis!r} (jax.lax.all_gather of keys and "
    "values, collectives.exchange)",
    "embed": "begin to count at jax.lax.axis_index({axis!r}) times the positions of a rank, or "
    "give positions as a leaf of inputs or extras",
    "loss_fn": "shift targets before they are split, as pipeline.training.batches.next_tokens "
    "does, and return (sum, weight) that are both sums over positions; or add up over all ranks "
    "first, jax.lax.psum(x, {axis!r}), the sum and its divisor alike",
}
_TO_SPLIT["head"] = _TO_SPLIT["stages"]


@dataclass(frozen=True)
class ModelPart:
    """A part of a model.

    Attributes:
      call: the part as a function of a rank, which has the batch of the call, of the input and of
        weights.
      weights: a function from a rank to the part's weights.
      x: the types of the input, on one rank; () for embed.
      look: a function that returns whether the part says, or is known, to treat each position by
        itself, and whether it has a method for slices.
      key: equal for parts that are one computation.
    """

    name: str
    call: Callable[..., Tree]
    weights: Callable[..., Leaves]
    x: Tree
    look: Callable[[], tuple[bool, bool]]
    key: Any

    @property
    def kind(self) -> str:
        """The name of the part, "stages" for every stage."""
        return self.name.partition("[")[0]

    def with_pullback(self, rank: Rank, x: Tree, weights: Leaves | None = None) -> Any:
        """Call the part; return the floats of its result, and its gradients for these."""
        floats, others = partition(x)

        def run(weights: Leaves, floats: Leaves) -> Leaves:
            return partition(self.call(rank, combine(x, floats, others), weights))[0]

        weights = self.weights(rank) if weights is None else weights
        y, back = jax.vjp(run, weights, floats)
        return y, back(y)

    def trial(
        self,
        rank: Rank,
        cut: Cut,
        x_dims: Sequence[int | None],
        dims: Sequence[int | None],
        most: int | None = None,
    ) -> Trial:
        """Trace the part on a cut batch: on all rows, or on one row if they are too many.

        Args:
          x_dims: the dim of each leaf of ``x`` that is cut, or None.
          dims: the dim of each leaf of the batch.
          most: the number of positions that suffice, in dim 1; None for all positions.
        """
        slices = [rank.slices] * len(cut.shares)
        if cut.shares == rank.slices.lengths:
            numbers = range(rank.slices.count)
            slices = [dataclasses.replace(rank.slices, number=number) for number in numbers]
        elif rank.slices.lengths or cut.axis:
            slices = [Slices(1 if cut.axis else rank.slices.count)] * len(cut.shares)

        def on(slices: Slices) -> Callable[..., Tree]:
            def call(x: Tree, unit: Any) -> Tree:
                batch = unit.map_rows(lambda x: x[None], lambda x: x)
                part = dataclasses.replace(rank, batch=batch, batches=(), slices=slices)
                return self.call(part, x, self.weights(part))

            return call

        functions = list(map(on, slices[:1] if cut.axis else slices)), on(Slices())
        crop = functools.partial(_cropped, (self.x, unit_of(rank)), specs_of(rank))
        # A loss may bound its weight from below, and one row may have less. So all rows are tried,
        # unless they are too many.
        *sizes, smallest = dict.fromkeys([(None, None), (1, None), (1, most)])
        for size in sizes:
            with contextlib.suppress(TooLargeError):
                return Trial(*functions, crop(*size), [*x_dims, *dims], cut, FEW)
        return Trial(*functions, crop(*smallest), [*x_dims, *dims], cut)


def _cropped(types: Tree, specs: Sequence[Any], rows: int | None, positions: int | None) -> Tree:
    # The specs are those of the batch's leaves; every leaf of the part's own input has rows.
    leaves, treedef = jax.tree.flatten(types)
    specs = [()] * (len(leaves) - len(specs)) + list(specs)
    cut = [x for x, spec in zip(leaves, specs, strict=True) if spec is not None and x.ndim > 2]
    largest: Any = max(cut, key=lambda x: math.prod(x.shape), default=None)
    t = None if largest is None or positions is None else largest.shape[1]

    def crop(x: Any, spec: Any) -> Any:
        # The last dim of the largest leaf holds features or words, even if they are as many.
        inner = x.shape[1 : -1 if x is largest else None]
        shape = [min(size, positions or size) if size == t else size for size in inner]
        first = x.shape[:1] if spec is None or rows is None else (rows,) * (x.ndim > 0)
        return x.update(shape=(*first, *shape, *x.shape[1 + len(inner) :]))

    return jax.tree.unflatten(treedef, map(crop, leaves, specs))


def unit_of(rank: Rank) -> Any:
    """Return the types of the batch of one call."""
    return jax.eval_shape(lambda: rank.batch.map_rows(lambda x: x[0], lambda x: x))


def specs_of(rank: Rank) -> list[Any]:
    """List the spec of each leaf of the batch; None for a leaf without a batch axis."""
    specs = [spec for specs in rank.batch.specs for spec in specs]
    return specs or [()] * len(jax.tree.leaves(rank.batch))


def parts_of(rank: Rank, activations: Activations) -> Iterator[ModelPart]:
    """Yield embed, the stages that differ in code or input, and the head."""
    if rank.model.has_embed:
        yield ModelPart("embed", _embed, _ends, (), lambda: _look_at_ends(rank, "embed"), "embed")
    seen = set()
    for k, position in enumerate(rank.model.stages):
        key = rank.code(position), signature(activations.types[k])
        if key not in seen:
            seen.add(key)
            call: Any = functools.partial(_stage, k=k)
            weights: Any = functools.partial(_stage_weights, k=k)
            look = functools.partial(_look, rank, k)
            yield ModelPart(f"stages[{k}]", call, weights, activations.types[k], look, key)
    if rank.model.has_head:
        y = activations.types[-1]
        yield ModelPart("head", _head, _ends, y, lambda: _look_at_ends(rank, "head"), "head")


def loss_of(rank: Rank, activations: Activations) -> ModelPart:
    """Return the loss, as a function of outputs to (sum, weight)."""
    y = activations.types[-1]

    def look() -> tuple[bool, bool]:
        return _treats_alone(rank.model.loss_fn) or _look_at_ends(rank, "loss_fn")[0], False

    outputs = jax.eval_shape(lambda: _head(rank, blank(y, rank.axes), rank.ends))
    return ModelPart("loss_fn", _loss, _ends, outputs, look, "loss_fn")


def _embed(rank: Rank, _: Tree, weights: Leaves) -> Tree:
    return embed(rank, weights, jax.tree.map(lambda x: x[0], rank.batch.inputs), 0).value


def _stage(rank: Rank, x: Tree, weights: Leaves, k: int) -> Tree:
    stage = StageKind(rank, (k,))
    return stage.stage(weights, *stage.example()[1:], x).value


def _stage_weights(rank: Rank, k: int) -> Leaves:
    return StageKind(rank, (k,)).example()[0]


def _head(rank: Rank, y: Tree, weights: Leaves) -> Tree:
    return finish(rank, weights, y, 0, take_loss=False).value


def _loss(rank: Rank, outputs: Tree, weights: Leaves) -> Any:
    taken, _ = take_loss_of(rank, weights, outputs, 0)
    return taken.total, taken.weight


def _ends(rank: Rank) -> Leaves:
    return rank.ends


# --- what a part says ---


def _look(rank: Rank, k: int) -> tuple[bool, bool]:
    facts: list[tuple[bool, bool]] = []
    StageKind(rank, (k,)).look(lambda module: _note_facts(module, facts))
    return facts[0]


def _look_at_ends(rank: Rank, name: str) -> tuple[bool, bool]:
    facts: list[tuple[bool, bool]] = []

    def call() -> Any:
        params = jax.tree.unflatten(jax.tree.structure(rank.weights.ends), rank.ends)
        look = lambda ends: _note_facts(getattr(ends, name, None), facts)  # noqa: E731
        return rank.model.ends.call(look, params, rank.weights.ends_rest)

    jax.eval_shape(call)
    return facts[0]


def _note_facts(part: Any, facts: list[tuple[bool, bool]]) -> jax.Array:
    facts.append((_treats_alone(part), hasattr(part, CALL_SLICE)))
    for _, node in nnx.iter_graph(part) if isinstance(part, nnx.Module) else ():
        if isinstance(node, nnx.Module) and hasattr(type(node), CALL_SLICE):
            _check_call_slice(type(node))
    return jnp.zeros(())


def _treats_alone(part: Any) -> bool:
    """Tell whether a part says, or is known, to treat each position by itself."""
    if (mixes := getattr(part, "mixes_positions", None)) is not None:
        return mixes is False
    if is_ours(part):
        return True
    if type(part) is nnx.Sequential:
        return all(map(_treats_alone, part.layers))
    axes = getattr(part, "reduction_axes", getattr(part, "axis", -1))
    return type(part) in _POSITION_WISE and axes in (-1, (-1,))


# Layers and losses that are tested on slices, and on a context axis, from which they fetch.
_OURS = "pipeline.models.", "pipeline.base.agreed."
_POSITION_WISE = {nnx.Linear, nnx.LinearGeneral, nnx.Embed, nnx.LayerNorm, nnx.RMSNorm, nnx.Dropout}


def is_ours(part: Any) -> bool:
    """Tell whether a module or a function is one of this library's models and losses."""
    return str(getattr(part, "__module__", "")).startswith(_OURS)


def _check_call_slice(kind: type) -> None:
    """Check that a subclass which overrides ``__call__`` also overrides ``call_slice``."""
    call, call_slice = (
        next((n for n, base in enumerate(kind.__mro__) if name in vars(base)), None)
        for name in ("__call__", CALL_SLICE)
    )
    if call is not None and call_slice is not None and call < call_slice:
        raise ValueError(
            f"{kind.__name__} has a __call__ of its own, and the call_slice of "
            f"{kind.__mro__[call_slice].__name__}, which slices=N would run in its place: give it "
            f"a call_slice of its own that does the same, or leave slices out"
        )


# --- slices ---


def check_slices(plan: Plan, rank: Rank, activations: Activations, *, take_loss: bool) -> None:
    """Refuse parts that mix positions without a method for slices; warn of parts that may do so.

    Raises:
      ValueError: a part mixes positions.
    """
    pairs = list(zip(jax.tree.leaves(unit_of(rank)), specs_of(rank), strict=True))
    # A leaf with one entry in dim 1 is equal in every slice; such a leaf may come first.
    t = max(x.shape[1] for x, spec in pairs if spec is not None and x.ndim > 1)

    def dim_of(x: Any, spec: Any = ()) -> int | None:
        return 1 if spec is not None and x.ndim > 1 and x.shape[1] == t else None

    dims = [dim_of(*pair) for pair in pairs]
    sees = f"with slices={rank.slices.count} it sees one slice of a sequence at a time"

    def try_part(part: ModelPart, cut: Cut) -> Trial:
        x_dims = [dim_of(x) for x in jax.tree.leaves(part.x)]
        if x_dims and not any(x_dims):
            raise TrialError(f"no array that it is given is [rows, {t}, ...]")
        return part.trial(rank, cut, x_dims, dims)

    equal = Cut((1,) * rank.slices.count)
    cut = Cut(rank.slices.lengths) if rank.slices.lengths else equal
    for part in parts_of(rank, activations):
        _, has_slices = part.look()
        if has_slices:
            continue
        start, remedy = functools.partial(try_part, cut=cut), _TO_SLICE[part.kind]
        if where := _find_mixing(plan, part, start, sees, f"{remedy}, or leave slices out"):
            raise ValueError(
                f"{part.name} mixes positions ({where}), and {sees}: {remedy}, or leave slices out"
            )
    if take_loss:
        _check_loss_of_slices(plan, loss_of(rank, activations), try_part, equal, cut, sees)


def _check_loss_of_slices(
    plan: Plan,
    loss: ModelPart,
    try_part: Callable[[ModelPart, Cut], Trial],
    equal: Cut,
    cut: Cut,
    sees: str,
) -> None:
    key = "tried", loss.key, signature(loss.x), sees
    if key in plan.compiled.warned or (loss.look()[0] and not plan.lint.tries_declared):
        return
    growth = try_loss(lambda: try_part(loss, equal))
    is_uneven = growth is None and cut != equal and try_loss(lambda: try_part(loss, cut))
    if growth is not None and growth.is_constant:
        raise ValueError(
            f"loss_fn sums over positions and divides by what does not grow as they do, and "
            f"with slices={len(cut.shares)} its value would be {growth.ratio:.3g} of that of "
            f"whole sequences: return (sum, weight) that are both sums over positions, or a mean "
            f"over them, or leave slices out"
        )
    if growth is not None:
        remedy = f"{_TO_SLICE['loss_fn']}, or leave slices out"
        raise ValueError(f"loss_fn mixes positions ({growth.text}), and {sees}: {remedy}")
    if is_uneven:
        raise ValueError(
            f"loss_fn returns (sum, weight) that do not grow with positions, and "
            f"slices={cut.shares} would count equally though their lengths differ: return (sum, "
            f"weight) that are both sums over positions, or a mean over them, or leave slices out"
        )
    plan.compiled.warned.add(key)


def _find_mixing(
    plan: Plan, part: ModelPart, start: Callable[[ModelPart], Trial], sees: str, remedy: str
) -> str:
    """Try a part once; return where its result differs, "" if nowhere; warn if none can tell."""
    key, warned = ("tried", part.key, signature(part.x), sees), plan.compiled.warned
    is_declared, _ = part.look()
    if key in warned or (is_declared and not plan.lint.tries_declared):
        return ""
    try:
        where = start(part).difference()
    except Exception as error:  # noqa: BLE001  any error of the user's code
        if not is_declared:
            why = str(error).partition("\n")[0]
            warn_once(
                f"whether {part.name} mixes positions cannot be told ({why}), and {sees}: if it "
                f"does, {remedy}; if it does not, let it say so, mixes_positions = False",
                warned,
                ("positions", part.name, sees),
            )
        return ""
    if is_declared and where:
        warn_once(
            f"{part.name} says mixes_positions = False and mixes positions ({where}), and {sees}: "
            f"{remedy}",
            warned,
        )
        return ""
    if not where:
        warned.add(key)
    return where


@dataclass(frozen=True)
class Growth:
    """The values of a loss that differ between the whole and its parts.

    Attributes:
      whole, parts: pairs of values on several random numbers.
    """

    whole: tuple[float, ...]
    parts: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The value of the parts divided by the value of the whole."""
        return self.parts[0] / self.whole[0]

    @property
    def is_constant(self) -> bool:
        """True if parts have a fixed share of the whole, as sums that are not divided have."""
        pairs = zip(self.parts, self.whole, strict=True)
        ratios = [parts / whole if whole else math.nan for parts, whole in pairs]
        return len(ratios) > 1 and all(math.isclose(r, ratios[0], rel_tol=1e-3) for r in ratios)

    @property
    def text(self) -> str:
        """The values on the first numbers."""
        whole, parts = self.whole[0], self.parts[0]
        return f"{whole:.4g} for random numbers together, {parts:.4g} for their parts"


def try_loss(start: Callable[[], Trial]) -> Growth | None:
    """Compare a loss (sum, weight) of the whole with the loss of the parts.

    Some losses take positive numbers, such as shares or weights of at least 1. So a loss that
    agrees on normal numbers or on positive numbers is right, if the losses of its parts differ.

    Returns:
      The values of the loss if they differ; None if they agree, or if the loss cannot be tried.
    """
    try:
        trial = start()
        results = {
            most: trial.run(positive=is_positive) for is_positive, most in _LOSS_TOLERANCES.items()
        }
    except Exception:  # noqa: BLE001  any error of the user's code
        return None
    pairs = []
    for most, ((total, weight), parts) in results.items():
        sums, weights = (float(sum(part[n] for part in parts)) for n in range(2))
        with np.errstate(all="ignore"):
            whole, joined = float(np.divide(total, weight)), float(np.divide(sums, weights))
            losses = [float(np.divide(*part)) for part in parts]
        if math.isfinite(whole) and math.isfinite(joined):
            if abs(whole - joined) > most * max(abs(whole), abs(joined)):
                pairs.append((whole, joined))
            # A root of nearly equal losses is nearly a mean, and tells nothing.
            elif max(losses) - min(losses) > 0.1 * max(map(abs, losses)):
                return None
    return Growth(*zip(*pairs, strict=True)) if pairs else None


# --- positions over a mesh axis ---


def warn_of_split_positions(
    plan: Plan, rank: Rank, activations: Activations, *, take_loss: bool
) -> None:
    """Warn of stages, embed, head and loss that mix the positions of one rank only."""
    axes = plan.axes
    for axis in axes.positions:
        unit, count = jax.tree.leaves(unit_of(rank)), axes.size([axis])
        dims = [_dim(spec, axis) for spec in specs_of(rank)]
        split = [(x.shape[dim], dim) for x, dim in zip(unit, dims, strict=True) if dim is not None]
        if count == 1 or not split or split[0][0] == 1:  # size 1 does not identify a dim
            continue
        over = f"batch= splits them over {count} ranks of {axis!r}"
        cut = Cut((1,) * count, axis)
        (t, usual), *_ = split

        def dims_of(part: ModelPart, t: int = t, usual: int = usual) -> list[int | None]:
            leaves = jax.tree.leaves(part.x)
            return [usual if x.ndim > usual and x.shape[usual] == t else None for x in leaves]

        def try_part(part: ModelPart, cut: Cut = cut, dims: Any = dims) -> Trial:
            return part.trial(rank, cut, dims_of(part), dims)

        for part in parts_of(rank, activations):
            if jax.tree.leaves(part.x) and not any(dims_of(part)):
                continue  # its positions are not known
            remedy = _TO_SPLIT[part.kind].format(axis=axis)
            sees = f"{over}, each of which has a part"
            if where := _find_mixing(plan, part, try_part, sees, remedy):
                warn_once(
                    f"{part.name} mixes positions ({where}), and {over}: {_ALONE}: {remedy}",
                    plan.compiled.warned,
                    ("split positions", part.name, axis),
                )
        if take_loss:
            loss = loss_of(rank, activations)
            if plan.lint.tries_declared or not loss.look()[0]:
                _warn_of_split_loss(plan, functools.partial(try_part, loss), over, axis)


_ALONE = "each rank mixes its own alone, and the result is not that of whole sequences"


def _warn_of_split_loss(plan: Plan, start: Callable[[], Trial], over: str, axis: str) -> None:
    key = "split loss", over
    if key in plan.compiled.warned:
        return
    plan.compiled.warned.add(key)
    if (growth := try_loss(start)) is None:
        return
    text = (
        f"loss_fn mixes positions ({growth.text}), and {over}: {_ALONE}: "
        f"{_TO_SPLIT['loss_fn'].format(axis=axis)}"
    )
    if growth.is_constant:
        text = (
            f"loss_fn divides a sum over positions by a number that does not grow as they do, and "
            f"{over}: the step takes the mean of the ranks' losses, which is not the loss of whole "
            f"sequences: return (sum, weight) that are both sums over positions, or a mean over "
            f"them"
        )
    warn(text)


def _dim(spec: Any, axis: str) -> int | None:
    """Return the dim that a spec splits over an axis; None if the spec splits no dim over it."""
    return next((n for n, entry in enumerate(spec or ()) if n and axis in axes_in(entry)), None)
