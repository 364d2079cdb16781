"""Durations of actions: concluded from times, kept in files, given to pipelines.

Nothing here is timed but by injected clocks. Letters: S ranks, K stages, M microbatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Calibration, CalibrationError, Pipeline
from pipeline.base.agreed.slices import FixedSlice
from pipeline.decoders import DecoderConfig, build, next_token_loss
from pipeline.insight.calibrate import measure, one_rank
from pipeline.insight.calibrate.calibration import FORMAT
from pipeline.insight.calibrate.conclude import Timed, conclude
from pipeline.layers import Attention, Context
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from schedules import Costs, ScheduleError, equal_time, simulate
from tests.support import models
from tests.support.close import assert_close
from tests.support.dots import work
from tests.support.models import WIDTH, Block, Hostile

MS = 1e-3
NAMES = {0: "stage 0", 1: "stage 1"}
TRUE = {"F": 2.0, "B": 4.4, "I": 2.5, "W": 2.1}  # ms
BASE = 7.0  # ms of a step with its first microbatch alone


def timed(kinds: str, changes: dict[Any, float] | None = None, noise: float = 0.0, **more) -> Timed:
    """Two stages whose actions take `TRUE`, but for changes, in five rounds."""
    takes = {(k, kind): TRUE[kind] for k in NAMES for kind in kinds} | (changes or {})
    takes = {key: time for key, time in takes.items() if key[1] in kinds}
    off = [noise * (-1) ** r * (r > 0) for r in range(5)]

    def times(total: float) -> list[float]:
        return [MS * (BASE + 10 * total + 10 * each) for each in off]

    held = more.get("held", [(0,), (1,)])
    alone = [sum(time for (k, _), time in takes.items() if k in stages) for stages in held]
    turns = zip(held, more.get("turns", alone), strict=True)
    of = {key: times(time) for key, time in takes.items()}
    return Timed([MS * BASE] * 5, {k: times(time) for k, time in turns}, of, repeats=10)


def test_actions_take_what_they_add_to_a_step():
    found = conclude([timed("FB"), timed("FIW", {(1, "F"): 2.4})], NAMES)
    for (_, kind), took in found.items():
        assert took.median == pytest.approx(MS * TRUE[kind])  # F as beside whole backwards
        assert took.spread == pytest.approx(0.0, abs=1e-12)
    assert len(found) == 8


def test_the_median_and_its_spread():
    times = timed("FB")
    off = [0.0, 0.1, -0.2, 0.3, -9.0]  # one round was disturbed
    times.of[0, "F"][:] = [MS * (BASE + 10 * (2.0 + each)) for each in off]
    took = conclude([times], NAMES)[0, "F"]
    assert took.median == pytest.approx(2.0 * MS)
    assert took.spread == pytest.approx(0.2 * MS)


def refusal(*given: Timed, idle: Any = ()) -> str:
    with pytest.raises(CalibrationError) as caught:
        conclude(given, NAMES, idle)
    return str(caught.value)


def test_a_stage_whose_forward_takes_nothing():
    """As `bench.clock` once printed: F = 0.00 ms, I = 0.48 ms."""
    assert refusal(timed("FB", {(1, "F"): 0.0})) == (
        "the measured times contradict each other: F of stage 1 takes 0 ms, and another of its "
        "actions 4.4 ms: what it computes was not run; measure again on a quiet machine, with more "
        "rounds= or repeats=, and if that does not help, report it with these numbers"
    )


def test_what_computes_nothing_may_take_nothing():
    """The last stage's F with remat="stage", and the backward of what is frozen."""
    idle = {(1, "F"), (0, "B")}
    found = conclude([timed("FB", {(1, "F"): 0.0, (0, "B"): 0.0})], NAMES, idle)
    assert found[1, "F"].median == pytest.approx(0, abs=1e-12)


