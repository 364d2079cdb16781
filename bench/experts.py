"""A layer of experts in a pipeline, beside one written by hand: ``python -m bench.experts``.

* `layer`: a step of S = 1 with a mixture of experts, its experts over R devices, against the same
  products and exchanges written here in a plain `jax.shard_map` with a scan over microbatches.
* `memory`: bytes of a rank's weights against the formula; between actions, and as compiled.
* `number`: how time grows with the number of experts, of which every token passes as many.
* `stages`: a step of S = 2 against its ideal time, of experts and of the dense model of the same
  active size. It needs two devices.

What is timed takes turns in one run, and must give the loss and gradients of its partner. With
``--platform cuda`` it runs on the GPUs of this machine, in bfloat16 and with larger sizes.

Letters: S ranks of stages, R of experts, M microbatches, n tokens of a rank in one, d width, e
experts, k of a token, f columns of one, L layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)
from bench.cases import error
from bench.measure import ContradictionError, Timer, behind_itself, in_turns, seconds, table
from bench.pinned import Builders, Pinned

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.insight.forecast.bytes import predict
from pipeline.layers import MixtureOfExperts, SwiGLU
from pipeline.layers.experts import capacity_of

SECTIONS = ("layer", "memory", "number", "stages")
DISPATCHES = ("gather", "capacity")
FACTOR = 1.25  # of "capacity"
MB = 10**6


@dataclasses.dataclass(frozen=True)
class ExpertsCase:
    """Sizes of a step.

    Attributes:
      width: d; hidden: f; experts: e, 0 for an MLP of k·f columns; top_k: k; layers: L.
      tokens: n; microbatches: M.
      numbers: of experts that are compared.
      dtype: of weights and tokens.
      tolerance: of loss and gradients, relative to the largest entry of each.
    """

    width: int
    hidden: int
    experts: int
    top_k: int
    layers: int
    tokens: int
    microbatches: int
    numbers: tuple[int, ...]
    dtype: str
    tolerance: float

    def data(self, ranks: int) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets, `[R·M·n, d]`."""
        shape = (ranks * self.microbatches * self.tokens, self.width)
        x, t = (jax.random.normal(jax.random.key(seed), shape, self.dtype) for seed in (1, 2))
        return x, t

    def weight_bytes(self, ranks: int) -> int:
        """Bytes of a rank's weights: routers whole, e / R experts."""
        each = self.width * self.experts
        each += self.experts // ranks * 3 * self.width * self.hidden
        return self.layers * each * jnp.dtype(self.dtype).itemsize


ON_CPU = ExpertsCase(128, 128, 8, 2, 2, 256, 8, (4, 8, 16, 32), "float32", 1e-4)
ON_GPU = ExpertsCase(2048, 2048, 8, 2, 2, 4096, 8, (8, 16, 32, 64), "bfloat16", 5e-2)
SMALL = dataclasses.replace(ON_CPU, width=16, hidden=16, tokens=16, microbatches=2, numbers=(4, 8))


def unit(x: jax.Array) -> jax.Array:
    """RMS norm without a scale."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def squares(y: jax.Array, t: jax.Array) -> jax.Array:
    """A loss that costs next to nothing beside experts."""
    return jnp.square((y - t).astype(jnp.float32)).mean()


class MixtureStage(nnx.Module):
    """L layers of experts, or of an MLP, beside a residual stream."""

    def __init__(self, case: ExpertsCase, rngs: nnx.Rngs, dispatch: Any = "gather") -> None:
        def layer() -> nnx.Module:
            columns = case.top_k * case.hidden
            if not case.experts:
                return SwiGLU(case.width, columns, rngs, axis=None, dtype=case.dtype)
            return MixtureOfExperts(
                case.width,
                case.hidden,
                case.experts,
                case.top_k,
                rngs,
                dispatch=dispatch,
                capacity_factor=FACTOR,
                dtype=case.dtype,
            )

        self.layers = nnx.List([layer() for _ in range(case.layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[n, d] -> [n, d]`."""
        for layer in self.layers:
            x = x + layer(unit(x))
        return x


# ---- by hand -----------------------------------------------------------------------------------


def weights_of(stage: MixtureStage) -> list[dict[str, jax.Array]]:
    """The weights of each layer as plain arrays."""
    return [
        {
            "router": layer.router_weight[...],
            "gate_up": layer.gate_up[...].reshape(*layer.gate_up.shape[:2], -1),
            "down": layer.down[...],
        }
        for layer in stage.layers
    ]


