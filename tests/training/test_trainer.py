"""The loop: what it tells, evaluates and saves, how it ends, and how it goes on."""

from __future__ import annotations

import copy
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training import faults
from pipeline.training.batches import Batch
from pipeline.training.records import JsonLines, Progress, TensorBoard
from pipeline.training.step import DynamicScale, NotFiniteError, Step
from pipeline.training.trainer import (
    Trainer,
    count_flops,
    find_peak_flops,
    predicted,
    tokens_of,
)
from schedules import Costs
from tests.support import models
from tests.support.close import assert_close
from tests.support.elsewhere import python
from tests.support.models import CLASSES, Noisy, Readout
from tests.support.refusals import refusal
from tests.training.plain import (
    Chain,
    compiles,
    equal,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
ROWS, M = 8, 2


class Numbered:
    """Batches by their number, without end, and with a position."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.at, self.bad = 0, bad

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.at += 1
        x = models.rows(ROWS, seed=self.at)
        return x * (jnp.inf if self.at in self.bad else 1), labels(self.at)

    def get_state(self) -> dict:
        return {"at": self.at}

    def set_state(self, state: dict) -> None:
        self.at = state["at"]


def labels(seed: int) -> jax.Array:
    return models.words(ROWS, most=CLASSES, seed=seed)


class Memory:
    """Checkpoints in this process."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.closed = 0

    def save(self, step, model, optimizer, *, shaped, plain, data, metrics):
        state = [np.asarray(x) for x in leaves_of(model, optimizer, shaped)]
        position = None if data is None else data.get_state()
        self.kept.append((step, state, copy.deepcopy(plain), position, metrics))

    def restore(self, model, optimizer, *, shaped, plain, data):
        if not self.kept:
            return None
        step, state, kept, position, _ = self.kept[-1]
        like = nnx.state((model, optimizer)), shaped
        arrays = [wrapped(y, x) for x, y in zip(jax.tree.leaves(like), state, strict=True)]
        found, trees = jax.tree.unflatten(jax.tree.structure(like), arrays)
        nnx.update((model, optimizer), found)
        shaped.update(trees)
        plain.update(kept)
        data.set_state(position)
        return step

    def close(self) -> None:
        self.closed += 1


def leaves_of(model, optimizer, shaped) -> list:
    found = jax.tree.leaves((nnx.state((model, optimizer)), shaped))
    return [jax.random.key_data(x) if is_key(x) else x for x in found]


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def wrapped(x: np.ndarray, like: Any) -> jax.Array:
    return jax.device_put(jax.random.wrap_key_data(x) if is_key(like) else x, like.sharding)


def make_step(kind: Any = models.Block, *, plain: bool = False, **options: Any) -> Step:
    parts = models.build(kind, 2), Readout(nnx.Rngs(5))
    tx = optax.adamw(1e-2)
    if plain:
        model: Any = Chain(*parts, models.cross_entropy)
        return Step(model, nnx.Optimizer(model, tx, wrt=nnx.Param), **options)
    stages, head = parts
    given = {"head": head, "loss_fn": models.cross_entropy, "mesh": make_mesh(stage=2)}
    pipe = Pipeline(stages, M, **given)
    return Step(pipe, make_optimizer(pipe, tx), **options)


class Told:
    """Keeps records."""

    def __init__(self) -> None:
        self.records: list[dict] = []
        self.closed = False

    def write(self, record) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_a_run_tells_evaluates_and_saves():
    told, saves, seen = Told(), Memory(), []
    held_out = [
        (models.rows(ROWS, seed=50), labels(50)),
        Batch(models.rows(4, seed=51), labels(51)[:4], None, 4),
    ]
    trainer = Trainer(
        make_step(plain=True, ema=0.5),
        Numbered(),
        steps=5,
        evaluation=held_out,
        eval_interval=2,
        checkpoints=saves,
        checkpoint_interval=2,
        recorders=[told],
        hooks=[lambda trainer, record: seen.append(record["step"])],
        peak_flops=1e9,
    )
    assert trainer.run()
    trainer.close()
    steps = [one for one in told.records if "loss" in one]
    assert [one["step"] for one in steps] == seen == [1, 2, 3, 4, 5]
    assert [one["step"] for one in told.records if "eval_loss" in one] == [2, 4, 5]
    assert [one[0] for one in saves.kept] == [2, 4, 5]
    assert saves.kept[-1][4] == {"eval_loss": trainer.eval_loss}
    assert told.closed
    assert saves.closed == 1
    whole = (
        jnp.concatenate([held_out[0][0], held_out[1][0]]),
        jnp.concatenate([held_out[0][1], held_out[1][1]]),
    )
    assert_close(trainer.eval_loss, trainer.step.eval_step(*whole), tolerance=1e-6)
    for one in steps:
        split = one["seconds"]
        parts = sum(split[name] for name in ("input", "compute", "bubble", "communication"))
        assert_close(parts, split["step"], tolerance=1e-7)
        assert one["predicted"] == ["compute", "bubble", "communication"]
        assert one["tokens_per_second"] == ROWS / split["step"]
        flops = 6 * sum(x.size for x in jax.tree.leaves(nnx.state(trainer.step.model, nnx.Param)))
        assert_close(one["mfu"], flops * ROWS / split["step"] / 1e9, tolerance=1e-7)
        assert one["memory"] > 10**6


def test_seconds_are_those_of_the_step_that_took_them(monkeypatch):
    """Also where a call returns when its program has ended, and the next one is not yet there."""
    call = Step.__call__

    def slow(self, *batch, **options):
        time.sleep(0.05)
        return jax.block_until_ready(call(self, *batch, **options))

    monkeypatch.setattr(Step, "__call__", slow)
    told = Told()
    given = {"steps": 6, "evaluation": [next(Numbered())], "eval_interval": 3}
    Trainer(make_step(plain=True), Numbered(), recorders=[told], **given).run()
    taken = [one["seconds"]["step"] for one in told.records if "loss" in one]
    assert len(taken) == 6
    assert min(taken) >= 0.05


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_ended():
    """With dropout, a mean, a scale, and calls that one update takes together."""
    options = {"ema": 0.9, "loss_scale": DynamicScale(interval=2), "accumulate": 2}
    options |= {"kind": Noisy, "plain": True}
    whole = Trainer(make_step(**options), Numbered(), steps=4)
    assert whole.run()
    saves = Memory()
    asked = iter([False, False, True])
    first = Trainer(
        make_step(**options),
        Numbered(),
        steps=4,
        checkpoints=saves,
        stop=lambda: next(asked),
    )
    assert not first.run()
    assert [one[0] for one in saves.kept] == [2]
    second = Trainer(make_step(**options), Numbered(), steps=4, checkpoints=saves)
    assert second.resume() == 2
    before = compiles()
    assert second.run()
    assert compiles() - before == 2
    assert first.losses + second.losses == whole.losses
    assert second.step.plain() == whole.step.plain()
    a, b = (
        leaves_of(one.step.model, one.step.optimizer, one.step.shaped()) for one in (second, whole)
    )
    equal(a, b)


class Broken(Numbered):
    """Batches of which some raise when they are first asked for."""

    def __init__(self, *broken: int) -> None:
        super().__init__()
        self.broken = [*broken]

    def __next__(self) -> Any:
        if self.at + 1 in self.broken:
            self.broken.remove(self.at + 1)
            raise OSError("the data are gone for a moment")
        return super().__next__()


@pytest.mark.slow
@pytest.mark.parametrize(
    "again", [pytest.param("another process", marks=pytest.mark.slow), "the same trainer"]
)
def test_data_that_raise_within_an_update_lose_and_repeat_nothing(again):
    """Issue 52: dropout's counts were those of the update's first calls, the weights were not."""
    whole = Trainer(make_step(Noisy, accumulate=3), Numbered(), steps=3)
    whole.run()
    kept, losses = Memory(), []
    trainer = Trainer(make_step(Noisy, accumulate=3), Broken(5, 6), steps=3, checkpoints=kept)
    for _ in range(2):
        with pytest.raises(OSError, match="gone for a moment"):
            trainer.run()
    assert [one[0] for one in kept.kept] == [1]
    assert kept.kept[0][3] == {"at": 3}
    losses += trainer.losses
    if again == "another process":
        trainer = Trainer(make_step(Noisy, accumulate=3), Numbered(), steps=3, checkpoints=kept)
        assert trainer.resume() == 1
        trainer.run()
        losses += trainer.losses
    else:
        trainer.run()
        losses = trainer.losses
    assert_close(np.array(losses), np.array(whole.losses), tolerance=1e-6)


def test_a_save_that_failed_is_tried_again():
    """Issue 52: after the last save had failed, `save()` did nothing."""

    class Full(Memory):
        def wait(self) -> None:
            if len(self.kept) == 1:
                raise OSError("no space left")

    kept = Full()
    trainer = Trainer(make_step(), Numbered(), steps=2, checkpoints=kept)
    with pytest.raises(OSError, match="no space"):
        trainer.run()
    trainer.save()
    assert [one[0] for one in kept.kept] == [2, 2]


@pytest.mark.slow
def test_a_run_that_goes_back_evaluates_again():
    """Issue 52: the evaluation of the same step before it went back counted."""
    told, kept = Told(), Memory()
    options = {"evaluation": [(models.rows(ROWS), labels(0))], "recorders": [told]}
    trainer = Trainer(make_step(), Numbered(), steps=2, checkpoints=kept, **options)
    trainer.save()
    trainer.run()
    kept.kept.pop()
    assert trainer.resume() == 0
    assert trainer.eval_loss is None
    trainer.run()
    assert [record["step"] for record in told.records if "eval_loss" in record] == [2, 2]


@pytest.mark.slow
def test_updates_that_are_told_of_do_not_end_the_next_run():
    """Issue 52: after a run had ended for two bad updates, the first bad one ended the next."""
    kept = Memory()
    trainer = Trainer(make_step(), Numbered(bad=(2, 3, 6)), steps=6, checkpoints=kept, stop_after=2)
    with pytest.raises(NotFiniteError, match="2 in a row"):
        trainer.run()
    assert kept.kept[-1][2]["step"]["in_a_row"] == 0
    again = Trainer(make_step(), Numbered(), steps=6, checkpoints=kept, stop_after=2)
    again.resume()
    again.data.bad = (again.data.at + 1,)
    assert again.run()


@pytest.mark.slow
def test_data_of_grain_goes_on():
    grain = pytest.importorskip("grain")

    def make(index: int) -> Any:
        return np.full(models.WIDTH, np.sin(index), np.float32), np.int32(index % CLASSES)

    def data() -> Any:
        source = grain.MapDataset.range(40).shuffle(seed=3).repeat().map(make).batch(ROWS)
        return source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))

    whole = Trainer(make_step(plain=True), data(), steps=4)
    whole.run()
    saves = Memory()
    first = Trainer(make_step(plain=True), data(), steps=2, checkpoints=saves)
    first.run()
    position = json.loads(json.dumps(saves.kept[-1][3]))
    assert position == saves.kept[-1][3]
    second = Trainer(make_step(plain=True), data(), steps=4, checkpoints=saves)
    assert second.resume() == 2
    second.run()
    assert first.losses + second.losses == whole.losses