def test_halves_that_are_not_their_whole():
    text = refusal(timed("FB"), timed("FIW", {(0, "I"): 0.3, (0, "W"): 0.2}))
    assert "each other: I and W of stage 0 take 0.3 ms and 0.2 ms, and its B 4.4 ms" in text
    assert "stage 1" not in text


def test_in_turn_they_take_longer_than_one_by_one():
    """A stage alone may find its weights in a cache; halves are timed in a program of their own."""
    one = timed("FB", turns=[6.4, 1.2 * 6.4], noise=0.01)
    other = timed("FIW", {(1, "F"): 2.4}, held=[(0, 1)], turns=[1.2 * (2 * 6.6 + 0.4)])
    alone = conclude([timed("FB", noise=0.01), timed("FIW")], NAMES)
    for (k, kind), took in conclude([one, other], NAMES).items():
        longer = 1.1 if kind in "FB" else 1.2
        assert took.median == pytest.approx(MS * longer * TRUE[kind])
        assert took.spread == pytest.approx(longer * alone[k, kind].spread, abs=1e-9)


def test_actions_that_are_not_their_turn():
    text = refusal(timed("FB", held=[(0, 1)], turns=[20.0]))
    assert (
        "one microbatch's F, B of stage 0, stage 1 take 12.8 ms one by one, and 20 ms in turn"
    ) in text
    text = refusal(timed("FB", turns=[6.4, 3.0]))
    assert "F, B of stage 1 take 6.4 ms one by one, and 3 ms in turn; measure" in text


def test_noise_is_no_result():
    assert refusal(timed("FB", noise=1.5)).startswith(
        "cannot conclude from 5 rounds, because their times differ too much: F of stage 0 took 2 "
        "ms with a spread of 1.5 ms; B of stage 0 took 4.4 ms with a spread of 1.5 ms; "
    )
    assert "with more rounds= or repeats=" in refusal(timed("FB", {(0, "F"): -1, (0, "B"): -2}))


# --- measured, by an injected clock ---


COUNTS: dict[str, Any] = {"rounds": 1, "repeats": 1, "split": True}


def make(K: int = 2, S: int = 2, M: int = 4, kind: Any = Block, **options: Any) -> Pipeline:
    stages = options.pop("stages", None) or models.build(kind, K)
    given = {"mesh": make_mesh(stage=S), "loss_fn": models.squares} | options
    return Pipeline(stages, M, **given)


def data(rows: int = 8) -> tuple[jax.Array, jax.Array]:
    x, t = (jax.random.normal(jax.random.key(k), (rows, WIDTH)) for k in (1, 2))
    return x, t


@pytest.fixture
def clock(monkeypatch):
    """No step runs; it takes what its actions do, as `TRUE` says it or what is returned."""
    takes: dict[Any, float] = {}
    shown: list[float] = []

    def partial_step(plan: Any, operands: Any) -> Any:
        program, (_, _, batch) = plan.training, operands
        rows = {leaf.shape[0] % plan.schedule.num_microbatches for leaf in jax.tree.leaves(batch)}
        assert rows == {0}

        def step(runs: Any) -> None:
            total = BASE
            N = program.schedule.num_slices
            parts = np.array([takes.get(("slice", part), 1.0) for part in range(N)])
            for index, slot in enumerate(program.slots):
                each = parts[program.microbatch[:, index] % N]
                for branch, op in enumerate(slot.ops, start=1):
                    here = np.asarray(runs)[:, index] & (program.op[:, index] == branch)
                    total += (here * each).sum() * takes.get((op.chunk, op.kind), TRUE[op.kind])
            shown.append(MS * total)

        return step

    def seconds(step: Any) -> float:
        step()
        return shown.pop() if shown else 0.03 * MS * measure.EXCHANGES

    monkeypatch.setattr(measure, "partial_step", partial_step)
    monkeypatch.setattr(measure, "seconds", seconds)
    return takes