def by_hand(w: Mapping[str, jax.Array], x: jax.Array, k: int, dispatch: str, R: int) -> jax.Array:
    """One layer of experts in a `shard_map` over ``expert``, with no function of ours but names."""
    logits = jnp.dot(x, w["router"], preferred_element_type=jnp.float32)
    top, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), k)
    top = top / top.sum(-1, keepdims=True)
    how = {"gather": gathered_by_hand, "capacity": capacity_by_hand}[dispatch]
    return how(w, x, top, chosen, R)


def gathered_by_hand(
    w: Mapping[str, jax.Array], x: jax.Array, top: jax.Array, chosen: jax.Array, R: int
) -> jax.Array:
    """All tokens come, one grouped product for all experts of the device, sums go."""
    local, k = w["down"].shape[0], chosen.shape[1]
    if R > 1:
        gather = functools.partial(jax.lax.all_gather, axis_name="expert", tiled=True)
        x, top, chosen = gather(x), gather(top), gather(chosen)
        chosen = chosen - jax.lax.axis_index("expert") * local
    flat = chosen.reshape(-1)
    here = (flat >= 0) & (flat < local)
    flat = jnp.where(here, flat, local)
    order = jnp.argsort(flat, stable=True)
    sizes = (flat[:, None] == jnp.arange(local)).sum(0, dtype=jnp.int32)
    rows = x[order // k]
    if R > 1:
        rows = jnp.where(here[order][:, None], rows, 0)
    gate, up = jnp.split(jax.lax.ragged_dot(rows, w["gate_up"], sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    y = y[back]
    if R > 1:
        y = jnp.where(here[:, None], y, 0)
    y = jnp.einsum("nkd,nk->nd", y.reshape(-1, k, y.shape[-1]), top.astype(y.dtype))
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) if R > 1 else y


def capacity_by_hand(
    w: Mapping[str, jax.Array], x: jax.Array, top: jax.Array, chosen: jax.Array, R: int
) -> jax.Array:
    """The first C tokens of each expert go to it by one all_to_all, and come back."""
    (n, d), k, local = x.shape, chosen.shape[1], w["down"].shape[0]
    e = local * R
    C = capacity_of(n, k, e, FACTOR)
    flat = chosen.reshape(-1)
    place = jnp.cumsum(jax.nn.one_hot(flat, e, dtype=jnp.int32), axis=0)
    place = jnp.take_along_axis(place, flat[:, None], axis=1)[:, 0] - 1
    kept = place < C
    slot = jnp.where(kept, flat * C + place, e * C)
    source = jnp.full(e * C, n).at[slot].set(jnp.arange(n * k) // k, mode="drop")
    rows = jnp.where((source < n)[:, None], x[jnp.minimum(source, n - 1)], 0)
    rows = rows.reshape(R, local, C, d)
    over = {"axis_name": "expert", "split_axis": 0, "concat_axis": 0, "tiled": True}
    if R > 1:
        rows = jax.lax.all_to_all(rows, **over)
    rows = rows.swapaxes(0, 1).reshape(local, R * C, d)
    gate, up = jnp.split(jnp.einsum("ecd,edf->ecf", rows, w["gate_up"]), 2, axis=-1)
    y = jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, w["down"])
    y = y.reshape(local, R, C, d).swapaxes(0, 1)
    if R > 1:
        y = jax.lax.all_to_all(y, **over)
    y = y.reshape(e * C, d)
    found = jnp.where(kept[:, None], y[jnp.minimum(slot, e * C - 1)], 0)
    return jnp.einsum("nkd,nk->nd", found.reshape(n, k, d), top.astype(y.dtype))


def hand_step(case: ExpertsCase, dispatch: str, R: int, weights: Any) -> Any:
    """Loss and gradients over M microbatches, compiled; sums of gradients in float32."""
    M, k = case.microbatches, case.top_k
    own = {"router": P(), "gate_up": P("expert"), "down": P("expert")}
    specs = [own] * case.layers

    def step(weights: Any, x: jax.Array, t: jax.Array) -> Any:
        def loss(weights: Any, x: jax.Array, t: jax.Array) -> jax.Array:
            for w in weights:
                x = x + by_hand(w, unit(x), k, dispatch, R)
            return squares(x, t) / (M * R)

        def body(carry: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(weights, *batch)
            add = jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry, (value, grads))
            return add, None

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        cut = (x.reshape(M, -1, case.width), t.reshape(M, -1, case.width))
        (value, grads), _ = jax.lax.scan(body, (jnp.zeros(()), zeros), cut)
        if R > 1:
            for g in grads:
                g["router"] = jax.lax.psum(g["router"], "expert")
            value = jax.lax.psum(value, "expert")
        return value, jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)

    mesh = jax.make_mesh((R,), ("expert",), devices=jax.devices()[:R])
    rows = P("expert")
    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, rows, rows),
        out_specs=(P(), specs),
        check_vma=False,
    )
    place = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        (specs, rows, rows),
        is_leaf=lambda x: isinstance(x, P),
    )
    given = jax.device_put((weights, *case.data(R)), place)
    return jax.jit(run).lower(*given).compile(), given


