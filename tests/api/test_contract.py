"""Every call that a trainer may make, compared with the same model without a pipeline.

Letters: S ranks, K stages, V chunks per rank, M microbatches, D data shards.
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import Block, Half, Noisy, Readout, Sided, Tree, Words, by_stage, distance

ROWS = 12  # of every batch here: a multiple of all M * D
X, T = models.rows(ROWS), models.rows(ROWS, seed=3)
TOLERANCE = 1e-5


def make(kind=Block, count=2, *, S=2, D=1, M=3, **options) -> Pipeline:
    stages = options.pop("stages", None) or models.build(kind, count)
    options.setdefault("loss_fn", models.squares)
    options.setdefault("schedule", "1f1b")
    return Pipeline(stages, M, mesh=make_mesh(stage=S, data=D), **options)


def update(optimizer: nnx.Optimizer, model: nnx.Module, grads: nnx.State) -> None:
    """`nnx.Optimizer.update`; optax counts steps in integers and multiplies them with floats."""
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, grads)


def trees_equal(a, b) -> bool:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# --- the three calls ---


@pytest.mark.few
@pytest.mark.parametrize("D", [1, 2])
def test_outputs(D):
    head = Readout(nnx.Rngs(7))
    pipe = make(D=D, head=head)
    want = models.compose(models.build(Block, 2), None, head, X)
    assert_close(pipe(X), want)
    assert_close(jax.jit(pipe)(X), want)


def test_outputs_that_are_trees_with_integers():
    x = {"row": X, "gate": T, "kind": models.words(ROWS, most=3)}
    found = make(Tree, head=lambda y: (y["row"].sum(-1), y["kind"] + 1))(x)
    want = models.compose(models.build(Tree, 2), None, None, x)
    assert_close(found[0], want["row"].sum(-1))
    np.testing.assert_array_equal(found[1], x["kind"] + 1)


@pytest.mark.slow
def test_loss_and_gradients_agree_between_all_ways_to_ask():
    pipe = make(embed=Words(nnx.Rngs(5)), head=Readout(nnx.Rngs(6)), loss_fn=models.cross_entropy)
    x, t = models.words(ROWS), models.words(ROWS, most=models.CLASSES, seed=4)
    want = models.reference(
        models.build(Block, 2),
        x,
        t,
        models.cross_entropy,
        embed=Words(nnx.Rngs(5)),
        head=Readout(nnx.Rngs(6)),
    )
    direct = pipe.value_and_grad(x, t)
    models.assert_matches(pipe, direct, want)
    assert distance(pipe.loss(x, t), want[0]) < TOLERANCE
    trainer = nnx.value_and_grad(lambda model: model.loss(x, t))
    for value, grads in (trainer(pipe), nnx.jit(trainer)(pipe)):
        assert jax.tree.structure(grads) == jax.tree.structure(direct[1])
        models.assert_matches(pipe, (value, grads), want)
    assert np.array_equal(trainer(pipe)[0], direct[0])


def test_gradients_are_laid_out_as_the_parameters():
    pipe = make(head=Readout(nnx.Rngs(6)), loss_fn=lambda y, t: jnp.mean(y))
    _, grads = pipe.value_and_grad(X, T)
    params = nnx.state(pipe, nnx.Param)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        assert g.sharding.is_equivalent_to(w.sharding, g.ndim)


def test_the_gradient_of_a_scaled_loss_is_scaled():
    pipe = make()
    _, once = pipe.value_and_grad(X, T)
    thrice = nnx.grad(lambda model: 3.0 * model.loss(X, T) + 1.0)(pipe)
    assert distance(thrice, jax.tree.map(lambda g: 3.0 * g, once)) < TOLERANCE


@pytest.mark.parametrize(
    ("D", "remat"), [(2, "stage"), pytest.param(1, None, marks=pytest.mark.slow)]
)
def test_the_gradient_of_outputs(D, remat):
    """Gradients of any function of `pipe(x)`: for parameters and for float inputs."""
    head = Readout(nnx.Rngs(6))
    pipe = make(D=D, head=head, remat=remat, loss_fn=None)

    def outside(y, t):
        return jnp.sum(jnp.sin(y)) * 0.3

    loss, stages, ends, inputs = models.reference(
        models.build(Block, 2), X, T, outside, head=head, wrt_inputs=True
    )
    found = nnx.value_and_grad(lambda model: outside(model(X), T))(pipe)
    models.assert_matches(pipe, found, (loss, stages, ends))
    assert distance(jax.grad(lambda x: outside(pipe(x), T))(X), inputs) < TOLERANCE


@pytest.mark.few
@pytest.mark.parametrize(
    ("D", "with_embed"),
    [
        (2, True),
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_the_loss_for_float_inputs(D, with_embed):
    embed = Block(nnx.Rngs(8)) if with_embed else None
    pipe = make(D=D, embed=embed)
    want = models.reference(
        models.build(Block, 2), X, T, models.squares, embed=embed, wrt_inputs=True
    )
    found = jax.grad(pipe.loss)(X, T)
    assert found.shape == X.shape
    assert distance(found, want[3]) < TOLERANCE
    value, (grads, inputs) = nnx.value_and_grad(lambda model, x: model.loss(x, T), argnums=(0, 1))(
        pipe, X
    )
    models.assert_matches(pipe, (value, grads), want)
    assert distance(inputs, want[3]) < TOLERANCE


def test_the_gradient_for_a_tree_of_inputs_with_integers():
    x = {"row": X, "gate": T, "kind": models.words(ROWS, most=3)}

    def loss_fn(y, t):
        return models.squares(y["row"], t)

    pipe = make(Tree, loss_fn=loss_fn)

    def plain(x):
        return loss_fn(models.compose(models.build(Tree, 2), None, None, x), T)

    found = jax.grad(lambda x: pipe.loss(x, T), allow_int=True)(x)
    wanted = jax.grad(plain, allow_int=True)(x)
    assert found["kind"].dtype == wanted["kind"].dtype == jax.dtypes.float0
    for name in ("row", "gate"):
        assert distance(found[name], wanted[name]) < TOLERANCE


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("targets", lambda pipe, v: pipe.loss(X, v, extras=SIDES)),
        ("extras", lambda pipe, v: pipe.loss(X, T, extras={**SIDES, "positions": v})),
        ("extras", lambda pipe, v: pipe(X, extras={**SIDES, "positions": v}).sum()),
    ],
)
def test_what_cannot_be_differentiated_says_so(what, call):
    pipe = make(Sided, loss_fn=models.squares)
    with pytest.raises(ValueError) as caught:
        jax.grad(lambda v: call(pipe, v))(T if what == "targets" else jnp.arange(float(ROWS)))
    assert str(caught.value) == (
        f"a pipeline was differentiated with respect to {what}; it has gradients for its nnx.Param "
        f"state and its inputs only: wrap {what} in jax.lax.stop_gradient, or pass it as part of "
        f"inputs"
    )


class Scaled(nnx.Module):
    """Holds a float that is no parameter."""

    def __init__(self, rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)
        self.scale = nnx.BatchStat(jnp.full((1, 1), 0.5))

    def __call__(self, x):
        return x + (x @ self.w[...]) * self.scale[...]


def test_state_that_is_no_parameter_is_used_and_not_differentiated():
    pipe = make(Scaled)
    want = models.reference(models.build(Scaled, 2), X, T, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(X, T), want)
    with pytest.raises(ValueError) as caught:
        nnx.grad(lambda m: m.loss(X, T), argnums=nnx.DiffState(0, nnx.BatchStat))(pipe)
    what = "state that is not nnx.Param"
    assert str(caught.value) == (
        f"a pipeline was differentiated with respect to {what}; it has gradients for its nnx.Param "
        f"state and its inputs only: wrap {what} in jax.lax.stop_gradient, or pass it as part of "
        f"inputs"
    )


def test_a_pure_function_under_jit():
    pipe = make()
    graphdef, params, rest = nnx.split(pipe, nnx.Param, ...)

    @jax.jit
    def step(params, x, t):
        return jax.value_and_grad(lambda p: nnx.merge(graphdef, p, rest).loss(x, t))(params)

    loss, grads = step(params, X, T)
    want = models.reference(models.build(Block, 2), X, T, models.squares)
    models.assert_matches(pipe, (loss, grads), want)
    merged = jax.jit(lambda p, x, t: nnx.merge(graphdef, p, rest).value_and_grad(x, t))
    models.assert_matches(pipe, merged(params, X, T), want)


# --- losses ---


def weighted(y, t):
    """Sum and weight of a masked loss; rows differ in weight, and some have none."""
    return jnp.sum(t["weight"] * jnp.sum((y - t["rows"]) ** 2, axis=-1)), jnp.sum(t["weight"])


@pytest.mark.few
@pytest.mark.parametrize(
    ("S", "D", "M"),
    [
        (2, 2, 3),
        (2, 4, 1),
        pytest.param(4, 1, 12, marks=pytest.mark.slow),
        pytest.param(1, 4, 3, marks=pytest.mark.slow),
    ],
)
def test_a_weighted_loss_is_exact(S, D, M):
    weight = jnp.array([0.0, 3, 1, 0, 0, 0, 2, 1, 1, 0, 5, 0])  # whole microbatches have none
    t = {"rows": T, "weight": weight}
    pipe = make(count=4, S=S, D=D, M=M, loss_fn=weighted)
    want = models.reference(models.build(Block, 4), X, t, weighted)
    models.assert_matches(pipe, pipe.value_and_grad(X, t), want)
    assert distance(pipe.loss(X, t), want[0]) < TOLERANCE


def test_the_weight_of_a_loss_may_be_an_integer():
    def loss_fn(y, t):
        return jnp.sum((y - t) ** 2), y.shape[0]

    want = models.reference(models.build(Block, 2), X, T, loss_fn)
    pipe = make(loss_fn=loss_fn)
    models.assert_matches(pipe, pipe.value_and_grad(X, T), want)


@pytest.mark.parametrize("D", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_loss_is_one_number_on_every_device(D):
    pipe = make(D=D)
    direct = pipe.value_and_grad(X, T)[0]
    for loss in (direct, pipe.loss(X, T), nnx.value_and_grad(lambda m: m.loss(X, T))(pipe)[0]):
        assert (loss.shape, loss.dtype) == ((), jnp.float32)
        assert loss.sharding.is_fully_replicated
        assert len(loss.addressable_shards) == 2 * D
        assert len({float(shard.data) for shard in loss.addressable_shards}) == 1


# --- inputs beside the activation ---

SIDES = {"mask": models.rows(ROWS, seed=8)[:, :1] > 0, "positions": jnp.arange(float(ROWS)) % 5}


@pytest.mark.parametrize("remat", [None, pytest.param("stage", marks=pytest.mark.slow)])
def test_extras_in_every_call(remat):
    pipe = make(Sided, D=2, remat=remat)
    stages = models.build(Sided, 2)
    want = models.reference(stages, X, T, models.squares, extras=SIDES)
    models.assert_matches(pipe, pipe.value_and_grad(X, T, extras=SIDES), want)
    assert distance(pipe.loss(X, T, extras=SIDES), want[0]) < TOLERANCE
    trainer = nnx.value_and_grad(lambda m: m.loss(X, T, extras=SIDES))
    models.assert_matches(pipe, trainer(pipe), want)
    plain = models.compose(stages, None, None, X, SIDES)
    assert_close(pipe(X, extras=SIDES), plain)
    other = {**SIDES, "mask": ~SIDES["mask"]}
    assert distance(pipe.loss(X, T, extras=other), want[0]) > 1e-3


# --- training ---


class Plain(nnx.Module):
    """The model of these tests without a pipeline."""

    def __init__(self, stages, head):
        self.layers, self.head = nnx.List(stages), head

    def loss(self, x, t):
        return models.squares(models.compose(self.layers, None, self.head, x), t)


def train(model, take, *, jit: bool, steps: int = 5) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    def step(model, optimizer, x, t):
        loss, grads = take(model, x, t)
        update(optimizer, model, grads)
        return loss

    step = nnx.jit(step) if jit else step
    return [float(step(model, optimizer, X, T)) for _ in range(steps)]


TAKES = {
    "value_and_grad": lambda model, x, t: model.value_and_grad(x, t),
    "loss": lambda model, x, t: nnx.value_and_grad(lambda m: m.loss(x, t))(model),
}


@pytest.mark.parametrize(
    ("take", "jit"),
    [
        ("value_and_grad", True),
        pytest.param("value_and_grad", False, marks=pytest.mark.slow),
        pytest.param("loss", True, marks=pytest.mark.slow),
    ],
)
def test_five_steps_of_training(take, jit):
    def head(seed):
        return nnx.Linear(models.WIDTH, models.WIDTH, rngs=nnx.Rngs(seed))

    plain = Plain(models.build(Block, 2), head(1))
    want = train(plain, TAKES["loss"], jit=True)
    pipe = make(D=2, head=head(1))
    found = train(pipe, TAKES[take], jit=jit)
    assert_close(found, want, tolerance=TOLERANCE)
    assert want[-1] < 0.9 * want[0]
    for a, b in zip(pipe.stages(), plain.layers, strict=True):
        assert distance(nnx.state(a), nnx.state(b)) < 1e-4  # Adam divides by small numbers
    assert distance(nnx.state(pipe.head), nnx.state(plain.head)) < 1e-4


# --- where things are ---


def rows_of(array) -> dict:
    """Device to the rows of the leading axis that it holds."""
    return {
        shard.device: tuple(range(array.shape[0]))[shard.index[0]]
        for shard in array.addressable_shards
    }


@pytest.mark.few
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_no_rank_holds_another_ranks_weights(jit):
    """Parameters, gradients and moments of the optimizer, before and after a step."""
    S, D = 4, 2
    pipe = make(count=8, S=S, D=D, M=3)
    optimizer = nnx.Optimizer(pipe, optax.adam(1e-2), wrt=nnx.Param)
    own = {pipe.mesh.devices[d, s]: (s,) for d in range(D) for s in range(S)}

    def step(pipe, optimizer, x, t):
        _, grads = pipe.value_and_grad(x, t)
        update(optimizer, pipe, grads)
        return grads

    def held():
        moments = [x for x in jax.tree.leaves(nnx.state(optimizer.opt_state)) if x.ndim]
        assert len(moments) == 2 * len(jax.tree.leaves(nnx.state(pipe)))
        return [*jax.tree.leaves(nnx.state(pipe)), *moments]

    before = held()
    grads = (nnx.jit(step) if jit else step)(pipe, optimizer, X, T)
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(pipe))
    for array in (*before, *jax.tree.leaves(grads), *held()):
        assert array.shape[0] == S
        assert rows_of(array) == own


def test_embed_and_head_are_on_every_device():
    pipe = make(count=4, S=4, D=2, embed=Block(nnx.Rngs(1)), head=Readout(nnx.Rngs(2)))
    for leaf in jax.tree.leaves(nnx.state(pipe.ends)):
        assert leaf.sharding.is_fully_replicated
        assert len(leaf.addressable_shards) == 8


def test_the_modules_given_are_not_modified():
    stages, head = models.build(Noisy, 2), Readout(nnx.Rngs(2))
    given = nnx.Dict(stages=nnx.List(stages), head=head)
    before = jax.tree.map(np.asarray, jax.tree.map(raw, nnx.state(given)))
    places = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(given))]
    pipe = make(stages=stages, head=head, loss_fn=lambda y, t: jnp.mean(y**2))
    optimizer = nnx.Optimizer(pipe, optax.sgd(1.0), wrt=nnx.Param)
    _, grads = pipe.value_and_grad(X, T)
    update(optimizer, pipe, grads)
    pipe.eval()
    assert trees_equal(jax.tree.map(raw, nnx.state(given)), before)
    assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(given))] == places
    assert not any(stage.dropout.deterministic for stage in stages)
    assert not trees_equal(nnx.state(pipe.stages()[0], nnx.Param), nnx.state(stages[0], nnx.Param))


def raw(leaf):
    """A key as its numbers."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def test_stages_come_back_whole_and_in_layer_order():
    given = models.build(Block, 6)
    found = make(stages=given, S=2).stages()
    assert [type(stage) for stage in found] == [Block] * 6
    for a, b in zip(found, given, strict=True):
        assert trees_equal(nnx.state(a), nnx.state(b))
    wanted = models.compose(given, None, None, X)
    assert_close(models.compose(found, None, None, X), wanted, tolerance=1e-6)