def test_calibrate(clock):
    """Four stages on two ranks: 1 and 2 are timed once, the first and the last for themselves."""
    clock |= {(0, "F"): 3.0, (2, "F"): 0.0, (2, "B"): 6.0, (2, "I"): 4.0}
    pipe = make(K=4, schedule="interleaved_1f1b")
    cal = pipe.calibrate(*data(), rounds=2, repeats=3)
    want = {
        "f": (3.0, 2.0, 2.0, 0.0),
        "b": (4.4, 4.4, 4.4, 6.0),
        "i": (2.5, 2.5, 2.5, 4.0),
        "w": (2.1, 2.1, 2.1, 2.1),
    }
    for name, times in want.items():
        assert getattr(cal.costs, name) == pytest.approx([MS * t for t in times], abs=1e-9)
    assert cal.costs.comm == pytest.approx(0.03 * MS)
    assert (cal.costs.head, cal.costs.embed) == (0, 0)
    assert cal.model == pipe.plan.signature
    assert (cal.rounds, cal.repeats, cal.microbatch) == (2, 3, "float32[2,8]")
    assert cal.hardware["platform"] == "cpu"
    assert cal.versions["jax"] == jax.__version__

    fitted = pipe.replace(costs=cal, schedule="auto")
    assert fitted.plan.costs == cal.costs
    report = simulate(fitted.schedule, cal.costs, "lockstep")
    assert (
        f"predicted bubble at what was measured on {cal.hardware['device']}: a step loses "
        f"{report.step_bubble_rate:.1%} of its ranks' time in lockstep"
    ) in fitted.describe().splitlines()
    text = str(cal).splitlines()
    assert text[0].startswith("4 stages, remat=stage, float32[2,8] a microbatch, on 1 x ")
    assert text[2].split() == ["stage", "F", "B", "I", "W"]
    assert text[3].split()[:4] == ["0", "3.000", "+-", "0.000"]
    # Of 7 ms that a step takes, and of what its first microbatch does, only the former.
    assert cal.overhead == pytest.approx(MS * BASE)
    assert text[-2:] == ["a step beside its actions: 7.000", "exchange: 0.030 +- 0.000"]


def test_calibrate_whole_backwards_alone(clock):
    cal = make(S=1, remat=None).calibrate(*data(), rounds=1, repeats=2, split=False)
    assert cal.costs.i == cal.costs.b == pytest.approx([4.4 * MS] * 2)
    assert (cal.costs.w, cal.costs.comm) == ((0, 0), 0)


def test_an_axis_that_the_compiler_divides(clock):
    """One rank takes one branch, so that the scan times what the programs run."""
    mesh = make_mesh(stage=2, tensor=2)
    pipe = make(mesh=mesh, auto_axes=("tensor",), engine="programs")
    cal = pipe.calibrate(*data(), rounds=1, repeats=2)
    assert cal.costs.i == pytest.approx([TRUE["I"] * MS] * 2)


def test_ends_that_all_ranks_share_are_no_part_of_a_stage(clock):
    """The last of two stages stands twice in the chain, the second time without head and loss."""
    clock |= {(0, "F"): 2.5, (2, "B"): 6.0, (2, "I"): 4.1}
    embed = VocabularyEmbedding(11, WIDTH, rngs=nnx.Rngs(5))
    ends = {"embed": embed, "head": VocabularyHead(11, WIDTH, tied=embed), "vocabulary": "stage"}
    words = jax.random.randint(jax.random.key(1), (8,), 0, 11)
    pipe = make(loss_fn=CrossEntropy(), **ends)
    cal = pipe.calibrate(words, words, rounds=1, repeats=2)
    assert cal.costs.head == pytest.approx(1.6 * MS)
    assert cal.costs.embed == pytest.approx(0.5 * MS)
    assert cal.costs.b == pytest.approx([3.9 * MS, 4.4 * MS])
    assert cal.costs.i == pytest.approx([2.0 * MS, 2.5 * MS])
    assert cal.costs.f == pytest.approx([2.0 * MS] * 2)
    assert str(cal).splitlines()[-4:-2] == [
        "head and loss, beside the stages: 1.600",
        "embed, beside the stages: 0.500",
    ]


