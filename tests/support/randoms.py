"""Random pipelines for the tests: every option beside every other.

Letters: S ranks, D data shards, V chunks per rank, K = S V stages, M microbatches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from schedules import ScheduleError, build, names
from schedules.build import options
from tests.support import models
from tests.support.models import (
    CLASSES,
    WIDTH,
    WORDS,
    Hostile,
    Layered,
    Noisy,
    Readout,
    Sided,
    Sliced,
)

ALIKE = (Hostile, Layered, Sliced, Sided, Noisy)
ENDS = ("none", "head", "both", "words", "vocabulary", "tied")


@dataclass(frozen=True)
class Case:
    """Sizes, the kind of a model, and the options of a pipeline."""

    S: int
    D: int
    V: int
    M: int
    rows: int
    stages: str
    ends: str
    weighted: bool
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        sizes = f"S={self.S} D={self.D} V={self.V} M={self.M} rows={self.rows}"
        kind = f"{self.stages} ends={self.ends}{' weighted' if self.weighted else ''}"
        return f"{sizes} {kind} {dict(self.options)}"


def draw(seed: int) -> Case:
    """A case that all its options allow."""
    rng = random.Random(seed)
    S, V = rng.choice([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1), (2, 3), (4, 2)])
    D = rng.choice([d for d in (1, 1, 2, 3, 4) if d * S <= 8])
    M = rng.choice([1, 2, 3, 4, 5, 7, 8])
    stages = rng.choice([*(kind.__name__ for kind in ALIKE), "uneven", "mixed"])
    ends = rng.choice(ENDS)
    chosen: dict[str, Any] = {
        "schedule": _schedule(rng, S, V, M),
        "remat": rng.choice(["stage", None, "dots"]),
        "pattern": rng.choice([None, None, "single", "paired", "unit", "partner"]),
        "delayed": rng.choice([False, True]),
        "data_parallel": rng.choice(["replicated", "zero1", "fsdp"]),
        "grad_dtype": rng.choice([None, None, "weights", jnp.float32]),
        "memory_limit": rng.choice([None, 10**12]),
    }
    if chosen["data_parallel"] == "fsdp":
        chosen["gather"] = rng.choice(["step", "action"])
        if chosen["gather"] == "action" and seed % 2:
            chosen["gather"] = "repeat"
    if ends in ("vocabulary", "tied"):
        chosen["vocabulary"] = rng.choice(["ends", "stage"])
    weighted = rng.random() < 0.3
    rows = D * M * rng.choice([1, 2, 3])
    return Case(S, D, V, M, rows, stages, ends, weighted, tuple(chosen.items()))


def _schedule(rng: random.Random, S: int, V: int, M: int) -> str | None:
    """A family that has a schedule of these sizes, or the default."""
    found: list[str | None] = [None]
    for name in names():
        try:
            build(name, num_ranks=S, num_microbatches=M, num_stages=S * V)
        except ScheduleError:
            continue
        if not options(name):
            found.append(name)
    return rng.choice(found)


class Several(nnx.Module):
    """Hostile layers, some with a matrix more."""

    def __init__(self, rngs: nnx.Rngs, count: int, *, more: bool = False):
        self.layers = nnx.List([Hostile(rngs) for _ in range(count)])
        self.more = models.normal(rngs, WIDTH, 3) if more else None

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x if self.more is None else x + jnp.tanh(x @ self.more[...]) @ self.more[...].T


class Sum:
    """A weighted loss of rows."""

    def __call__(self, y, targets):
        t, weights = targets
        return jnp.sum(jnp.sum((y - t) ** 2, axis=-1) * weights), jnp.sum(weights)


def make_stages(case: Case) -> list[nnx.Module]:
    """K of them."""
    count = case.S * case.V
    if case.stages in ("uneven", "mixed"):
        more = case.stages == "mixed"
        sizes = [1 + (k % 3 == 1) for k in range(count)]
        return [Several(nnx.Rngs(k), n, more=more and k % 2 == 0) for k, n in enumerate(sizes)]
    kind = {kind.__name__: kind for kind in ALIKE}[case.stages]
    found = models.build(kind, count)
    for stage in found:
        stage.eval()
    return found


def make_ends(case: Case) -> tuple[Any, Any]:
    """Embed and head."""
    if case.ends in ("none", "head"):
        return None, Hostile(nnx.Rngs(90)) if case.ends == "head" else None
    if case.ends == "both":
        return Hostile(nnx.Rngs(91)), Readout(nnx.Rngs(92))
    if case.ends == "words":
        return models.Words(nnx.Rngs(93)), Readout(nnx.Rngs(94))
    embed = VocabularyEmbedding(WORDS, WIDTH, rngs=nnx.Rngs(95))
    if case.ends == "tied":
        return embed, VocabularyHead(WORDS, WIDTH, tied=embed, rngs=nnx.Rngs(96))
    return embed, VocabularyHead(WORDS, WIDTH, rngs=nnx.Rngs(96))


def make_batch(case: Case) -> tuple[Any, Any, Any, Any]:
    """Inputs, targets, extras and the loss."""
    n, extras = case.rows, None
    is_words = case.ends in ("words", "vocabulary", "tied")
    inputs = models.words(n) if is_words else models.rows(n)
    weights = (jnp.arange(n) % 3).astype(jnp.float32) + (0.0 if n > 2 else 1.0)
    if case.stages == "Sided":
        extras = {"mask": jnp.arange(n)[:, None] % 4 != 1, "positions": jnp.arange(n)}
    if case.ends in ("vocabulary", "tied"):
        labels = models.words(n, seed=5)
        return inputs, (labels, weights) if case.weighted else labels, extras, CrossEntropy()
    if case.ends in ("both", "words"):
        labels = models.words(n, most=CLASSES, seed=5)
        return inputs, labels, extras, models.cross_entropy
    targets = models.rows(n, seed=5)
    if case.weighted:
        return inputs, (targets, weights), extras, Sum()
    return inputs, targets, extras, models.squares


def with_programs(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a case for ``engine="programs"``, without those that only the scan has."""
    only_of_scan = "pattern", "delayed"
    kept = {name: value for name, value in options.items() if name not in only_of_scan}
    return kept | {"engine": "programs"}


def run(case: Case, *, engine: str = "scan") -> tuple[Pipeline, Any, Any, Any]:
    """The pipeline, its loss and gradients, the reference's, and the batch."""
    stages, (embed, head) = make_stages(case), make_ends(case)
    inputs, targets, extras, loss_fn = make_batch(case)
    chosen = dict(case.options)
    chosen = chosen if engine == "scan" else with_programs(chosen)
    if chosen["remat"] == "dots":
        chosen["remat"] = jax.checkpoint_policies.dots_saveable
    mesh = make_mesh(stage=case.S, data=case.D)
    pipe = Pipeline(stages, case.M, mesh=mesh, embed=embed, head=head, loss_fn=loss_fn, **chosen)
    found = pipe.value_and_grad(inputs, targets, extras=extras)
    want = models.reference(stages, inputs, targets, loss_fn, embed=embed, head=head, extras=extras)
    return pipe, found, want, (inputs, targets, extras)