def test_stages_may_be_an_nnx_list():
    given = models.build(Block, 2)
    a, b = make(stages=given), make(stages=nnx.List(given))
    assert b.schedule.num_stages == 2
    assert trees_equal(nnx.state(a), nnx.state(b))


def test_stages_may_be_abstract():
    """A model too large for one device is never made on one."""
    stages = [nnx.eval_shape(lambda: Block(nnx.Rngs(0))) for _ in range(2)]
    pipe = make(stages=stages, head=nnx.eval_shape(lambda: Readout(nnx.Rngs(0))))
    for leaf in jax.tree.leaves(nnx.state(pipe.chunks)):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert (leaf.shape[0], leaf.sharding.spec) == (2, P("stage"))
    for leaf in jax.tree.leaves(nnx.state(pipe.ends)):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert leaf.sharding.is_fully_replicated


def test_one_stage():
    pipe = make(count=1, S=1, D=2)
    want = models.reference(models.build(Block, 1), X, T, models.squares)
    models.assert_matches(pipe, pipe.value_and_grad(X, T), want)
    assert_close(pipe(X), models.compose(models.build(Block, 1), None, None, X))


def test_integer_inputs_without_an_embedding():
    """The stage itself may take integers, as long as it returns them."""

    class Counter(nnx.Module):
        def __init__(self, rngs):
            self.step = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return {"n": x["n"] + 1, "sum": x["sum"] + self.step[...] * x["n"].astype(jnp.float32)}

    n = models.words(ROWS)
    x = {"n": n, "sum": jnp.zeros(ROWS)}

    def loss_fn(y, t):
        return jnp.mean(y["sum"] * t)

    pipe = make(Counter, loss_fn=loss_fn)
    y = pipe(x)
    np.testing.assert_array_equal(y["n"], n + 2)
    np.testing.assert_array_equal(y["sum"], 2 * n + 1)
    t = jnp.arange(float(ROWS))
    want = models.reference(models.build(Counter, 2), x, t, loss_fn)
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want)