def test_calibrate_says_what_contradicts(clock):
    clock[0, "F"] = 0.0
    with pytest.raises(CalibrationError, match="F of stage 0 takes 0 ms, and another"):
        make().calibrate(*data(), rounds=1, repeats=2)


def test_calibrate_slices(clock, tmp_path):
    """Slices compare as the multiplications of attention to all keys up to theirs."""
    lengths, x = (4, 4, 4), jnp.ones((4, 12, 8))
    stages = [Attention(8, 2, 2, nnx.Rngs(k), theta=100.0) for k in range(2)]

    def multiplications(part: int) -> int:
        own = {name: jnp.ones((3, 1, 4, 2, 4)) for name in ("keys", "values")}
        place = FixedSlice(part, 3, lengths)
        run = lambda x: stages[0].call_slice(x, own, place)[0]  # noqa: E731
        return work(jax.make_jaxpr(run)(x[:1, :4]).jaxpr)

    counts = [multiplications(part) for part in range(3)]
    assert counts == sorted(set(counts))
    clock |= {("slice", part): count / counts[0] for part, count in enumerate(counts)}
    whole = sum(counts) / counts[0]
    pipe = make(stages=stages, slices=lengths)
    cal = pipe.calibrate(x, x, rounds=1, repeats=2, split=False)
    costs = cal.costs
    assert costs.shares(3) == pytest.approx(np.array(counts) / sum(counts))
    assert costs.f == pytest.approx([whole * MS * TRUE["F"]] * 2)
    assert costs.b == pytest.approx([whole * MS * TRUE["B"]] * 2)
    assert costs.comm == pytest.approx(3 * 0.03 * MS)  # of a microbatch, as F and B are
    shares = ", ".join(f"{count / sum(counts):.1%}" for count in counts)
    assert f"slices, of a microbatch's time: {shares}" in str(cal).splitlines()
    cal.to_json(tmp_path / "cal.json")
    assert Calibration.from_json(tmp_path / "cal.json") == cal

    assert pipe.replace(costs=cal).plan.costs == costs
    equal = simulate(pipe.schedule, dataclasses.replace(costs, slices=None), "lockstep")
    assert simulate(pipe.schedule, costs, "lockstep").makespan > equal.makespan
    found = pipe.replace(costs=cal, schedule="auto", slices=None).plan
    assert (found.costs, found.schedule.num_slices) == (costs, 1)
    cuts = equal_time(1024, 3, attention=costs)
    assert list(cuts) == sorted(cuts, reverse=True)
    assert cuts[0] > cuts[2]


class Seen(nnx.Module):
    """A stage that says which slices it is run on."""

    def __init__(self, seen: Any) -> None:
        self.scale, self.seen = nnx.Param(jnp.ones(())), seen

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...]

    def call_slice(self, x: jax.Array, _: Any, part: Any) -> Any:
        jax.debug.callback(self.seen, jnp.asarray(part.index))
        return self(x), x[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, (5, 3)])
def test_entries_of_one_slice(slices):
    seen: list[int] = []

    def note(index: Any) -> None:
        seen.append(int(index))

    pipe, x = make(stages=[Seen(note)], S=1, slices=slices, remat=None), jnp.ones((6, 8, 4))
    chain = one_rank.find_chain(pipe)
    one = one_rank.one_rank(pipe, Pipeline, chain, "FB", 3, 1)
    step = one_rank.partial_step(one.plan, one_rank.operands_of(one, x, x))
    for part in 0, 1:
        seen.clear()
        program = one.plan.training
        runs = one_rank.first_and(program, one_rank.entries(program, [0], "F"), part)
        jax.block_until_ready(step(jnp.asarray(runs)))
        jax.effects_barrier()
        assert sorted(seen) == sorted([0, 1, part, part])


