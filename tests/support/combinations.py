"""Random combinations of options of a decoder's pipeline, against the plain decoder.

Experts, context axes, slices, offload, windows, ZeRO and FSDP, state, accumulation, padding and the
engine are drawn. The plain model runs on one device, on the rows and positions that are data. A
refusal of a combination names an option.

A fifth of the cases have a slip of the user's: an attribute that a call changes, a collective over
``stage``, or a loss that is no mean over rows. Each must be refused or warned of in our words.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, with_losses
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.layers import Context, ExpertState
from pipeline.models.decoders.config import ExpertsConfig
from pipeline.training.batches import PaddedWords
from pipeline.training.step import Step
from tests.support.close import distance

LENGTH, ROWS, WORDS = 8, 8, 24
FAMILIES = {1: ["gpipe", "1f1b", "zb_h1"], 2: ["interleaved_1f1b", "looped_bfs", "zb_v"]}
TOLERANCE = 5e-5  # a router's near-ties can exceed it
OURS = re.compile(
    r"\b(engine|schedule|slices|offload|remat|data_parallel|gather|batch|num_microbatches)="
)


@dataclass(frozen=True)
class Combination:
    """Options of a pipeline and its batch; each as `Pipeline` or a decoder takes it."""

    seed: int
    stage: int
    chunks: int
    data: int
    context: int
    expert: int
    way: str
    schedule: str | None
    remat: str | None
    slices: Any
    offload: Any
    data_parallel: str
    gather: str
    experts: Any
    microbatches: int
    calls: int
    more_rows: int
    more_positions: int
    engine: str
    slip: str | None


def draw(seed: int) -> Combination:
    """The combination of a seed."""
    rng = random.Random(f"options {seed}")
    slices = rng.choice([None, None, None, 2, (3, 5)])
    chunks = 1 if slices else rng.choice([1, 1, 2])
    data, context, expert = (rng.choice([1, 1, 2]) for _ in range(3))
    experts = rng.choice(
        [
            None,
            {},
            {"z_weight": 0.1},
            {"balance_weight": 0.2, "balance": "sequence"},
            {"selection_bias": True, "bias_rate": 0.1, "z_weight": 0.1},
            {"dispatch": "capacity", "capacity_factor": 4.0, "z_weight": 0.1, "counts": True},
            {"dispatch": "gather", "shared_hidden": 4, "scoring": "sigmoid", "z_weight": 0.2},
        ]
    )
    expert = expert if experts is not None else 1
    if data * context * expert == 8:
        context = 1
    split = data > 1 or expert > 1
    calls = rng.choice([1, 1, 2])
    padded = (
        calls == 1 and rng.random() < 0.5
    )  # calls of unequal weight weigh added losses unequally
    of_slips = random.Random(f"slips {seed}")  # the other options of a seed stay as they were
    slip = of_slips.choice([*[None] * 12, *SLIPS])
    return Combination(
        seed,
        2,
        chunks,
        data,
        context,
        expert,
        way=rng.choice(["allgather", "ulysses", "ring"]),
        schedule=None if slices else rng.choice(FAMILIES[chunks]),
        remat=rng.choice(["stage", None]),
        slices=slices,
        offload=None if slices else rng.choice([None, None, "stash", 0.5]),
        data_parallel=rng.choice(["replicated", "zero1", "fsdp"]) if split else "replicated",
        gather=rng.choice(["step", "action", "repeat"]),
        experts=experts,
        microbatches=rng.choice([1, 2]) if data * expert < 4 else 1,
        calls=1 if slip else calls,
        more_rows=8 * rng.choice([0, 1]) if padded else 0,
        more_positions=8 * rng.choice([0, 1]) if padded else 0,
        engine=of_slips.choice(["scan", "programs"]),
        slip=slip,
    )


SLIPS = {
    "attribute": "changes its attribute",
    "collective": "over the axis 'stage'",
    "no mean": "no mean over rows|mixes positions|takes a sum over positions",
}


def with_slip(slip: str, module: nnx.Module) -> None:
    """Let a call of the module change an attribute, or sum over ``stage``."""
    kind = type(module)

    def first(self: Any, x: Any) -> Any:
        if slip == "attribute":
            self.times = self.times + 1
            return x
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, ("data", "stage")), x)

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, first(self, x), *args, **kwargs)

    def call_slice(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.call_slice(self, first(self, x), *args, **kwargs)  # type: ignore[attr-defined]

    methods = {"__call__": call}
    if hasattr(kind, "call_slice"):
        methods["call_slice"] = call_slice
    module.__class__ = type(kind.__name__, (kind,), methods)
    if slip == "attribute":
        module.times = 0


def root_loss(outputs: Any, targets: Any) -> jax.Array:
    """A loss that is no mean over rows."""
    total, weight = next_token_loss(outputs, targets)
    return jax.numpy.sqrt(total / weight)


def decoder(case: Combination, context: Context) -> Any:
    """Stages, embed and head, with the same weights for every context."""
    layers = case.stage * case.chunks
    experts = None
    if case.experts is not None:
        experts = ExpertsConfig(4, 2, 12, tuple(range(layers)), **case.experts)
    config = DecoderConfig(
        vocabulary=WORDS,
        width=16,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=4,
        hidden=24,
        experts=experts,
    )
    return build(config, [1] * layers, nnx.Rngs(case.seed), context=context)


def batch(case: Combination) -> tuple[np.ndarray, np.ndarray]:
    """Words and the words that follow them, of rows and positions that are data."""
    words = np.random.default_rng(case.seed).integers(0, WORDS, (ROWS, LENGTH + 1))
    return words[:, :-1].astype(np.int32), words[:, 1:].astype(np.int32)


def plain(case: Combination) -> list[Any]:
    """Loss and gradients without a pipeline, then how often experts were chosen."""
    stages, embed, head = decoder(case, Context())
    x, t = batch(case)
    graph, params, rest = nnx.split(nnx.List([*stages, embed, head]), nnx.Param, ...)

    def loss(params: Any) -> Any:
        def run(params: Any) -> Any:
            *stages, embed, head = nnx.merge(graph, params, rest, copy=True)
            y = embed(x)
            for stage in stages:
                y = stage(y)
            total, weight = next_token_loss(head(y), t)
            counts = [leaf[...] for leaf in jax.tree.leaves(_counts(stages), is_leaf=_is_variable)]
            return total / weight, counts

        (value, counts), added = with_losses(run)(params)
        return value + added, counts

    (value, counts), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return [value, *jax.tree.leaves(grads), *counts]


def piped(case: Combination) -> list[Any]:
    """Loss, gradients and counts through the pipeline, in the order of `plain`."""
    way = Context("context", case.way) if case.context > 1 else Context()
    stages, embed, head = decoder(case, way)
    sizes = {"data": case.data, "context": case.context, "expert": case.expert}
    mesh = make_mesh(stage=case.stage, **{name: n for name, n in sizes.items() if n > 1})
    rows = tuple(name for name in ("data", "expert") if name == "data" or sizes[name] > 1)
    spec = P(rows, "context") if case.context > 1 else P(rows)
    has_state = case.experts is not None and {"bias_rate", "counts"} & {*case.experts}
    state = {"state": ExpertState, "after_step": _nothing} if has_state else {}
    names = "schedule", "slices", "offload", "remat", "engine"
    named = {name: getattr(case, name) for name in names}
    if case.slip in ("attribute", "collective"):
        with_slip(case.slip, random.Random(case.seed).choice([*stages, embed, head]))
    named |= {"data_parallel": case.data_parallel}
    if case.data_parallel == "fsdp":
        named["gather"] = case.gather
    pipe = Pipeline(
        stages,
        case.microbatches,
        embed=embed,
        head=head,
        loss_fn=root_loss if case.slip == "no mean" else next_token_loss,
        mesh=mesh,
        batch=spec,
        **{name: value for name, value in named.items() if value is not None or name == "remat"},
        **state,
    )
    added = [(0, case.more_rows), (0, case.more_positions)]
    x, t = (np.pad(words, added) for words in batch(case))
    targets: Any = t
    if case.more_rows or case.more_positions:
        targets = PaddedWords(t, np.pad(np.ones((ROWS, LENGTH), np.float32), added))
    if case.calls == 1:
        loss, grads = pipe.value_and_grad(x, targets)
        if case.slip is not None:
            return [loss, pipe.check(x, targets)]
        layers = pipe.to_layers(grads)
    else:  # an update of two calls, with a learning rate of 1
        before = pipe.to_layers(nnx.state(pipe, nnx.Param))
        before = jax.tree.map(np.asarray, before)
        step = Step(pipe, make_optimizer(pipe, optax.sgd(1.0)), accumulate=2)
        for part in np.split(np.arange(ROWS), 2):
            metrics = step(x[part], targets[part])
        loss, after = metrics.loss, pipe.to_layers(nnx.state(pipe, nnx.Param))
        layers = jax.tree.map(lambda a, b: a - np.asarray(b), before, after)
    model = [*layers["stages"], layers["embed"], layers["head"]]
    return [loss, *jax.tree.leaves(model), *jax.tree.leaves(_counts(pipe.stages()))]


def _counts(stages: Any) -> Any:
    """Counts of experts, in layer order; those of stages that count nothing have none."""
    flat = nnx.to_flat_state(nnx.state(nnx.List(stages), ExpertState))
    return [leaf for path, leaf in flat if path[-1] == "counts"]


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _nothing(stage: nnx.Module) -> None:
    """Leave counts as they are, to be compared."""


def check_slip(case: Combination) -> str:
    """Outcome of a combination with a slip: that it is refused, or warned of.

    Raises:
      AssertionError: there is no word about it.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _, checked = piped(case)
        except ValueError as error:
            text, is_refused = str(error), True
        else:
            text, is_refused = " ".join([*(str(one.message) for one in caught), *checked]), False
    if re.search(SLIPS[case.slip or ""], text) or (is_refused and OURS.search(text)):
        return f"{case.slip} {'refused' if is_refused else 'warned of'}"
    if case.slip == "no mean" and case.microbatches * case.data * case.expert == 1:
        return "one call of the loss"
    raise AssertionError(f"no word about {case.slip!r}: {text[:200]}")


def check(case: Combination) -> str:
    """Outcome of a combination: "ok", or that it is refused.

    Raises:
      AssertionError: loss, gradients or counts differ.
    """
    if case.slip is not None:
        return check_slip(case)
    want = [np.asarray(leaf) for leaf in plain(case)]
    try:
        found = [np.asarray(leaf) for leaf in piped(case)]
    except ValueError as error:
        if not OURS.search(str(error)):
            raise
        return f"refused: {str(error)[:70]}"
    far = [distance(a, b) for a, b in zip(found, want, strict=True)]
    if max(far) > TOLERANCE:
        raise AssertionError(
            f"differs by {max(far):.1e} at leaf {int(np.argmax(far))} of {len(far)}"
        )
    return "ok"