# --- compilation ---


@pytest.fixture
def compiled():
    """Messages of jax's compiler, one for each compilation."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield lambda: [text[:60] for text in messages if text.startswith("Compiling")]
    logger.removeHandler(handler)


@pytest.mark.slow
def test_the_second_call_does_not_compile(compiled):
    pipe = make(Noisy, D=2)
    optimizer = nnx.Optimizer(pipe, optax.adam(1e-2), wrt=nnx.Param)
    calls = (
        lambda: update(optimizer, pipe, pipe.value_and_grad(X, T)[1]),
        lambda: pipe.loss(X, T),
        lambda: pipe(X),
        lambda: nnx.grad(lambda m: m.loss(X, T))(pipe),
    )
    for call in calls:
        before = len(compiled())
        call()
        assert len(compiled()) > before
        call()  # the optimizer's scalars are on the mesh now, a type of their own
        seen = compiled()
        for _ in range(3):
            call()
        assert compiled() == seen


def test_a_jitted_step_stays_compiled(compiled):
    @nnx.jit
    def step(pipe, optimizer, x, t):
        loss, grads = pipe.value_and_grad(x, t)
        update(optimizer, pipe, grads)
        return loss

    pipe = make(Noisy, D=2)
    optimizer = nnx.Optimizer(pipe, optax.adam(1e-2), wrt=nnx.Param)
    step(pipe, optimizer, X, T)
    step(pipe, optimizer, X, T)
    seen = compiled()
    assert seen
    for _ in range(3):
        step(pipe, optimizer, X, T)
    assert compiled() == seen


# --- dropout ---


def fixed_masks(stages, x, *, call: int, M: int, D: int = 1):
    """Outputs without a pipeline, with the keys a pipeline folds: call, microbatch, data shard."""
    shards = []
    for shard, part in enumerate(jnp.split(x, D)):
        for m, rows in enumerate(jnp.split(part, M)):
            y = rows
            for stage in stages:
                twin = nnx.clone(stage)
                stream = twin.dropout.rngs
                key = jax.random.fold_in(stream.key.get_value(), call)
                key = jax.random.fold_in(jax.random.fold_in(key, m), shard)
                stream.key.set_value(key)
                stream.count.set_value(jnp.zeros_like(stream.count.get_value()))
                y = twin(y)
            shards.append(y)
    return jnp.concatenate(shards)


@pytest.mark.parametrize("D", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_dropout_keys_fold_call_microbatch_and_shard(D):
    stages = models.build(Noisy, 2)
    first = int(stages[0].dropout.rngs.count.get_value())
    pipe = make(stages=stages, D=D)
    for call in (1, 2):
        want = fixed_masks(stages, X, call=first + call, M=3, D=D)
        assert_close(pipe(X), want)


@pytest.mark.slow
def test_dropout_does_not_depend_on_how_it_is_run():
    """Schedule, ranks and remat: the same masks, forward and recomputed."""
    found = []
    for options in (
        {"schedule": "1f1b"},
        {"schedule": "gpipe", "remat": None},
        {"schedule": "eager_1f1b"},
        {"schedule": "1f1b", "S": 1},
    ):
        pipe = make(Noisy, **options)
        loss, grads = pipe.value_and_grad(X, T)
        found.append((loss, by_stage(pipe, grads)))
    for other in found[1:]:
        assert distance(other, found[0]) < TOLERANCE


@pytest.mark.few
@pytest.mark.parametrize("remat", ["stage", None])
def test_gradients_under_dropout(remat):
    stages = models.build(Noisy, 2)
    first = int(stages[0].dropout.rngs.count.get_value())
    split = [nnx.split(stage, nnx.Param, ...) for stage in stages]

    def plain(params):
        merged = [nnx.merge(g, p, rest) for (g, _, rest), p in zip(split, params, strict=True)]
        return models.squares(fixed_masks(merged, X, call=first + 1, M=3), T)

    want = jax.value_and_grad(plain)([params for _, params, _ in split])
    pipe = make(stages=stages, remat=remat)
    loss, grads = pipe.value_and_grad(X, T)
    assert distance((loss, by_stage(pipe, grads)), want) < TOLERANCE


def test_every_call_draws_new_masks():
    pipe = make(Noisy, 1, S=1)
    calls = [
        lambda: pipe.loss(X, T),
        lambda: pipe.value_and_grad(X, T)[0],
        lambda: nnx.value_and_grad(lambda m: m.loss(X, T))(pipe)[0],
        lambda: nnx.jit(lambda m: m.loss(X, T))(pipe),
    ]
    losses = [float(call()) for call in (*calls, *calls)]
    assert len(set(losses)) == len(losses)


def test_eval_and_train_switch_dropout():
    pipe = make(Noisy)
    pipe.eval()
    stages = models.build(Noisy, 2)
    for stage in stages:
        stage.eval()
    want = models.compose(stages, None, None, X)
    assert_close(pipe(X), want)
    np.testing.assert_array_equal(pipe(X), pipe(X))
    pipe.train()
    assert distance(pipe(X), want) > 1e-2


# --- low precision ---


def relative(a, b) -> float:
    """Error of a tree in the Euclidean norm."""
    a, b = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)]) for t in (a, b)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("remat", ["stage", None])
def test_gradients_of_bfloat16_weights_are_summed_in_float32(remat):
    M = 64
    x, t = models.rows(M), models.rows(M, seed=1) * 0.1
    stages = models.build(Half, 2)
    pipe = make(stages=stages, S=2, M=M, remat=remat)
    _, grads = pipe.value_and_grad(x, t)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}

    weights = [stage.w[...].astype(jnp.float32) for stage in stages]

    def plain(weights, x, t):
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return models.squares(x, t)

    exact = jax.grad(plain)(weights, x, t)
    each = jax.vmap(lambda x, t: jax.grad(plain)(weights, x[None], t[None]))(x, t)
    rough = [jnp.zeros(w.shape, jnp.bfloat16) for w in weights]
    for m in range(M):  # what adding up in bfloat16 would give
        rough = [r + (g[m] / M).astype(jnp.bfloat16) for r, g in zip(rough, each, strict=True)]
    one_rounding = 2**-9
    assert relative(by_stage(pipe, grads), exact) < one_rounding
    assert relative(rough, exact) > 2 * one_rounding


# --- what it says of itself ---


def test_describe():
    assert make(count=8, S=4, D=2, M=3, schedule="1f1b", remat=None).describe() == (
        "8 stages on 4 ranks, 2 per rank, 3 microbatches\n"
        "mesh data 2 x stage 4: 8 of 8 devices\n"
        "schedule 1f1b: asked for by name\n"
        "21 ticks of slots FBIW: the fastest where exchanges are barriers\n"
        "per rank 2 message buffers, 6 residual stashes\n"
        "predicted bubble at F = I = W: a step loses 45.5% of its ranks' time in lockstep\n"
        "bytes per rank: weights 2,048, sums of gradients 2,048; describe(inputs, targets) "
        "predicts the rest\n"
        "engine='programs': 0.94 of this step, by the event clock"
    )


def test_describe_says_why_a_schedule_runs(tmp_path):
    path = tmp_path / "mine.csv"
    schedule = schedules.build("gpipe", num_ranks=2, num_microbatches=3)
    schedule.to_csv(path)
    found = [make(count=2, schedule=given).describe() for given in (None, "gpipe", schedule, path)]
    assert [text.splitlines()[2] for text in found] == [
        (
            "schedule eager_1f1b: the default: its paired ticks lose nothing where every exchange "
            "is a barrier"
        ),
        "schedule gpipe: asked for by name",
        "schedule gpipe: given as a Schedule",
        f"schedule mine: read from {path}",
    ]
    assert {text.splitlines()[1] for text in found} == {"mesh data 1 x stage 2: 2 of 8 devices"}