def test_entries_of_the_table_that_do_not_run_are_idle():
    """With all of them a step is the step; with those of the first microbatch, the step of that."""
    pipe, (x, t) = make(remat=None), data()
    operands = one_rank.operands_of(pipe, x, t)
    step, program = one_rank.partial_step(pipe.plan, operands), pipe.plan.training
    loss, (chunks, _), *_ = step(jnp.asarray(program.op > 0))
    want, grads = pipe.value_and_grad(x, t)
    np.testing.assert_array_equal(loss, want)
    for a, b in zip(jax.tree.leaves(chunks), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(a, b)
    first, y = step(jnp.asarray(one_rank.first_and(program)))[0], x[:2]
    for stage in pipe.stages():
        y = stage(y)
    assert_close(first, models.squares(y, t[:2]), tolerance=1e-6)
    runs = (program.op > 0) & (program.microbatch != 1)
    others = [step(jnp.asarray(runs & (program.microbatch == m)))[0] for m in (0, 2, 3)]
    assert_close(step(jnp.asarray(runs))[0], np.mean(others), tolerance=1e-6)
    _, (chunks, _), *_ = step(jnp.zeros(program.op.shape, bool))
    assert not any(leaf.any() for leaf in jax.tree.leaves(chunks))


def test_which_stages_are_timed():
    def chain(**options: Any) -> tuple[list[int], list[int]]:
        found = one_rank.find_chain(make(**options))
        K = len(found.kind_of)
        return list(found.stages), [found.stages[found.stands_for(k)] for k in range(K)]

    assert chain(K=6) == ([0, 1, 5], [0, 1, 1, 1, 1, 5])
    assert chain(K=2) == ([0, 1], [0, 1])
    mixed = [kind(nnx.Rngs(k)) for k, kind in enumerate([Block, Hostile, Block, Hostile, Block])]
    assert chain(stages=[*mixed, Block(nnx.Rngs(9))]) == (
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 1, 2, 5],
    )

    def late(path: Any, _: Any) -> bool:
        return path[:1] == ("stages",) and path[1] >= 4

    # Stages before the first that is trained have no backward, and that one no gradient to send.
    assert chain(K=6, wrt=late) == ([0, 1, 4, 5], [0, 1, 1, 1, 4, 5])


def test_microbatches_are_in_flight_as_in_the_pipeline(monkeypatch):
    """Each stage has as many in flight as a rank stashes, four at most; W is as far behind I."""
    found = []

    def asked(pipe: Any, make: Any, chain: Any, kinds: str, microbatches: int, in_flight: int):
        found.append(in_flight)
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "one_rank", asked)
    options = [
        {"S": 1},
        {"schedule": "1f1b", "remat": None},
        {"schedule": "gpipe", "remat": None, "M": 8},
        {"schedule": "1f1b", "remat": "stage"},  # which keeps messages alone
        {"schedule": "interleaved_1f1b", "remat": None, "K": 4},
    ]
    for given in options:
        with pytest.raises(KeyboardInterrupt):
            make(**given).calibrate(*data(), rounds=1)
    assert found == [1, 2, 4, 1, 3]

    schedule = one_rank.timetable(1, "FIW", 4, 2)
    order = " ".join(map(str, schedule.orders[0]))
    assert order == "0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds=0: must be an integer > 0"),
        ({"repeats": 1.5}, "repeats=1.5: must be an integer > 0"),
    ],
)
def test_arguments_of_calibrate(options, message):
    with pytest.raises(ValueError, match="must be") as caught:
        make().calibrate(*data(), **options)
    assert str(caught.value) == message


def test_calibrate_for_a_topology_was_removed():
    with pytest.raises(TypeError) as caught:
        make().calibrate(*data(), topology="v5p:2x2x1")
    assert str(caught.value) == (
        "calibrate(topology='v5p:2x2x1') was removed: seconds from a compiler's text were up to "
        "22% wrong; call calibrate(inputs, targets) on devices of that kind, or give "
        "Pipeline(costs=Costs(...))"
    )


