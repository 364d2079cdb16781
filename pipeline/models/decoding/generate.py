"""Generation of text with a pipeline: the public function and its single program.

Letters: S ranks, M microbatches, D data shards, N prompts of at most P tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from collectives import STAGE, vary
from pipeline.base.arguments import is_whole
from pipeline.base.tree import Tree, check_integers, signature
from pipeline.core.model.model import Batch, Model, Weights
from pipeline.core.options.plan import Plan
from pipeline.core.placement import meshes
from pipeline.core.step.calls.activations import follow
from pipeline.core.step.calls.declared import DeclaredState
from pipeline.core.step.calls.ends import ends_usage
from pipeline.core.step.calls.kind import StageKind
from pipeline.core.step.calls.rank import Rank
from pipeline.core.step.jitted import PerPlan
from pipeline.core.step.operands import check_arrays, make_operands
from pipeline.core.step.ranks import make_rank, run_on_ranks
from pipeline.layers_view.replace import typed, with_weights_of
from pipeline.models.decoding import caches
from pipeline.models.decoding.flow import Flow, Rows
from pipeline.models.decoding.recompute import reader, recompute
from pipeline.models.decoding.sampling import Choice, as_keys, make_draw
from schedules.core.timetable import loop_placement

Start = Callable[[Any, int, int], None]
MOST_AT_ONCE = 256  # tokens of a prompt in one call: each has scores with all positions


def generate(
    pipe: Any,
    prompts: Any,
    max_new_tokens: int,
    *,
    lengths: Any = None,
    key: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    top_k: int = 0,
    top_p: float | None = None,
    stop: int | Sequence[int] | None = None,
    pad: int = 0,
    prefill: int | None = None,
    num_microbatches: int | None = None,
    start: Start | None = None,
    cache: nnx.filterlib.Filter = nnx.Cache,
) -> jax.Array:
    """Continue prompts: [N, max_new_tokens] int32, the tokens that the plain model generates.

    Every stage keeps the caches of its own layers, for each microbatch. Microbatches pass through
    the ranks one after another, each with its next token as soon as it is known: with M >= S no
    rank waits. The whole generation is one program, compiled once for its placement, M, shapes and
    options. A causal model without caches, and any causal model with ``stage_meshes``, runs on the
    whole text again for every token, by ``pipe(text)``; ``prefill`` and ``cache`` have no effect
    then.

    Args:
      pipe: a `Pipeline` from tokens, [b, t] integers, to [b, t, words] logits, with equal stages.
        Embed, stages and head read other positions only through caches. With a V placement every
        call first moves the weights to a loop placement.
      prompts: [N, P] integers, with any N.
      max_new_tokens: the number of tokens to add to each prompt.
      lengths: [N] the lengths of the prompts, if not all are P: rows are padded on the right.
      key: the key to draw tokens; token i of row n is drawn with fold_in(fold_in(key, n), i). Or
        [N] keys, one for each row, folded with i. None takes the likeliest token.
      temperature: the divisor of logits before a draw; 0 takes the likeliest token.
      top_k: the number of likeliest words that may be drawn; 0 for all.
      top_p: among these, only the fewest likeliest words whose probabilities, at this temperature,
        add up to top_p may be drawn; None for all words.
      stop: a token that ends a row, or several such tokens. The call ends when all rows have ended.
      pad: the token of positions after the end of a row.
      prefill: the number of tokens of every prompt to feed in one call, if stages take several at a
        time (flax's MultiHeadAttention does not); the rest are fed one by one. By default the
        length of the shortest prompt, in calls of up to 256, if all caches declare ``prefills =
        True``.
      num_microbatches: M; by default S, or fewer with fewer rows.
      start: ``start(module, rows, length)`` prepares a copy of a stage, embed or head in place; by
        default `start_decoding`.
      cache: a filter of the cache variables; each microbatch has its own.

    Raises:
      ValueError: arguments that do not fit, or a pipeline that cannot decode; the message says why.
    """
    has_caches = _uses_caches(pipe, start)
    if has_caches:
        _check_mesh(pipe)
        pipe = _in_a_loop(pipe)
    plan = pipe.plan
    tokens, lengths = _check_prompts(prompts, lengths)
    rows, width = tokens.shape
    _check_numbers(max_new_tokens=max_new_tokens)
    draw, top_k = make_draw(temperature, top_k, top_p)
    if not (is_whole(pad, -(2**31), numpy=True) and pad < 2**31):
        raise ValueError(f"pad={pad!r}: must be a token, an integer of int32")
    if has_caches and start is None:
        caches.check_embed(pipe, tokens, max_new_tokens)
    prefilled = _prefilled(prefill, lengths, width, able=start is None and caches.takes_many(pipe))
    # By default one microbatch per rank, so that none waits; more would only make them smaller.
    if num_microbatches is None:
        num_microbatches = min(plan.schedule.num_ranks, -(-rows // plan.axes.num_rows))
    _check_numbers(num_microbatches=num_microbatches)
    more = -rows % (num_microbatches * plan.axes.num_rows)
    keys = _row_keys(key, rows)

    def filled(x: jax.Array) -> jax.Array:
        """Pad the batch with rows that the result leaves out."""
        return jnp.concatenate([x, jnp.repeat(x[:1], more, axis=0)])

    # Whatever changes the program is static; another temperature, top_p or key compiles nothing.
    words = getattr(pipe.head, "words", None)
    words = words if is_whole(words, 1, numpy=True) else None
    choice = Choice(max_new_tokens, top_k, top_p is not None, _stops(stop), int(pad), words)
    if not has_caches:
        own = None if keys is None else filled(keys)
        texts, sizes, own = _anywhere((filled(tokens), filled(lengths), own))
        call = reader(pipe, num_microbatches)
        return recompute(call, texts, sizes, own, draw, choice)[:rows]
    # Lengths and keys are passed as targets: they too have a row for each prompt.
    given = filled(lengths), None if keys is None else filled(jax.random.key_data(keys))
    parts = plan, pipe.chunks, pipe.ends, filled(tokens), given, None
    axes = replace(plan.axes, batch=(None,) * 3)
    operands = make_operands(*parts, num_microbatches=num_microbatches, axes=axes)
    model, weights, batch = check_arrays("generate", operands)
    options: dict[str, Any] = {"choice": choice, "prefilled": prefilled, "M": num_microbatches}
    options["impl"] = None if keys is None else str(jax.random.key_impl(keys))
    with meshes.entered(plan.mesh, plan.home):
        weights = meshes.untyped(weights, plan.mesh)
        tokens = _decode(plan, model, weights, batch, draw, **options, start=start, cache=cache)
    tokens = meshes.typed(tokens, meshes.mesh_of_results(plan.mesh), PartitionSpec())
    return tokens[:rows]


@PerPlan
def _decode(
    plan: Plan,
    model: Model,
    weights: Weights,
    batch: Batch,
    draw: tuple[jax.Array, jax.Array] | None = None,
    *,
    choice: Choice,
    prefilled: tuple[int, int],
    M: int,
    start: Start | None,
    cache: Any,
    impl: str | None,
) -> jax.Array:
    """Run the compiled generation; return [N, max_new_tokens] tokens."""

    def body(_: Any, weights: Weights, batch: Batch, draw: tuple[Any, Any]) -> jax.Array:
        rank = make_rank(plan, model, weights, batch, M)
        gathers = plan.options.gather in (None, "step")
        rank = replace(rank, chunks=rank.chunks.make_ready(gathers=gathers))
        prompts, (lengths, data) = rank.batch.inputs, rank.batch.targets
        keys = None if data is None else jax.random.wrap_key_data(data, impl=impl)
        length = prompts.shape[2] + choice.max_new_tokens - 1
        begin = start or functools.partial(caches.start_decoding, dtype=plan.compute_dtype)
        ready = lambda module: begin(module, prompts.shape[1], length)  # noqa: E731
        decoder = caches.make_decoder(rank, cache, ready)
        rank = replace(rank, model=decoder.model, weights=decoder.weights(rank.weights))
        rows = Rows(prompts, lengths, keys, draw, choice, rank.axes)
        lanes = max(M, plan.schedule.num_ranks) + 1
        tokens = jax.new_ref(vary(jnp.zeros((lanes, prompts.shape[1]), jnp.int32), rank.axes))
        phases = _phases(*prefilled, length)
        rank = _with_cache_types(rank, prompts[:, :, : phases[0][0]])
        declared = None
        for width, first, steps in phases:
            declared, kinds = _kinds(rank, prompts[:, :, :width], declared, M)
            Flow(kinds, rows, tokens, width=width, start=first, steps=steps).run()
        # The last rank has all tokens; the sum makes them equal on all ranks, also by type.
        out = rows.out[...]
        is_last = jax.lax.axis_index(STAGE) == plan.schedule.num_ranks - 1
        out = jax.lax.psum(jnp.where(is_last, out, jnp.zeros_like(out)), STAGE)
        return out.reshape(-1, choice.max_new_tokens)

    return run_on_ranks(plan, model, plan.forward, body, plan.axes.row_spec)(weights, batch, draw)


def _anywhere(tree: Any) -> Any:
    """Free this process's arrays from the devices that they are committed to."""

    def free(x: jax.Array) -> jax.Array:
        if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.asarray(np.asarray(jax.random.key_data(x)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jnp.asarray(np.asarray(x))

    return jax.tree.map(free, tree)


def _phases(prefill: int, calls: int, length: int) -> list[tuple[int, int, int]]:
    """Return the phases of calls of equal width: width, first position, number of calls."""
    if prefill == 1:
        return [(1, 0, length)]
    done = prefill * calls
    return [(prefill, 0, calls), *([(1, done, length - done)] if length > done else [])]


def _prefilled(
    prefill: int | None, lengths: jax.Array, width: int, *, able: bool
) -> tuple[int, int]:
    """Return the number of tokens per prefill call, and the number of such calls.

    Args:
      lengths: [N] lengths of prompts.
      able: whether caches take several tokens.
    """
    is_known = not isinstance(lengths, jax.core.Tracer)
    shortest = int(np.min(lengths)) if is_known else width
    if prefill is not None:
        _check_numbers(prefill=prefill)
        if prefill > shortest:
            raise ValueError(
                f"prefill={prefill} with a prompt of {shortest} tokens: the first {prefill} tokens "
                f"of every prompt are fed in one call; use prefill={shortest} or less"
            )
        return prefill, 1
    if not able or not is_known:
        return 1, 1
    if shortest < width:  # a power of two, so that many lengths need few programs
        shortest = 1 << (shortest.bit_length() - 1)
    calls = -(-shortest // MOST_AT_ONCE)
    return shortest // calls, calls


def _with_cache_types(rank: Rank, inputs: Tree) -> Rank:
    """Make caches vary over all mesh axes over which the values written to them vary.

    On a mesh with ``tensor`` a rank writes keys and values of its own heads to caches that begin as
    equal zeros everywhere. The types in the kernel differ: they say which values vary. One cache
    may feed another, so this is repeated until nothing changes.
    """
    while True:
        wider = caches.with_types_of_writes(*_trace_kinds(rank, inputs))
        if wider is None:
            return rank
        rank = replace(rank, weights=wider)


def _kinds(
    rank: Rank, inputs: Tree, declared: DeclaredState | None, M: int
) -> tuple[DeclaredState, list[StageKind]]:
    """Return the stages for calls of one width; ``declared`` has the caches' earlier values."""
    rank, kinds = _trace_kinds(rank, inputs)
    if declared is None:
        usage_of = {k: usage for kind in kinds for usage in [kind.usage()] for k in kind.stages}
        usages = [usage_of[k] for k in range(len(usage_of))]
        usage_of_ends = ends_usage(rank, kinds[0].y, take_loss=False)
        declared = DeclaredState(rank, usages, usage_of_ends, M, again=False, each=True)
    return declared, _trace_kinds(replace(rank, declared=declared), inputs)[1]


def _trace_kinds(rank: Rank, inputs: Tree) -> tuple[Rank, list[StageKind]]:
    """Return the rank with the facts of a trace, and the kinds of stages of each chunk."""
    rank, activations = follow(replace(rank, batch=Batch(inputs, (), {})))
    rank.lint.ends(rank, activations)
    x, *others = activations.types
    if any(signature(y) != signature(x) for y in others):
        raise ValueError(
            "generate() needs stages that are alike in the activations that they take and return, "
            "and these are not; make them so (what only the first or the last has belongs to "
            "embed= or head=)"
        )
    return rank, [
        StageKind(rank, stages, x=x, y=x, wire=x) for stages in rank.same_stages().values()
    ]


def _in_a_loop(pipe: Any) -> Any:
    """Return a pipeline with these weights whose placement sends messages around a ring.

    Its plan is made once, and cached in the pipeline's plan together with its compiled programs.
    """
    plan = pipe.plan
    if plan.schedule.placement == loop_placement(plan.schedule.num_stages, plan.schedule.num_ranks):
        return pipe
    changes = {"schedule": None, "pattern": None}  # the default schedule has a loop placement
    if (like := plan.compiled.ring) is None:
        like = plan.compiled.ring = typed(pipe).replace(**changes)
    looped = with_weights_of(pipe, like)
    if looped is None:  # stages share storage or move to other devices: lay them out again
        looped = pipe.replace(**changes)
        looped.plan = like.plan
    return looped


def _uses_caches(pipe: Any, start: Start | None) -> bool:
    """Tell whether a generation fills caches; with ``stage_meshes`` it does not.

    Raises:
      ValueError: ``start`` with ``stage_meshes``.
    """
    if pipe.plan.stage_meshes is None:
        return start is not None or caches.may_have_caches(pipe)
    if start is not None:
        raise ValueError(
            "generate(start=) fills caches in one program on one mesh, and stage_meshes= gives "
            "each rank its own: leave start out, so that each token reads the whole text, or call "
            "it on pipe.replace(engine='scan', stage_meshes=None, mesh=mesh)"
        )
    return False


def _check_mesh(pipe: Any) -> None:
    """Raise ValueError for a mesh on which a generation with caches cannot run."""
    auto, positions = pipe.plan.auto_axes, pipe.plan.axes.positions
    if positions:
        raise ValueError(
            f"generate() of a model with caches feeds one position at a time, and this mesh splits "
            f"positions over {' and '.join(map(repr, positions))}; use pipe.replace(mesh=..., "
            f"batch=...) without that axis"
        )
    if auto:
        raise ValueError(
            f"generate() of a model with caches runs where the kernel has every mesh axis in its "
            f"own hands, and auto_axes={auto!r} leaves {' and '.join(map(repr, auto))} to the "
            f"compiler; use pipe.replace(auto_axes=(), mesh=...) with a mesh of the other axes"
        )


def _check_prompts(prompts: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    check_integers("prompts", prompts)
    tokens = jnp.asarray(prompts)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or 0 in tokens.shape:
        raise ValueError(
            f"prompts is {tokens.dtype}{list(tokens.shape)}; give integers [N, P], at least one "
            f"token of at least one sequence"
        )
    rows, width = tokens.shape
    counts = jnp.full(rows, width, jnp.int32) if lengths is None else jnp.asarray(lengths)
    if counts.shape != (rows,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"lengths is {counts.dtype}{list(counts.shape)}; give one integer for each of {rows} "
            f"prompts"
        )
    if not isinstance(counts, jax.core.Tracer) and not ((counts >= 1) & (counts <= width)).all():
        raise ValueError(
            f"lengths has {int(counts.min())} to {int(counts.max())}; a prompt has 1 to {width} "
            f"tokens here"
        )
    return tokens.astype(jnp.int32), counts.astype(jnp.int32)


def _check_numbers(**given: Any) -> None:
    for name, value in given.items():
        if not is_whole(value, 1, numpy=True):
            raise ValueError(f"{name}={value!r}: must be an integer >= 1")


def _stops(stop: Any) -> tuple[int, ...]:
    if stop is None:
        return ()
    many = isinstance(stop, Sequence | np.ndarray | jax.Array) and np.shape(stop) != ()
    tokens = list(stop) if many else [stop]
    if not all(is_whole(token, 0, numpy=True) and token < 2**31 for token in tokens):
        raise ValueError(
            f"stop={stop!r}: must be a token, an integer >= 0, or a list of tokens, any of which "
            f"ends a row"
        )
    return tuple(int(token) for token in tokens)


def _row_keys(key: Any, rows: int) -> jax.Array | None:
    if key is None:
        return None
    key = as_keys(key)
    if key.shape == ():
        row_keys: jax.Array = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
        return row_keys
    if key.shape != (rows,):
        raise ValueError(f"key is {list(key.shape)} keys; give one, or one for each of {rows} rows")
    keys: jax.Array = key
    return keys
