"""The models that are timed: one set of weights, cut into as many stages as a variant wants.

Letters: K stages, M microbatches, d width. Layers are drawn one after the other, so weights do not
depend on K; gradients of any K are compared leaf by leaf in layer order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.pinned import call
from bench.waiting import Halves, Waiting
from collectives import make_mesh
from examples.gpt import Sizes, Stage
from pipeline import Calibration, Pipeline
from pipeline.insight.calibrate.measure import Calibrator

TOLERANCE = 1e-5
SMALL = 64  # the width from which an action takes about a millisecond
HALF = 0.005  # seconds that F, I and W of a layer of "halves" wait


class Layer(nnx.Module):
    """A residual MLP of hidden width 2 d: [rows, d] -> [rows, d].

    Squared ReLU: with ReLU itself two libraries that round differently disagree on a few masks,
    and then on gradients by 6e-3.
    """

    def __init__(self, d: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Param(rngs.params.normal((d, 2 * d)) * d**-0.5)
        self.down = nnx.Param(rngs.params.normal((2 * d, d)) * 0.1 * d**-0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.square(jax.nn.relu(x @ self.up[...])) @ self.down[...]


class Layers(nnx.Module):
    """Consecutive layers: one stage."""

    def __init__(self, d: int, count: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Layer(d, rngs) for _ in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
      name: what the tables call it.
      kind: "mlp", "gpt", "wait" or "halves", which wait too, as long in F as in I and in W.
      layers: of the whole model, shared by all stages.
      width: d.
      microbatches: M.
      rows: rows of a microbatch; sequences for "gpt".
      context, heads: of "gpt".
    """

    name: str
    kind: str
    layers: int
    width: int
    microbatches: int
    rows: int
    context: int = 0
    heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a microbatch."""
        inner = (self.context,) if self.kind == "gpt" else ()
        return (self.rows, *inner, self.width)

    def small(self) -> Case:
        """The case at a size for which a smoke test is quick."""
        smaller: dict[str, Any] = {"width": 32, "rows": 2 if self.kind == "gpt" else 4}
        if self.kind == "gpt":
            smaller |= {"context": 8, "heads": 2}
        return dataclasses.replace(self, name=f"{self.name}, small", **smaller)

    def stages(self, count: int) -> list[nnx.Module]:
        """K equal stages."""
        rngs = nnx.Rngs(0)
        each = self.layers // count
        if self.kind == "halves":
            return [Halves(self.width, HALF, rngs, each) for _ in range(count)]
        if self.kind != "gpt":
            kind = {"mlp": Layers, "wait": Waiting}[self.kind]
            return [kind(self.width, each, rngs) for _ in range(count)]
        sizes = Sizes(self.layers, self.width, self.heads, self.context)
        return [Stage(sizes, each, rngs) for _ in range(count)]

    def data(self) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets, [M * rows, ...]."""
        shape = (self.microbatches * self.rows, *self.shape[1:])
        x, t = (jax.random.normal(jax.random.key(seed), shape) for seed in (1, 2))
        return x, t

    def text(self) -> str:
        """A line on what it is."""
        inner = f"{self.rows} x {self.context} tokens" if self.context else f"{self.rows} rows"
        wait = "layers that wait"
        whats = {"mlp": "residual MLP layers", "gpt": "GPT blocks", "wait": wait, "halves": wait}
        what = whats[self.kind]
        return (
            f"{self.name}: {self.layers} {what}, d={self.width}, M={self.microbatches}, {inner} "
            f"a microbatch, float32"
        )


def calibrated(
    case: Case, stages: int, remat: Any, rounds: int, *, split: bool = True, busy: bool = False
) -> Calibration:
    """Durations of actions of K stages on one core; I and W only if ``split``.

    If ``busy``, every other core does the same meanwhile, as in a step.

    Where actions are short they are repeated more often.

    Raises:
      CalibrationError: the times are noise, or they contradict each other.
    """
    return call(_calibrated, case, stages, remat, rounds, split, busy=busy)


def _calibrated(case: Case, stages: int, remat: Any, rounds: int, split: bool) -> Calibration:
    pipe, repeats = _one_rank(case, stages, remat)
    return pipe.calibrate(*case.data(), rounds=rounds, repeats=repeats, split=split)


def calibrator(case: Case, stages: int, remat: Any, ranks: int) -> Calibrator:
    """That of K stages of S ranks, with I and W, in this process; likewise."""
    pipe, repeats = _one_rank(case, stages, remat)
    return calibrator_of(pipe, case.data(), repeats, ranks, split=True)


def _one_rank(case: Case, stages: int, remat: Any) -> tuple[Pipeline, int]:
    """A pipeline of K stages on one device, and how often its actions are repeated."""
    pipe = Pipeline(
        case.stages(stages),
        case.microbatches,
        mesh=make_mesh(stage=1),
        loss_fn=mean_square,
        remat=remat,
    )
    return pipe, 8 if case.width >= SMALL else 256


def calibrator_of(
    pipe: Pipeline, batch: Any, repeats: int, ranks: int, *, split: bool
) -> Calibrator:
    """That of a pipeline of one rank whose stages so many ranks will hold, dealt in turn.

    As many microbatches are on their way at a time.
    """
    K = pipe.schedule.num_stages
    options: dict[str, Any] = {
        "repeats": repeats,
        "in_flight": ranks,
        "held": [range(rank, K, ranks) for rank in range(ranks)],
    }
    return Calibrator(pipe, Pipeline, *batch, None, **options, split=split, message=int)


def mean_square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """A loss that costs next to nothing beside a stage."""
    return jnp.mean(jnp.square(outputs - targets))


def layer_leaves(stages: list[Any]) -> list[Any]:
    """Leaves in layer order, whatever the number of stages they are cut into."""
    return [leaf for stage in stages for leaf in jax.tree.leaves(stage)]


def reference(case: Case) -> tuple[Any, list[Any]]:
    """Loss and gradients of the model without any pipeline."""
    stages = case.stages(1)
    graphdef, params = nnx.split(stages[0])

    def loss(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return mean_square(nnx.merge(graphdef, params)(x), t)

    value, grads = jax.jit(jax.value_and_grad(loss))(params, *case.data())
    return value, layer_leaves([grads])


def gradients_of(pipe: Pipeline, grads: Any) -> list[Any]:
    """Gradients of `Pipeline.value_and_grad`, in layer order."""
    found: dict[int, Any] = {}
    for rank, held in enumerate(pipe.schedule.stages_of):
        for chunk, stage in enumerate(held):
            found[stage] = jax.tree.map(lambda g, r=rank: np.asarray(g)[r], grads["chunks"][chunk])
    return layer_leaves([found[k] for k in range(len(found))])


def error(found: tuple[Any, list[Any]], wanted: tuple[Any, list[Any]]) -> float:
    """The largest error of loss or gradients, relative to the largest entry of each leaf."""
    pairs = zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True)
    errors = []
    for x, y in pairs:
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        errors.append(float(np.abs(a - b).max() / np.abs(b).max()))
    return float(np.max(errors))


def see_that_it_agrees(name: str, found: Any, wanted: Any) -> float:
    """The error of a variant; who computes something else is not timed.

    Raises:
      ValueError: it is larger than the tolerance, or not a number.
    """
    off = error(found, wanted)
    if not off <= TOLERANCE:
        raise ValueError(
            f"{name} is {off:.1e} off the unpipelined loss and gradients; more than {TOLERANCE} "
            f"is another computation, whose time says nothing"
        )
    return off