# --- what is not finite ---


def test_an_update_that_is_not_finite_is_told_of():
    told = Told()
    scale = DynamicScale(initial=8.0, interval=10)
    trainer = Trainer(
        make_step(plain=True, loss_scale=scale), Numbered((2,)), steps=3, recorders=[told]
    )
    trainer.run()
    (event,) = [one for one in told.records if "event" in one]
    assert event == {
        "step": 2,
        "event": "skipped",
        "text": (
            "not finite: weights, optimizer and mean stay as they were; the loss scale falls from "
            "8 to 4"
        ),
    }
    assert [one["loss_scale"] for one in told.records if "loss" in one] == [8, 8, 4]
    assert np.isfinite(trainer.losses[-1])


@pytest.mark.slow
def test_a_run_ends_when_too_many_are_not_finite():
    trainer = Trainer(make_step(), Numbered((2, 3, 4)), steps=9, stop_after=3)
    with pytest.raises(NotFiniteError) as caught:
        trainer.run()
    assert str(caught.value).startswith(
        "updates 2 to 4 were not finite, 3 in a row: of the gradients stages[0].down (the first "
        "of 5, of 5) is not finite; stages[0] is the first to compute NaN (jax_debug_nans), in its "
        "forward pass of microbatch 0, rows 0 to 3; "
    ), caught.value
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nnx.state(trainer.step.model)))


