"""Costs of a large head on one rank, and on all: ``python -m bench.vocabulary``.

Four residual MLP layers a rank and a head worth 2.4 of them, as in an 8B Llama. With
``vocabulary="ends"`` the last rank does the head and all others wait for it; with "stage" each does
1/S. Predicted is what the lockstep clock says, fed with the time that one core takes for a stage
and for the head, without the kernel; messages are free there. Letters: S ranks, M microbatches, N
words, d width.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import platform
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import Case, Layers, see_that_it_agrees
from bench.measure import Timer, Variant, behind_itself, interleaved, seconds, table
from bench.pinned import Builders, Pinned

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from schedules import Costs, simulate

RANKS = 2
LAYERS = 4  # of a rank
WORTH = 2.4  # layers that multiply as often as the head
CASE = Case("mlp", "mlp", RANKS * LAYERS, 256, 16, 256)
SCHEDULES = ("eager_1f1b", "zb_h1")
MODES = ("ends", "stage")
WANTED = 0.85  # step with "stage" / step with "ends"
KINDS = ("F", "FB", "head")


def words(case: Case) -> int:
    """N: a layer has 8 d^2 weights, the head N d."""
    return RANKS * round(WORTH * 8 * case.width / RANKS)


def ends(case: Case) -> dict[str, Any]:
    """Embedding and head."""
    count, rngs = words(case), nnx.Rngs(1)
    return {
        "embed": VocabularyEmbedding(count, case.width, rngs=rngs),
        "head": VocabularyHead(
            count, case.width, rngs=rngs, norm=nnx.RMSNorm(case.width, rngs=rngs)
        ),
    }


def data(case: Case) -> tuple[jax.Array, jax.Array]:
    """Words and the words to predict, [M * rows]."""
    count = case.microbatches * case.rows
    ids, targets = (
        jax.random.randint(jax.random.key(seed), (count,), 0, words(case)) for seed in (1, 2)
    )
    return ids, targets


def pipelined(case: Case, schedule: str, mode: Any) -> Variant:
    """A training step."""
    pipe = Pipeline(
        case.stages(RANKS),
        case.microbatches,
        schedule=schedule,
        mesh=make_mesh(stage=RANKS),
        loss_fn=CrossEntropy(),
        remat=None,
        vocabulary=mode,
        **ends(case),
    )
    return functools.partial(pipe.value_and_grad, *data(case))


def alone(case: Case, kind: str) -> Variant:
    """A stage's forward passes, forward and backward passes, or the head's, for M microbatches."""
    module = ends(case)["head"] if kind == "head" else Layers(case.width, LAYERS, nnx.Rngs(0))
    graphdef, params = nnx.split(module)
    x = jax.random.normal(jax.random.key(3), (case.microbatches, case.rows, case.width))
    targets = data(case)[1].reshape(x.shape[:2])

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        found = nnx.merge(graphdef, params)(x)
        return CrossEntropy()(found, targets)[0] if kind == "head" else jnp.sum(found * x)

    @jax.jit
    def run(params: Any, x: jax.Array, targets: jax.Array) -> Any:
        def body(total: Any, batch: Any) -> tuple[Any, Any]:
            if kind == "F":
                return total, nnx.merge(graphdef, params)(batch[0])
            grads, dx = jax.grad(loss, argnums=(0, 1))(params, *batch)
            return jax.tree.map(jnp.add, total, grads), dx

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), (x, targets))

    return functools.partial(run, params, x, targets)


def baselines(case: Case) -> Builders:
    """Measurements on one core."""
    return {kind: functools.partial(alone, case, kind) for kind in KINDS}


def predicted(case: Case, schedule: str, taken: dict[str, float]) -> dict[str, float]:
    """Seconds of a step by mode, under the lockstep clock."""
    pipe = Pipeline(
        case.stages(RANKS), case.microbatches, schedule=schedule, mesh=make_mesh(stage=RANKS)
    )
    each = {kind: taken[kind] / case.microbatches for kind in KINDS}
    back = each["FB"] - each["F"]
    costs = Costs(each["F"], back / 2, back / 2, head=each["head"])
    shared = {"ends": (), "stage": ("head",)}
    return {
        mode: simulate(pipe.schedule, costs, "lockstep", shared=shared[mode]).makespan
        for mode in MODES
    }


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of everything; whoever computes something else is not timed."""
    steps = {
        f"{schedule}, {mode}": pipelined(case, schedule, mode)
        for schedule in SCHEDULES
        for mode in MODES
    }
    found = {name: (step()[0], jax.tree.leaves(step()[1])) for name, step in steps.items()}
    for name, one in found.items():
        see_that_it_agrees(name, one, found[f"{SCHEDULES[0]}, ends"])
    with Pinned(functools.partial(baselines, case)) as pinned:
        timers: dict[str, Timer] = {kind: functools.partial(pinned.seconds, kind) for kind in KINDS}
        timers |= {name: functools.partial(seconds, step) for name, step in steps.items()}
        timers = {name: behind_itself(timer) for name, timer in timers.items()}
        return interleaved(timers, rounds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.vocabulary", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="runs per variant (9)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_args()
    case = CASE.small() if arguments.small else CASE
    case = dataclasses.replace(case, layers=RANKS * LAYERS)
    taken = measure(case, arguments.rounds)
    each = {kind: 1e3 * taken[kind] / case.microbatches for kind in KINDS}
    print(
        f"{case.text()}, S={RANKS}, N={words(case)}, remat=None, jax {jax.__version__}, "
        f"{platform.machine()}, medians of {arguments.rounds} interleaved runs"
    )
    print(
        f"on one core, ms a microbatch: F {each['F']:.2f}, B {each['FB'] - each['F']:.2f}, head "
        f"with its gradients {each['head']:.2f}: {each['head'] / each['FB'] * LAYERS:.2f} layers"
    )
    rows = []
    for schedule in SCHEDULES:
        said = predicted(case, schedule, taken)
        took = {mode: taken[f"{schedule}, {mode}"] for mode in MODES}
        rows += [
            [schedule, mode, f"{1e3 * said[mode]:.0f}", f"{1e3 * took[mode]:.0f}"] for mode in MODES
        ]
        ratio = [f"{one['stage'] / one['ends']:.3f}" for one in (said, took)]
        rows.append([schedule, f"stage / ends (wanted <= {WANTED})", *ratio])
    print(table(["schedule", "vocabulary", "predicted ms", "measured ms"], rows))


if __name__ == "__main__":
    main()