def test_calibrate_needs_arrays_and_no_other_mesh():
    typed = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    pipe = Pipeline([typed] * 2, 4, mesh=make_mesh(stage=2), loss_fn=models.squares)
    with pytest.raises(ValueError, match=r"calibrate\(\) computes, but the pipeline"):
        pipe.calibrate(*data())
    with jax.set_mesh(make_mesh(stage=2)):
        pipe = make()
        with pytest.raises(ValueError, match=r"call it outside of jax\.set_mesh"):
            pipe.calibrate(*data())


def test_calibrate_where_actions_cannot_be_timed_one_by_one():
    devices = np.array([SimpleNamespace(process_index=k) for k in range(2)])
    spread = SimpleNamespace(plan=SimpleNamespace(mesh=SimpleNamespace(devices=devices)))
    with pytest.raises(
        ValueError, match=r"within one process, .* give Pipeline\(costs=Calibration"
    ):
        measure.calibrate(spread, Pipeline, *data(), None, **COUNTS, message=int)


@pytest.mark.slow
def test_calibrate_with_a_real_clock():
    """On a machine that is so busy that there may be no result."""
    with contextlib.suppress(CalibrationError):
        cal = make(K=3, S=1).calibrate(*data(256), rounds=3, repeats=64)
        assert len(cal.costs.f) == len(cal.spread["w"]) == 3
        assert cal.costs.b[1] > 0


# --- files, and pipelines that are given them ---


HARDWARE = {"device": "cpu", "platform": "cpu", "devices": 1, "cpus": 2}


def known(pipe: Pipeline, **costs: Any) -> Calibration:
    """As if it had been measured."""
    ones = (1.0,) * pipe.schedule.num_stages
    return Calibration(
        Costs(f=ones, i=ones, w=ones, b=ones, **costs),
        {kind: (0.1,) * len(ones) for kind in "fbiw"} | {"comm": (0.0,)},
        0.5,
        pipe.plan.signature,
        "float32[2,8]",
        5,
        16,
        HARDWARE,
        {"jax": "0.10.2", "jaxlib": "0.10.2", "python": "3.11.7", "shardpipe": "0.1.0"},
    )


def test_there_and_back(tmp_path):
    cal = known(make(), head=2.0, comm=0.25)
    cal.to_json(tmp_path / "cal.json")
    assert Calibration.from_json(tmp_path / "cal.json") == cal
    assert [path.name for path in tmp_path.iterdir()] == ["cal.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, f"is no calibration: its format is 'x', not {FORMAT!r}; give a file"),
        ({"costs": {"f": 1}}, 'has no "costs" with f, i and w'),
        ({"costs": {"f": [1, 1, 1], "i": 1, "w": 1}}, "has 3 numbers for 2 stages"),
        ({"model": {"stages": []}}, 'has no "model" with stages, embed, head, remat, compute_dty'),
        ({"spread": {"f": [1]}}, 'has no "spread" with one number for each of 2 stages for each'),
        ({"overhead": None}, 'has no "overhead", a number of seconds; calibrate again'),
        ({"rounds": -1}, "lacks fields of a calibration other than its costs (microbatch, rounds,"),
        ({"versions": None}, "lacks fields of a calibration other than its costs"),
    ],
)
def test_a_file_that_holds_no_calibration(tmp_path, change, message):
    path = tmp_path / "cal.json"
    known(make()).to_json(path)
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(record | change), encoding="utf-8")
    with pytest.raises(ScheduleError) as caught:
        Calibration.from_json(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_file_of_seconds_from_a_compiler_is_refused(tmp_path):
    path, hardware = tmp_path / "cal.json", HARDWARE | {"topology": "v5p:4x4x4"}
    dataclasses.replace(known(make()), rounds=0, repeats=0, hardware=hardware).to_json(path)
    with pytest.raises(ScheduleError) as caught:
        Calibration.from_json(path)
    assert str(caught.value) == (
        f"{path}: has seconds from a compiler's text (topology='v5p:4x4x4'), which was removed; "
        f"calibrate on devices, or give Costs(...)"
    )


def test_no_file(tmp_path):
    with pytest.raises(ScheduleError, match="No such file or directory; give a JSON file as"):
        Calibration.from_json(tmp_path / "none.json")


WIDER = {"kind": lambda rngs: Block(rngs, hidden=3 * WIDTH)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"K": 4}, "costs= is a calibration of 2 stages, and this pipeline has 4; calibrate this"),
        (
            WIDER,
            "costs= is a calibration of another model: there stages[0] is Block of 256 numbers",
        ),
        (
            {"remat": None},
            "there remat is stage, here None; calibrate this one, or give Costs(...)",
        ),
        ({"compute_dtype": "bfloat16"}, "there compute_dtype is none, here bfloat16;"),
        ({"param_dtype": "bfloat16"}, "there stages[0] is Block of 256 numbers"),
        ({"head": models.squares}, "there head is none, here squares"),
    ],
)
def test_a_calibration_of_another_model(options, message):
    cal = known(make())
    with pytest.raises(ValueError, match="calibration of") as caught:
        make(**options, costs=cal)
    assert message in str(caught.value)