# ---- ours --------------------------------------------------------------------------------------


def pipe_of(case: ExpertsCase, dispatch: str, *, S: int = 1, R: int = 1) -> Pipeline:
    """Ours; every stage has L layers."""
    return Pipeline(
        [MixtureStage(case, nnx.Rngs(k), dispatch) for k in range(S)],
        case.microbatches,
        schedule=None if S == 1 else "eager_1f1b",
        mesh=make_mesh(devices=jax.devices()[: S * R], stage=S, expert=R, data=1),
        batch=P(("data", "expert")),
        loss_fn=squares,
        remat=None,
    )


def step_of(pipe: Pipeline, case: ExpertsCase, R: int) -> Any:
    """Loss and gradients, of a batch that lies where it is read."""
    rows = jax.sharding.NamedSharding(pipe.mesh, P(("data", "expert")))
    return functools.partial(pipe.value_and_grad, *jax.device_put(case.data(R), rows))


def pair(case: ExpertsCase, dispatch: str, R: int) -> tuple[dict[str, Any], Any]:
    """Ours and by hand, which agree; ours as a pipeline too, and the other compiled.

    Raises:
      ContradictionError: they differ.
    """
    pipe = pipe_of(case, dispatch, R=R)
    ours = step_of(pipe, case, R)
    compiled, given = hand_step(case, dispatch, R, weights_of(pipe.stages()[0]))
    loss, grads = ours()
    stage = pipe.to_layers(grads)["stages"][0]["layers"]
    named = [
        stage[n][name]
        for n in sorted(stage, key=int)
        for name in ("router_weight", "gate_up", "down")
    ]
    found = [jnp.asarray(x[...], jnp.float32) for x in named]
    want, others = compiled(*given)
    wanted = [w[name] for w in others for name in ("router", "gate_up", "down")]
    pairs = zip(wanted, found, strict=True)
    wanted = [jnp.asarray(w, jnp.float32).reshape(f.shape) for w, f in pairs]
    off = error((loss, found), (want, wanted))
    if not off <= case.tolerance:
        raise ContradictionError(
            f"{dispatch} over {R} ranks: {off:.1e} off the layer by hand, not {case.tolerance}"
        )
    return {"ours": ours, "by hand": functools.partial(compiled, *given)}, (pipe, compiled, off)


def timed(variants: Mapping[Any, Any], rounds: int) -> dict[Any, list[float]]:
    """Seconds of all, in turns."""
    timers: dict[Any, Timer] = {
        name: behind_itself(functools.partial(seconds, one)) for name, one in variants.items()
    }
    return in_turns(timers, rounds)


def compare_layer(case: ExpertsCase, R: int, rounds: int) -> tuple[list[list[str]], list[Any]]:
    """Rows of the tables `layer` and `memory`."""
    variants, made = {}, {}
    for dispatch in DISPATCHES:
        both, made[dispatch] = pair(case, dispatch, R)
        variants |= {(dispatch, name): one for name, one in both.items()}
    taken = timed(variants, rounds)
    rows, memory = [], []
    for dispatch in DISPATCHES:
        ours, hand = (taken[dispatch, name] for name in ("ours", "by hand"))
        ratios = sorted(a / b for a, b in zip(ours, hand, strict=True))
        pipe, compiled, off = made[dispatch]
        rows.append(
            [
                dispatch,
                f"{1e3 * statistics.median(hand):.1f}",
                f"{1e3 * statistics.median(ours):.1f}",
                f"{statistics.median(ratios):.3f}",
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                f"{off:.0e}",
            ]
        )
        memory.append(bytes_of(case, R, dispatch, pipe, compiled))
    return rows, memory


def bytes_of(case: ExpertsCase, R: int, dispatch: str, pipe: Pipeline, compiled: Any) -> list[str]:
    """A row on what a rank holds.

    Raises:
      ContradictionError: weights are not those of the formula.
    """
    x, _ = case.data(R)
    rows = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sizes = pipe.lower(rows, rows).compile().memory_analysis()
    operands = pipe.plan.facts.last
    found = predict(pipe.plan, *operands)
    formula = case.weight_bytes(R)
    batch = 2 * x.nbytes // R
    if not found.weights == formula == sizes.argument_size_in_bytes - batch:
        raise ContradictionError(
            f"weights of a rank: {formula} by formula, {found.weights} predicted, "
            f"{sizes.argument_size_in_bytes - batch} compiled"
        )
    by_hand = compiled.memory_analysis().temp_size_in_bytes
    return [
        dispatch,
        f"{formula / MB:.2f}",
        f"{found.temporaries / MB:.1f}",
        f"{sizes.temp_size_in_bytes / MB:.1f}",
        f"{by_hand / MB:.1f}",
    ]