@pytest.mark.slow
def test_an_update_that_takes_too_long_ends_the_process(monkeypatch, capfd):
    ended: list[int] = []
    monkeypatch.setattr(faults.os, "_exit", ended.append)

    class Slow(Numbered):
        def __next__(self):
            if self.at == 2:
                time.sleep(1)
            return super().__next__()

    def evaluation():
        time.sleep(1)
        return [next(Numbered())]

    given = {"steps": 3, "stuck_after": 0.5, "evaluation": evaluation}
    Trainer(make_step(plain=True), Numbered(), **given).run()
    assert not ended, capfd.readouterr().err
    Trainer(make_step(plain=True), Slow(), **given).run()
    assert ended == [70]
    assert "process 0 of 1 is stuck: for " in capfd.readouterr().err


# --- recorders ---


def test_json_lines_are_json(tmp_path):
    for _ in range(2):
        file = JsonLines(tmp_path / "log.jsonl")
        file.write({"step": 1, "loss": float("nan"), "seconds": {"step": 0.5}, "predicted": ["a"]})
        file.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    wanted = {"step": 1, "loss": None, "seconds": {"step": 0.5}, "predicted": ["a"]}
    assert [json.loads(line) for line in lines] == [wanted, wanted]


@pytest.mark.parametrize("text", ["", '{"step": 1}\n', '{"step": 1}\n{"st', "{"])
def test_a_record_after_a_line_that_was_cut_off_has_a_line_of_its_own(text, tmp_path):
    """Issue 67: a full disk or a power cut ended the file within a line."""
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    log = JsonLines(path)
    log.write({"step": 2})
    log.close()
    ended = "\n" * (text[-1:] not in ("", "\n"))
    assert path.read_text() == f'{text}{ended}{{"step": 2}}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_record_that_does_not_fit_on_the_disk_names_its_file():
    log = JsonLines("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        log.write({"step": 1})
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        log.close()


def test_event_files_hold_every_number(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401  that it can be read at all

    board = TensorBoard(tmp_path)
    board.write({"step": 3, "loss": 2.5, "seconds": {"step": 0.25}, "text": "no number"})
    board.close()
    (path,) = tmp_path.glob("events.*")
    data, found, at = path.read_bytes(), {}, 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
        at += 16 + size
    assert found == {(3, "loss"): 2.5, (3, "seconds/step"): 0.25}


def test_progress_without_a_terminal_is_a_line_for_each_tenth():
    from rich.console import Console

    text = io.StringIO()
    bar = Progress(20, console=Console(file=text, width=200, highlight=False, markup=False))
    seconds = {"step": 0.1, "input": 0.02, "compute": 0.06, "bubble": 0.02, "communication": 0.0}
    for step in range(1, 5):
        bar.write(
            {
                "step": step,
                "loss": 2.0,
                "tokens_per_second": 1234.5,
                "mfu": 0.25,
                "seconds": seconds,
                "predicted": ["compute", "bubble", "communication"],
            }
        )
    bar.write({"step": 4, "event": "skipped", "text": "not finite"})
    bar.write({"step": 4, "eval_loss": 1.5})
    bar.close()
    line = "loss 2.000 · 1,234 tokens/s · MFU 25.0% · predicted bubble 25.0% · input 20.0%"
    lines = [one.strip() for one in text.getvalue().splitlines()]
    assert [one for one in lines if one.startswith("step")] == [
        f"step 2/20 · {line}",
        f"step 4/20 · {line}",
        "step 4: not finite",
        "step 4/20 · held-out loss 1.5000",
    ]


@pytest.mark.parametrize(("module", "make"), [("rich", Progress), ("tensorboardX", TensorBoard)])
def test_what_is_not_installed_is_named(module, make, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    verb = {"rich": "draws", "tensorboardX": "writes"}[module]
    with pytest.raises(ImportError) as caught:
        make(1)
    assert str(caught.value) == (
        f"{make.__name__}(...) {verb} with {module}, which is not installed; run pip install "
        f"'shardpipe[training]', or record to JsonLines"
    )


# --- where time goes ---


def test_predicted_shares_are_those_of_the_clock():
    stages = models.build(models.Block, 2)
    options = {"mesh": make_mesh(stage=2), "loss_fn": models.squares, "schedule": "gpipe"}
    found = predicted(Pipeline(stages, 4, remat=None, **options))
    assert found == pytest.approx((0.8, 0.2, 0.0))  # 4 of 4 + 2 - 1
    costs = Costs(f=1, i=1, w=1, comm=0.5)
    sent = predicted(Pipeline(stages, 4, remat=None, costs=costs, **options))
    assert sum(sent) == pytest.approx(1)
    assert sent.communication > 0.05
    assert predicted(stages[0]) == (1, 0, 0)


def test_operations_are_counted_by_matrices():
    pipe = make_step().model
    wanted = 6 * (2 * 2 * models.WIDTH * 2 * models.WIDTH + models.WIDTH * CLASSES)
    assert count_flops(pipe) == wanted
    words = Batch(np.zeros((4, 7), np.int32), ())
    assert tokens_of(words) == 28
    assert tokens_of(Batch(np.zeros((4, 7), np.float32), ())) == 4
    assert find_peak_flops(jax.devices()[0]) is None


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "steps=0: must be a whole number >= 1"),
        (
            {"stuck_after": 0},
            "stuck_after=0: must be a number of seconds > 0, or None to wait for ever",
        ),
        (
            {"eval_interval": 2},
            "eval_interval=2: there is no evaluation=; give batches",
        ),
        (
            {"checkpoint_interval": 2},
            ("checkpoint_interval=2: there are no checkpoints=; give Checkpoints(folder)"),
        ),
    ],
)
def test_an_option_that_cannot_be(options, text):
    assert refusal(Trainer, make_step(plain=True), Numbered(), **{"steps": 3} | options) == text