def test_a_calibration_fits_however_the_stages_are_given():
    cal = known(make())
    graphdef, state = nnx.split(Block(nnx.Rngs(0)))
    stacked = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.stack([x, x]), state))
    assert make(stages=stacked).plan.signature == cal.model
    types = [nnx.eval_shape(lambda: Block(nnx.Rngs(0))) for _ in range(2)]
    pipe = make(stages=types, costs=cal)
    assert pipe.plan.costs == cal.costs
    with pytest.raises(ValueError, match="there remat is stage, here None"):
        pipe.replace(remat=None)


# --- the host link ---


def test_a_pipeline_that_offloads_times_its_host_link(clock):
    """In turn with the actions; on CPU an action waits for its copies."""
    plain, moved = (
        make(remat=None, offload=offload, schedule="gpipe").calibrate(*data(), rounds=2, repeats=3)
        for offload in (None, "stash")
    )
    taken = 0.03 * MS * measure.EXCHANGES / (2 * measure.TRIPS)
    assert (plain.costs.host, moved.costs.host) == (0, pytest.approx(taken))
    assert moved.costs.host_overlap == 0.0
    assert moved.costs.f == plain.costs.f


def test_a_trip_goes_to_the_host_and_back():
    arrived = measure.trips(jax.devices()[0], 4096)()
    assert arrived.shape == (1024,)
    assert set(arrived.tolist()) == {float(measure.TRIPS)}  # every trip adds one


@pytest.mark.slow
def test_calibrate_over_a_context_axis(clock):
    """Each rank of the axis times its part of the positions; the batch is cut as in a step."""
    config = DecoderConfig(
        vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, hidden=32
    )
    context = Context("context", "ulysses")
    stages, embed, head = build(config, [1, 1], nnx.Rngs(0), context=context)
    pipe = Pipeline(
        stages,
        2,
        embed=embed,
        head=head,
        loss_fn=next_token_loss,
        mesh=make_mesh(stage=2, context=2),
        batch=P("data", "context"),
    )
    words = jnp.arange(64, dtype=jnp.int32).reshape(4, 16) % 32
    cal = pipe.calibrate(words, words, rounds=1, repeats=2)
    assert cal.hardware["devices"] == 2
    assert cal.microbatch == "int32[2,16]"
    assert cal.costs.f == pytest.approx([MS * TRUE["F"]] * 2)
    assert pipe.replace(costs=cal).plan.costs == cal.costs
