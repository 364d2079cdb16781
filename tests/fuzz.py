"""Random stage programs in a pipeline against the plain model, under random plans.

    python -m tests.fuzz 0 200          # seeds 0 to 199: what fails, then a count
    python -m tests.fuzz show 17        # the program and the plan of one
    python -m tests.fuzz options 0 150  # a decoder under random combinations of options

The plain loss and gradients are the mean over microbatches, by one jit on one device. What differs
from them is held against how much they move themselves: under noise of 1e-7, about a rounding, and
when the batch is not cut.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from typing import Any

if __name__ == "__main__":  # before jax is imported
    from tests.quick import fastest

    devices = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), devices, *fastest()])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pipeline import Pipeline
from tests.support import combinations
from tests.support.stage_programs import write

MICROBATCHES, ROWS, WIDTH = 4, 2, 4
ONE_CHUNK = ["gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h1", "zb_h2"]
TWO_CHUNKS = ["interleaved_1f1b", "looped_bfs", "interleaved_zb", "zb_v", "zb_v", "1f1b"]
POLICIES = ["dots_saveable", "nothing_saveable", "everything_saveable"]
TOLERANCE = 2e-5
MOST_SPREADS = 20  # a pipeline rounds in more places than one; what is wrong is far beyond


@dataclass(frozen=True)
class Case:
    """A program and a plan.

    Attributes:
      seed: of the program.
      num_ranks: S; num_stages: K.
      schedule: as `Pipeline` takes it.
      remat: as it takes it, or the name of a `jax.checkpoint` policy.
      as_tree: whether activations are trees, with an integer and a second float beside.
      unlike: whether every second stage is another program.
      has_ends: whether embed and head are programs too.
    """

    seed: int
    num_ranks: int
    num_stages: int
    schedule: str
    remat: str | None
    as_tree: bool
    unlike: bool
    has_ends: bool


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(f"plan {seed}")
    num_ranks, chunks = rng.choice([2, 2, 4]), rng.choice([1, 1, 2])
    return Case(
        seed,
        num_ranks,
        num_ranks * chunks,
        schedule=rng.choice(ONE_CHUNK if chunks == 1 else TWO_CHUNKS),
        remat=rng.choice(["stage", "stage", None, None, rng.choice(POLICIES)]),
        as_tree=rng.random() < 0.25,
        unlike=rng.random() < 0.1,
        has_ends=rng.random() < 0.15,
    )


class Treed(nnx.Module):
    """A stage between whose neighbours more passes than its own activation."""

    def __init__(self, stage: nnx.Module) -> None:
        self.stage = stage

    def __call__(self, x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        y = self.stage(x["x"])
        return {"x": y, "kept": 0.5 * x["kept"] + x["x"], "count": x["count"] + 1}


def make_ends(case: Case) -> list[nnx.Module]:
    """Embed and head, if there are any."""
    if not case.has_ends:
        return []
    made = [_compiled(write(seed), f"<end {seed}>") for seed in (~case.seed, ~case.seed - 1000)]
    return [Treed(make(50)) if case.as_tree else make(50) for make in made]


def make_stages(case: Case) -> list[nnx.Module]:
    """The K stages."""
    seeds = [case.seed, case.seed + 1_000_000] if case.unlike else [case.seed]
    made = [_compiled(write(seed), f"<stage {seed}>") for seed in seeds]
    stages = [made[k % len(made)](k) for k in range(case.num_stages)]
    return [Treed(stage) for stage in stages] if case.as_tree else stages


def _compiled(source: str, name: str) -> Any:
    """Make the k-th stage of a source."""
    rng = np.random.default_rng(7)
    constants = {
        "CD": rng.normal(size=4).astype("f"),
        "CDD": rng.normal(size=(4, 4)).astype("f"),
        "CI": np.array([0, 2]),
        "NHC": ("NHC", "HIO", "NHC"),
    }
    scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "nnx": nnx, **constants}
    exec(compile(source, name, "exec"), scope)

    def make(k: int) -> nnx.Module:
        draw = np.random.default_rng(k)

        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.asarray(0.6 * draw.normal(size=shape), jnp.float32))

        return scope["Stage"](normal)

    return make


def loss_fn(y: Any, t: jax.Array) -> jax.Array:
    if isinstance(y, dict):
        return ((y["x"] - t) ** 2).mean() + (y["kept"] ** 2).mean() * y["count"].mean()
    return ((y - t) ** 2).mean()


def make_batch(case: Case) -> tuple[Any, np.ndarray]:
    draw = np.random.default_rng(99)
    shape = MICROBATCHES * ROWS, WIDTH
    x, t = draw.normal(size=shape).astype("f"), draw.normal(size=shape).astype("f")
    if case.as_tree:
        return {"x": x, "kept": np.zeros_like(x), "count": np.zeros(len(x), np.int32)}, t
    return x, t


class Plain:
    """Loss and gradients of a case without a pipeline, as a list of arrays, stage by stage."""

    def __init__(self, case: Case) -> None:
        stages, ends = make_stages(case), make_ends(case)
        self._graph, self._state = nnx.split([stages, ends])
        self._batch = make_batch(case)

        def loss(state: Any, x: Any, t: Any) -> jax.Array:
            stages, ends = nnx.merge(self._graph, state)
            for module in [*ends[:1], *stages, *ends[1:]]:
                x = module(x)
            return loss_fn(x, t)

        self._step = jax.jit(jax.value_and_grad(loss))

    def __call__(self, noise: float = 0, seed: int = 0, parts: int = MICROBATCHES) -> list[Any]:
        draw = np.random.default_rng(seed)

        def shaken(a: Any) -> Any:
            if not noise or not np.issubdtype(a.dtype, np.floating):
                return a
            return a * (1 + noise * draw.normal(size=a.shape)).astype("f")

        state, (x, t) = jax.tree.map(shaken, self._state), self._batch
        x = jax.tree.map(shaken, x)
        cut = [jax.tree.map(lambda a, n=n: np.split(a, parts)[n], (x, t)) for n in range(parts)]
        found = [self._step(state, *one) for one in cut]
        loss, grads = jax.tree.map(lambda *a: np.mean(np.stack(a), 0), *found)
        return [np.asarray(loss), *map(np.asarray, jax.tree.leaves(grads))]

    def spread(self, want: list[Any]) -> float:
        """Distance of results that differ by rounding alone, as `distance`."""
        shaken = max(distance(self(1e-7, seed), want) for seed in range(3))
        return max(shaken, distance(self(parts=1), want))


def measure(case: Case) -> list[Any]:
    """Results of the model through a pipeline."""
    policy = case.remat if case.remat in (None, "stage") else None
    if case.remat in POLICIES:
        policy = getattr(jax.checkpoint_policies, case.remat)
    pipe = Pipeline(
        make_stages(case),
        MICROBATCHES,
        schedule=case.schedule,
        remat=policy,
        loss_fn=loss_fn,
        **dict(zip(("embed", "head"), make_ends(case), strict=False)),
        mesh=jax.make_mesh((case.num_ranks,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,)),
    )
    loss, grads = pipe.value_and_grad(*make_batch(case))
    # A module like the pipeline that holds gradients gives them back stage by stage.
    graph, params, rest = nnx.split(pipe, nnx.Param, ...)
    held = nnx.merge(graph, grads, rest)
    ends = [end for end in (held.embed, held.head) if end is not None]
    state = nnx.state([held.stages(), ends])
    params = nnx.filter_state(state, nnx.Param)
    return [np.asarray(loss), *map(np.asarray, jax.tree.leaves(params))]


def distance(found: list[Any], want: list[Any]) -> float:
    """The largest difference, each beside the largest entry of its array.

    Beside 1 where the plain gradient is nothing at all: behind a saturated tanh it is zero or the
    rounding of zero.
    """
    assert len(found) == len(want)
    pairs = [(f, w) for f, w in zip(found, want, strict=True) if w.size]
    return max(
        float(np.abs(f - w).max() / (max(np.abs(w).max(), 1e-4) if w.any() else 1))
        for f, w in pairs
    )


def check(case: Case) -> str:
    """Outcome of a case: "ok", or the reason why there is nothing to compare.

    Raises:
      AssertionError: the gradients differ.
    """
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        with jax.numpy_dtype_promotion("standard"):
            plain = Plain(case)
            try:
                want = plain()
            except (TypeError, ValueError, NotImplementedError) as error:
                return f"plain model fails: {type(error).__name__}"
            if not all(np.isfinite(w).all() and np.abs(w).max(initial=0) < 1e6 for w in want):
                return "not finite"
            far = distance(measure(case), want)
            if far < TOLERANCE:
                return "ok"
            spread = plain.spread(want)
            if far < MOST_SPREADS * spread:
                return "chaotic"
            raise AssertionError(f"differs by {far:.1e}, and by itself by {spread:.1e}")


def _late(*_: Any) -> None:
    raise TimeoutError


def main(start: int, stop: int, draw: Any = draw, check: Any = check) -> None:
    """Check the cases of seeds; a line for each that fails, and a count."""
    signal.signal(signal.SIGALRM, _late)
    counted: collections.Counter[str] = collections.Counter()
    began = time.time()
    for seed in range(start, stop):
        case, result = draw(seed), "failed"
        signal.alarm(180)
        try:
            result = check(case)
        except Exception as error:  # noqa: BLE001  (a fuzzer reports whatever happens)
            where = [
                f for f in traceback.extract_tb(error.__traceback__) if "/pipeline/" in f.filename
            ]
            place = f"{where[-1].filename.rsplit('/', 1)[-1]}:{where[-1].lineno}" if where else "-"
            first = (str(error).strip() or "-").splitlines()[0][:200]
            print(
                json.dumps(
                    asdict(case) | {"at": place, "error": f"{type(error).__name__}: {first}"}
                )
            )
        signal.alarm(0)
        counted[result] += 1
        if seed % 40 == 39:
            jax.clear_caches()
            print(seed, dict(counted), f"{time.time() - began:.0f} s", flush=True)
    print(f"seeds {start} to {stop - 1}:", dict(counted), f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "show":
        print(write(int(sys.argv[2])), draw(int(sys.argv[2])), sep="\n")
    elif sys.argv[1] == "options":
        of_options = combinations.draw, combinations.check
        main(int(sys.argv[2]), int(sys.argv[3]), *of_options)
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