def test_data_that_ends_or_has_no_position():
    trainer = Trainer(make_step(plain=True), [next(Numbered())], steps=3, checkpoints=Memory())
    assert refusal(trainer.run) == (
        "the data ended after 1 of 3 updates; give data that repeats, or fewer steps"
    )
    assert refusal(trainer.resume) == (
        "resume() cannot say where in the data the run was: list_iterator has no get_state() and "
        "set_state(); give an iterator that has, as those of grain, or ignore=('data',) to begin "
        "with its first batch"
    )
    assert (
        refusal(Trainer(make_step(plain=True), Numbered(), steps=3).resume)
        == "resume() has nothing to resume from; give checkpoints="
    )
    assert refusal(trainer.evaluate) == "evaluate() has nothing to evaluate on; give evaluation="
    assert refusal(
        Trainer(make_step(plain=True), Numbered(), steps=3, evaluation=iter([])).evaluate
    ) == (
        "the evaluation gave no batch; give a list, or an iterable that can start again: an "
        "iterator ends with the first evaluation"
    )


# In a process of its own: `bench` keeps the memory that a step has freed.
GROWTH = """
import gc, sys
import bench
import jax, numpy as np, optax
from flax import nnx
from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.training.records import JsonLines
from pipeline.training.step import Step
from pipeline.training.trainer import Trainer, resident

def batches():
    rows = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    while True:
        yield rows, rows

def look(_, record):
    if record["step"] in (200, 2000):
        gc.collect()
        print(resident())

stages = [nnx.Linear(16, 16, rngs=nnx.Rngs(k)) for k in range(2)]
pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), loss_fn=lambda y, t: ((y - t) ** 2).mean())
step = Step(pipe, make_optimizer(pipe, optax.adamw(1e-3)), clip=1.0, ema=0.999)
log = JsonLines(sys.argv[1])
trainer = Trainer(step, batches(), steps=2000, recorders=[log], hooks=[look])
trainer.run()
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_memory_does_not_grow_with_steps(tmp_path):
    done = python("-c", GROWTH, str(tmp_path / "log.jsonl"))
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split()[-2:])
    assert 0 < after < 1.01 * before


class Foreign:
    """An array of another library: a dtype of its own kind, and __array__."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)
        self.shape, self.dtype = self._array.shape, "foreign.float32"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array


@pytest.mark.slow
def test_batches_of_other_libraries_are_those_of_numpy():
    """As torch's `DataLoader` gives them (issue 38); in tuples, dicts and trees."""
    x, t = models.rows(ROWS), labels(0)
    given = {
        "numpy": (x, t),
        "tuple": (Foreign(x), Foreign(t)),
        "dict": {"inputs": Foreign(x), "targets": t, "weight": 3},
        "batch": Batch(Foreign(x), Foreign(t)),
    }
    found = {}
    for name, item in given.items():
        step = make_step(accumulate=2)
        run = Trainer(step, [item] * 2, steps=1, evaluation=[item])
        run.run()
        found[name] = np.float32([*run.losses, run.eval_loss])
    for losses in found.values():
        assert_close(losses, found["numpy"])


def test_a_list_of_numbers_is_refused_by_name():
    step = make_step()
    rows = np.asarray(models.rows(ROWS)).tolist()
    with pytest.raises(ValueError, match=r"make it one array, numpy.asarray\(inputs\)"):
        Trainer(step, [(rows, labels(0))], steps=1).run()