def compare_numbers(case: ExpertsCase, R: int, rounds: int) -> list[list[str]]:
    """Rows of the table `number`: time over that of the fewest experts."""
    variants = {}
    for dispatch in DISPATCHES:
        for e in case.numbers:
            one = dataclasses.replace(case, experts=e)
            pipe = pipe_of(one, dispatch, R=R)
            variants[dispatch, e] = step_of(pipe, one, R)
    taken = {name: statistics.median(times) for name, times in timed(variants, rounds).items()}
    return [
        [
            dispatch,
            *(f"{taken[dispatch, e] / taken[dispatch, case.numbers[0]]:.2f}" for e in case.numbers),
        ]
        for dispatch in DISPATCHES
    ]


def one_stage(case: ExpertsCase) -> Any:
    """One stage for every microbatch, forward and backward, without a pipeline."""
    graphdef, params = nnx.split(MixtureStage(case, nnx.Rngs(0), "capacity"))
    M = case.microbatches

    def loss(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return squares(nnx.merge(graphdef, params)(x), t) / M

    @jax.jit
    def work(params: Any, x: jax.Array, t: jax.Array) -> Any:
        def body(total: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, total, grads), value

        cut = (x.reshape(M, -1, case.width), t.reshape(M, -1, case.width))
        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), cut)

    return functools.partial(work, params, *case.data(1))


def baselines() -> Builders:
    """One stage of each model, for a process of one core."""
    dense = dataclasses.replace(ON_CPU, experts=0)
    return {
        "experts": functools.partial(one_stage, ON_CPU),
        "dense": functools.partial(one_stage, dense),
    }


def compare_stages(rounds: int) -> list[list[str]]:
    """Rows of the table `stages`: step over ideal, with S = 2."""
    S, M = 2, ON_CPU.microbatches
    cases = {"experts": ON_CPU, "dense": dataclasses.replace(ON_CPU, experts=0)}
    with Pinned(baselines) as pinned:
        timers: dict[Any, Timer] = {}
        for name, case in cases.items():
            timers["one stage", name] = functools.partial(pinned.seconds, name)
            step = step_of(pipe_of(case, "capacity", S=S), case, 1)
            timers["pipeline", name] = functools.partial(seconds, step)
        taken = in_turns({name: behind_itself(one) for name, one in timers.items()}, rounds)
    rows = []
    for name in cases:
        one, ours = taken["one stage", name], taken["pipeline", name]
        ratios = sorted(b / (a * (M + S - 1) / M) for a, b in zip(one, ours, strict=True))
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(one):.1f}",
                f"{1e3 * statistics.median(ours):.1f}",
                f"{statistics.median(ratios):.3f}",
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
            ]
        )
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sections", nargs="*", choices=[*SECTIONS, []], help=f"{SECTIONS}")
    add("--platform", default="cpu", help="jax's name of the devices (cpu)")
    add("--ranks", type=int, help="R, devices that share experts (all, up to 2)")
    add("--rounds", type=int, default=9, help="runs per variant (9)")
    add("--small", action="store_true", help="tiny sizes, to see that it runs")
    add("--json", type=Path, help="where to write all rows")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", arguments.platform)
    device, count = jax.devices()[0], len(jax.devices())
    case = SMALL if arguments.small else ON_CPU if device.platform == "cpu" else ON_GPU
    R = arguments.ranks or min(2, count)
    wanted = arguments.sections or SECTIONS
    rounds = arguments.rounds
    print(
        f"{device.device_kind}, {platform.machine()}, jax {jax.__version__}; R={R}, {case}, "
        f"medians of {rounds} interleaved runs",
        flush=True,
    )
    found: dict[str, Any] = {}
    if {"layer", "memory"} & {*wanted}:
        found["layer"], found["memory"] = compare_layer(case, R, rounds)
        head = ["dispatch", "by hand ms", "ours ms", "ours / by hand", "of rounds", "off"]
        print(table(head, found["layer"]), flush=True)
        head = ["dispatch", "weights MB", "between actions MB", "temporaries compiled", "by hand"]
        print(table(head, found["memory"]), flush=True)
    if "number" in wanted:
        found["number"] = compare_numbers(case, R, rounds)
        head = ["time / fewest", *(f"e={e}" for e in case.numbers)]
        print(table(head, found["number"]), flush=True)
    if "stages" in wanted and device.platform == "cpu" and count >= 2 and not arguments.small:
        found["stages"] = compare_stages(rounds)
        head = ["S=2", "one stage ms", "step ms", "step / ideal", "of rounds"]
        print(table(head, found["stages"]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
