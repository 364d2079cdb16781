"""Calls of an update with losses that stages add: one step of all microbatches (issue 67)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import schedules
from collectives import make_mesh
from pipeline import Pipeline, add_loss, make_optimizer
from pipeline.layers import ExpertState, MixtureOfExperts, advance_experts, data_mask
from pipeline.training.batches import Padded, masked
from pipeline.training.step import DynamicScale, Step
from tests.support.close import assert_close
from tests.support.refusals import refusal

N, WIDTH, CALLS = 8, 6, 2
SHARED = "stages add losses (add_loss) and the loss is (sum, weight), so that Step(accumulate=) "
SHARED += "runs all calls of an update as one step"
REMEDY = "give every call a weight= (a Trainer: every Batch), which its added losses then have too"


class Seen(nnx.Variable):
    """State that each call of a stage writes."""


class Stage(nnx.Module):
    """Adds a loss that is no mean over rows, and keeps state that depends on their order."""

    def __init__(self, k):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(k))
        self.mean, self.rows = Seen(jnp.zeros(WIDTH)), Seen(jnp.zeros((), jnp.int32))

    def __call__(self, x, scale=None):
        y = x + self.linear(x)
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * y.mean(0)
        self.rows[...] += y.shape[0]
        return add_loss(y, 0.5 * jnp.sum(y.mean(0) ** 2))


def of_words(y, targets):
    target, counts = targets
    return (((y - target) ** 2).mean(-1) * counts).sum(), counts.sum()


def with_metrics(y, targets):
    return of_words(y, targets), {"mean": (jnp.abs(y).sum(), y.size), "rows": jnp.int32(len(y))}


def make(microbatches=2, loss_fn=of_words, mesh=None, **options):
    stages = [Stage(k) for k in range(2)]
    mesh = make_mesh(stage=2) if mesh is None else mesh
    options = {"state": Seen, "loss_fn": loss_fn, "mesh": mesh} | options
    return Pipeline(stages, microbatches, **options)


def make_step(pipe, calls=CALLS, **options):
    return Step(pipe, make_optimizer(pipe, optax.sgd(1.0)), accumulate=calls, **options)


def batches():
    """Calls whose weights differ: 1 of 4 rows, and 4."""
    x, t = np.array(jax.random.normal(jax.random.key(0), (2, CALLS, N, WIDTH)))
    counts = np.stack([np.arange(N) % 4 == 0, np.ones(N)]).astype(np.float32)
    return [(x[c], (t[c], counts[c])) for c in range(CALLS)]


def run(step, given):
    """Run calls from one buffer, which the loader writes again."""
    buffer = jax.tree.map(np.empty_like, given[0])
    for batch in given:
        jax.tree.map(np.copyto, buffer, batch)
        metrics = step(*buffer)
    return metrics


def by_shard(shards, *rows):
    return np.stack([x.reshape(shards, -1, *x.shape[1:]) for x in rows], 1).reshape(
        -1, *rows[0].shape[1:]
    )


def plain_loss(shards, microbatches):
    """The sum of sums over the sum of weights, plus the mean of what microbatches add."""
    stages, sums, weights, added = [Stage(k) for k in range(2)], 0.0, 0.0, []
    for x, targets in batches():
        for rows in np.split(np.arange(N), shards * microbatches):
            y, value = x[rows], 0.0
            for stage in stages:
                y = y + stage.linear(y)
                value += 0.5 * jnp.sum(y.mean(0) ** 2)
            total, weight = of_words(y, [target[rows] for target in targets])
            sums, weights, added = sums + total, weights + weight, [*added, value]
    return sums / weights + sum(added) / len(added)


def state_of(pipe):
    return jax.tree.leaves(pipe.to_layers(nnx.state(pipe, (nnx.Param, Seen))))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"stage": 2, "data": 2}, {}),
        ({"stage": 2, "data": 2}, {"engine": "programs"}),
        pytest.param({"stage": 2}, {"schedule": "zb_h1"}, marks=pytest.mark.slow),
    ],
)
def test_each_microbatch_of_an_update_counts_what_it_adds_once(sizes, options):
    """As one call of the same microbatches: loss, gradients, metrics and declared state."""
    mesh, shards = make_mesh(**sizes), sizes.get("data", 1)
    made = [make(M, with_metrics, mesh, **options) for M in (2, 2 * CALLS)]
    given = {"has_aux": True, "ema": 0.5, "loss_scale": DynamicScale()}
    steps = [make_step(pipe, calls, **given) for pipe, calls in zip(made, (CALLS, 1), strict=True)]
    whole = jax.tree.map(lambda *rows: by_shard(shards, *rows), *batches())
    wanted_loss = plain_loss(shards, 2)
    for n in range(2):
        found, wanted = run(steps[0], batches()), steps[1](*whole)
        if n == 0:
            assert_close(found.loss, wanted_loss)
        assert_close(found, wanted)
        assert_close(state_of(made[0]), state_of(made[1]))
    assert_close(jax.tree.leaves(steps[0].ema), jax.tree.leaves(steps[1].ema))


def test_a_call_that_does_not_fit_is_refused_and_the_update_goes_on():
    pipe = make(batch={"extras": {"scale": P()}}, remat=None)
    step, (first, last) = make_step(pipe), batches()
    scale = np.float32(1)
    step(*first, extras={"scale": scale})
    assert step.pending == 1
    x, targets = last
    half = (x[:4], (targets[0][:4], targets[1][:4]))
    for batch, options, text in (
        (half, {"scale": scale}, "inputs is float32[4,6] in call 2 and float32[8,6]"),
        (last, {}, "extras['scale'] is missing in call 2 and float32[]"),
        (
            last,
            {"scale": scale + 1},
            "extras['scale'] has no batch axis, and other values in call 2 than",
        ),
    ):
        assert (
            refusal(step, *batch, extras=options)
            == f"{text} in call 1 of an update: {SHARED}; {REMEDY}"
        )
    assert refusal(step, *last, extras={"scale": scale}, weight=3) == (
        f"weight=3 in call 2 of an update whose call 1 had none: {SHARED}; give every call of an "
        f"update a weight=, or none"
    )
    assert step.pending == 1
    wanted = run(make_step(make()), batches())
    assert_close(step(*last, extras={"scale": scale}).loss, wanted.loss)
    assert step.pending == 0


def test_a_family_is_built_for_all_microbatches_and_another_timetable_is_refused():
    own = schedules.build("zb_h1", num_ranks=2, num_microbatches=2)
    found = run(make_step(make(schedule=own)), batches())
    assert_close(found.loss, plain_loss(1, 2))
    own = schedules.from_orders(own.orders, name="mine")
    assert refusal(make_step(make(schedule=own)), *batches()[0]) == (
        f"{SHARED} of 4 microbatches, and the pipeline's schedule has no timetable for them with "
        f"the same stages on each rank: name one that has (schedule=), or {REMEDY}"
    )


class Masking(Stage):
    """Asks for the mask of padding, so that nothing warns that the stage counts padding."""

    def __call__(self, x):
        data_mask()
        return super().__call__(x)


def test_what_was_traced_before_does_not_decide_for_other_targets():
    """`masked` returns a mean for plain targets, and (sum, weight) for padded ones."""
    loss_fn, stages = masked(lambda y, t: ((y - t) ** 2).mean()), [Masking(k) for k in range(2)]
    pipe = Pipeline(stages, 2, state=Seen, loss_fn=loss_fn, mesh=make_mesh(stage=2))
    (x, (t, counts)), (x2, (t2, counts2)) = batches()
    pipe.check(x, t)
    step = make_step(pipe)
    step(jnp.asarray(x), Padded(jnp.asarray(t), jnp.asarray(counts)))
    found = step(jnp.asarray(x2), Padded(jnp.asarray(t2), jnp.asarray(counts2)))
    assert_close(found.loss, plain_loss(1, 2))


class Holds(nnx.Module):
    """A model that has a pipeline, and weights of its loss."""

    def __init__(self):
        self.pipe = make()

    def loss(self, inputs, targets, *, weighed=False):
        return self.pipe.loss(inputs, targets, weighed=weighed)


def test_calls_with_weights_of_their_own_are_warned_of_once():
    text = (
        "stages add losses (add_loss), and Step(accumulate=) gives the losses that they add in a "
        "call the weight of this call; so that each microbatch counts once, give the Step a "
        "Pipeline and no weight= (a Trainer: no Batch.weight), or make one call of all rows"
    )
    model = Holds()
    for step, weight in (
        (make_step(make()), {"weight": 1}),
        (Step(model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param), accumulate=2), {}),
    ):
        first, last = batches()
        with pytest.warns(UserWarning, match="add_loss") as caught:
            step(*first, **weight)
        assert [str(one.message) for one in caught] == [text]
        assert step(*last, **weight) is not None
        step(*first, **weight)


@pytest.mark.slow
def test_routers_count_the_choices_of_all_calls():
    """On ranks of experts and of data, with rows of padding."""
    mesh, found = make_mesh(stage=2, expert=2, data=2), []
    long = lambda rows: np.stack([rows, -rows, rows / 2], 1)  # noqa: E731  three positions
    calls = [(long(x), Padded(long(t), counts)) for x, (t, counts) in batches()]
    whole = jax.tree.map(lambda *rows: by_shard(4, *rows), *calls)
    for microbatches, given in (2, calls), (2 * CALLS, [whole]):
        stages = [
            MixtureOfExperts(WIDTH, 8, 4, 2, nnx.Rngs(k), balance_weight=0.5, counts=True)
            for k in range(2)
        ]
        pipe = Pipeline(
            stages,
            microbatches,
            loss_fn=masked(lambda y, t: ((y - t) ** 2).mean()),
            mesh=mesh,
            batch=P(("data", "expert")),
            state=ExpertState,
            after_step=advance_experts,
        )
        step = make_step(pipe, len(given))
        for _ in range(2):
            metrics = [step(*batch) for batch in given][-1]
        state = pipe.to_layers(nnx.state(pipe, (nnx.Param, ExpertState)))
        found.append((metrics, jax.tree.leaves(state)))
    assert_close(found[0], found[1])
