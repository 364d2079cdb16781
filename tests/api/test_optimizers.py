"""`make_optimizer`: all of optax, sorted; whole trainings; checkpoints; what is refused.

Letters: S ranks, K stages, V chunks, D data shards.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.optimizer import shard_optimizer
from tests.api.test_layer_view import (
    LAYERWISE,
    K,
    Layers,
    M,
    assert_equal,
    clip,
    gradients,
    matrices,
    parts,
    pipeline,
    plain,
    refusal,
)
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import CLASSES

pytestmark = pytest.mark.usefixtures("lenient")
contrib = optax.contrib
slow, exhaustive = pytest.mark.slow, (pytest.mark.slow, pytest.mark.exhaustive)
ROWS = 16

# --- every public transformation ---

adam, lamb = optax.adam(1e-2), optax.lamb(1e-2)
key = jax.random.key(0)


def half(step: Any, *_: Any, **__: Any) -> Any:
    return step % 2 == 0


MADE: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(1e-2),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=key),
    "apply_if_finite": lambda: optax.apply_if_finite(lamb, 2),
    "chain": lambda: optax.chain(clip, lamb),
    "clip": lambda: optax.clip(0.1),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: clip,
    "conditionally_mask": lambda: optax.conditionally_mask(lamb, half),
    "conditionally_transform": lambda: optax.conditionally_transform(lamb, half),
    "ema": lambda: optax.ema(0.9),
    "freeze": lambda: optax.freeze(matrices),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.lamb)(
        optax.linear_schedule(1e-2, 1e-3, 3)
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.lamb)(1e-2),
    "masked": lambda: optax.masked(lamb, matrices),
    "multi_transform": LAYERWISE["multi_transform"],
    "named_chain": lambda: optax.named_chain(("clip", clip), ("lamb", lamb)),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=key),
    "partition": LAYERWISE["multi_transform"],
    "scale": lambda: optax.scale(0.1),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 3)),
    "selective_transform": lambda: optax.selective_transform(lamb, freeze_mask=matrices),
    "snapshot": lambda: optax.snapshot("norm", optax.global_norm),
    "stateless": lambda: optax.stateless(lambda u, p: jax.tree.map(jnp.add, u, p)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: u + p.mean()),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(lamb),
    "mechanize": lambda: contrib.mechanize(adam),
    "scale_by_muon": lambda: optax.masked(
        contrib.scale_by_muon(
            weight_dimension_numbers=lambda layers: jax.tree.map(
                lambda _: contrib.MuonDimensionNumbers(), layers
            )
        ),
        matrices,
    ),
    "galore": lambda: contrib.galore(1e-2, rank=4),
    "sam": lambda: contrib.sam(adam, optax.chain(contrib.normalize(), optax.sgd(1e-2))),
    "schedule_free": lambda: contrib.schedule_free(adam, 1e-2),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(lamb),
}
REFUSED: dict[str, Callable[[], Any]] = {"flatten": lambda: optax.flatten(adam)}
# Those that run a model themselves, want gradients of every row, or parameters in pairs; and what
# measures updates and returns none.
NOT_OURS = {
    "differentially_private_aggregate",
    "dpsgd",
    "lbfgs",
    "lookahead",
    "measure_with_ema",
    "scale_by_backtracking_linesearch",
    "scale_by_zoom_linesearch",
    "sophia",
}


def public() -> dict[str, Any]:
    """Everything in optax that says it returns a transformation."""
    found = {}
    for module in (optax, contrib):
        for name, make in vars(module).items():
            if inspect.isfunction(make) and not name.startswith("_"):
                returned = str(inspect.signature(make).return_annotation)
                if "GradientTransformation" in returned:
                    found[name] = make
    return found


SORTED = sorted(public().keys() - NOT_OURS - REFUSED.keys())


def made(name: str) -> Any:
    if name in MADE:
        return MADE[name]()
    make = public()[name]
    takes_rate = "learning_rate" in inspect.signature(make).parameters
    return make(learning_rate=1e-2) if takes_rate else make()


class Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 6)))
        self.b = nnx.Param(jax.random.normal(rngs.params(), (6,)))

    def __call__(self, x):
        return x


class Many(nnx.Module):
    """As many arrays as a real layer has: `jnp.array` joins a list of more than 16 in groups."""

    def __init__(self, rngs: nnx.Rngs, *, count: int = 10):
        self.w = nnx.List([nnx.Param(jax.random.normal(rngs.params(), (6,))) for _ in range(count)])

    def __call__(self, x):
        return x


def small(kind: Any = Small) -> tuple[Pipeline, Layers]:
    stages = [kind(nnx.Rngs(k)) for k in range(2)]
    head = kind(nnx.Rngs(2))
    pipe = Pipeline(stages, M, mesh=make_mesh(stage=2), head=head, loss_fn=models.squares)
    return pipe, pipe.to_layers(nnx.state(pipe, nnx.Param))


def compare(
    tx: Any, steps: int = 2, kind: Any = Small, bad: int | None = None, **extra: Any
) -> None:
    """Updates against the plain model's; the gradients of step ``bad`` hold one NaN."""
    pipe, weights = small(kind)
    optimizer = make_optimizer(pipe, tx)
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(weights: Layers, state: Any, grads: Layers) -> Any:
        updates, state = tx.update(grads, state, weights, **extra)
        return optax.apply_updates(weights, updates), state

    state = tx.init(weights)
    for n in range(steps):
        grads = gradients(weights, n)
        if n == bad:
            last = jax.tree.leaves(grads["stages"])[-1]
            hit = lambda g, last=last: g.at[0].set(jnp.nan) if g is last else g  # noqa: E731
            grads = jax.tree.map(hit, grads)
        optimizer.update(pipe, pipe.from_layers(grads), **extra)
        weights, state = step(weights, state, grads)
    assert_equal(pipe.to_layers(nnx.state(pipe, nnx.Param)), weights, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(n, marks=exhaustive) for n in SORTED])
def test_every_transformation_of_optax(name):
    compare(made(name), **({} if name == "sam" else {"value": jnp.float32(2)}))


def test_the_table_names_what_there_is():
    assert public().keys() >= MADE.keys() | REFUSED.keys() | NOT_OURS
    assert len(SORTED) > 100


def test_an_update_in_eager_steps():
    """`MultiSteps` has a conditional over all layers, and a clip in its middle."""
    compare(optax.MultiSteps(optax.chain(clip, lamb), 2), steps=3)


def by_largest_norm(combine: Callable[..., Any]) -> optax.GradientTransformation:
    """Gradients over the largest of a list of all their norms."""

    def update(grads: Any, state: Any, _: Any = None) -> Any:
        norms = combine([jnp.linalg.norm(g) for g in jax.tree.leaves(grads)])
        return jax.tree.map(lambda g: g / norms.max(), grads), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


LISTS = {
    "apply_if_finite": lambda: optax.apply_if_finite(lamb, 2),
    "skip_not_finite": lambda: optax.MultiSteps(
        optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "stack": lambda: by_largest_norm(jnp.stack),
    "array": lambda: by_largest_norm(jnp.array),
    "concatenate": lambda: by_largest_norm(lambda x: jnp.concatenate([n[None] for n in x])),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 17])  # of 3 parts: groups of 16 end within them, or nearly so
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_a_number_of_each_weight_are_of_no_layer(name, count):
    """Issue 38: more than 16 numbers are joined in groups, one of which may be of one layer."""
    kind = functools.partial(Many, count=count)
    compare(LISTS[name](), steps=3, kind=kind, bad=1 if "finite" in name else None)


# --- refused ---


def test_what_needs_all_weights_in_one_place():
    pipe, weights = small()
    optimizer = make_optimizer(pipe, optax.flatten(adam))
    grads = pipe.from_layers(weights)
    assert refusal(optimizer.update, pipe, grads) == (
        "an optimizer needs weights of several layers in one place (its concatenate reads "
        "float32[6], float32[48]), but layers lie on different ranks, and all weights would be "
        "sent in every step; give make_optimizer transformations that look at single weights, or "
        "at numbers of all of them such as norms: without optax.flatten, say, and with what "
        "remains as parts, make_optimizer(pipe, *parts)"
    )
    optimizer = make_optimizer(pipe, adam)
    assert refusal(optimizer.update, pipe, grads, value_fn=lambda x: x) == (
        "update(..., value_fn=...) is a function: what an optimizer calls with the weights of "
        "layers cannot run a pipeline; take a transformation that needs values only, such as "
        "value=loss"
    )
    assert refusal(make_optimizer, pipe) == (
        "make_optimizer(pipe) was given no transformation; give at least one: "
        "make_optimizer(pipe, optax.adamw(1e-3))"
    )
    assert refusal(make_optimizer, pipe, adam, 0.1) == (
        "parts[1] is of type float; give optax transformations, which have init and update: "
        "make_optimizer(pipe, optax.adamw(1e-3))"
    )


# --- trainings ---


def batch() -> tuple[jax.Array, jax.Array]:
    return models.words(ROWS), models.words(ROWS, most=CLASSES, seed=4)


def trained_plain(tx: Any, steps: int, *, unlike: bool = False) -> list[float]:
    stages, embed, head = parts(unlike=unlike)
    model = nnx.List([*stages, embed, head])
    graphdef, state = nnx.split(model)
    x, t = batch()

    def loss(weights: Layers) -> jax.Array:
        pure = dict(enumerate([*weights["stages"], weights["embed"], weights["head"]]))
        copy = nnx.merge(graphdef, state, copy=True)
        nnx.update(copy, pure)
        *stages, embed, head = copy
        return models.cross_entropy(models.compose(stages, embed, head, x), t)

    @jax.jit
    def step(weights: Layers, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights, losses = plain(unlike=unlike), []
    state_of_tx = tx.init(weights)
    for _ in range(steps):
        weights, state_of_tx, value = step(weights, state_of_tx)
        losses.append(float(value))
    return losses


@nnx.jit
def train_step(pipe: Pipeline, optimizer: nnx.Optimizer, x: jax.Array, t: jax.Array) -> jax.Array:
    loss, grads = pipe.value_and_grad(x, t)
    optimizer.update(pipe, grads)
    return loss


@pytest.fixture
def compiled():
    """Messages of jax's compiler, one for each compilation."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield lambda: [text for text in messages if text.startswith("Compiling jit(train_step)")]
    logger.removeHandler(handler)


PLACES: dict[str, dict[str, Any]] = {
    "S=1": {"S": 1},
    "S=2": {"S": 2, "schedule": "interleaved_1f1b"},
    "S=4": {"S": 4},
    "v": {"S": 2, "schedule": "zb_v", "D": 2, "data_parallel": "zero1"},
    "unlike": {"S": 2, "unlike": True},
}
GRID = [(name, place) for name in LAYERWISE for place in PLACES]
SLOW = ("adafactor", "v"), ("muon", "S=4"), ("multi_transform", "S=2")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(n, p, marks=[pytest.mark.slow] if (n, p) in SLOW else exhaustive)
        for n, p in GRID
    ],
)
def test_twenty_steps(name, place, compiled):
    """The plain model's losses; the step is compiled once, all state being where it stays."""
    tx = clip, LAYERWISE[name]()
    pipe = pipeline(**PLACES[place])
    optimizer = make_optimizer(pipe, *tx)
    places = [(x.sharding, x.ndim) for x in jax.tree.leaves(nnx.state((pipe, optimizer)))]
    found = [float(train_step(pipe, optimizer, *batch())) for _ in range(20)]
    wanted = trained_plain(optax.chain(*tx), 20, unlike=place == "unlike")
    assert_close(found, wanted, tolerance=2e-5)
    after = jax.tree.leaves(nnx.state((pipe, optimizer)))
    assert all(x.sharding.is_equivalent_to(*p) for x, p in zip(after, places, strict=True))
    assert len(compiled()) == 1


def test_a_global_norm_with_two_layers_on_a_rank_belongs_to_no_layer():
    pipe = pipeline(**PLACES["v"])
    optimizer = make_optimizer(pipe, clip, optax.sgd(1e-2))
    update = nnx.jit(lambda pipe, optimizer, grads: optimizer.update(pipe, grads))
    update.lower(pipe, optimizer, nnx.state(pipe, nnx.Param))


# --- states ---


@pytest.mark.slow
def test_a_checkpoint_goes_on(tmp_path):
    """Restored onto the mesh: factors, counts and all."""
    tx, pipe = optax.adafactor(1e-2, min_dim_size_to_factor=4), small()[0]
    optimizer = make_optimizer(pipe, tx)
    grads = pipe.from_layers(gradients(small()[1], 0))
    optimizer.update(pipe, grads)
    state = nnx.to_pure_dict(nnx.state(optimizer))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        new = make_optimizer(pipe, tx)
        like = jax.tree.map(_type, nnx.to_pure_dict(nnx.state(new)))
        checkpointer.wait_until_finished()
        nnx.update(new, checkpointer.restore(tmp_path / "state", like))
    other = nnx.clone(pipe)
    optimizer.update(pipe, grads)
    new.update(other, grads)
    assert_equal(nnx.state(other, nnx.Param), nnx.state(pipe, nnx.Param))
    assert int(new.step.get_value()) == 2


def _type(x: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def test_a_state_of_another_placement_is_refused():
    """In whatever way it gets in."""
    one, other = (pipeline(2, schedule=name) for name in ("interleaved_1f1b", "zb_v"))
    state = nnx.state(one)
    text = (
        "{} holds the layers of 2 ranks as v_2x2, and was given the state of a pipeline that holds "
        "them otherwise (loop_2x2); carry it over by layers: "
        "pipe.from_layers(other.to_layers(tree)), other being a pipeline as that one was"
    )
    graphdef, own = nnx.split(other)
    for given in (state, nnx.state(one, nnx.Param)):
        found = nnx.merge(graphdef, own, copy=True)
        nnx.update(found, given)
        assert refusal(found.loss, *batch()) == text.format("the pipeline")
    back = nnx.clone(one)
    nnx.update(back, nnx.to_pure_dict(own))
    assert "(v_2x2)" in refusal(back.loss, *batch())
    assert "leaves" in refusal(nnx.merge, graphdef, state)
    assert "leaves" in refusal(nnx.merge, graphdef, nnx.to_pure_dict(state))
    optimizers = [make_optimizer(pipe, adam) for pipe in (one, other)]
    for given in (nnx.state(optimizers[0]), nnx.to_pure_dict(nnx.state(optimizers[0]))):
        found = nnx.clone(optimizers[1])
        nnx.update(found, given)
        grads = nnx.state(other, nnx.Param)
        assert refusal(found.update, other, grads) == text.format("the optimizer")
    assert refusal(other.to_layers, nnx.state(one, nnx.Param)) == (
        "to_layers was given a tree that holds layers as loop_2x2, and the pipeline holds them as "
        "v_2x2; call the method of the pipeline whose tree it is"
    )
    nnx.update(one, nnx.state(pipeline(K), nnx.Param))
    assert refusal(one.loss, *batch()).startswith(
        "the pipeline holds the layers of 2 ranks as loop_2x2, and was given the state of a "
        "pipeline that holds them otherwise (an array (4, 16) at 0.up.bias and 5 more)"
    )


def test_a_scalar_that_was_added_to_a_pipeline_is_named():
    """As wrappers of models do, which put random streams into every module."""
    pipe = pipeline(K)
    pipe.chunks[0].up.rngs = nnx.Rngs(0)
    assert refusal(pipe.loss, *batch()) == (
        f"the pipeline has a variable of type RngCount at 0.up.rngs.default.count, a scalar where "
        f"there is one for each of {K} ranks: it was added after the pipeline was made; change "
        f"stages before that (adapters are put on each stage, and not on a pipeline)"
    )


# --- what is trained in part ---


@slow
@pytest.mark.filterwarnings("ignore:wrt freezes a part of arrays")
@pytest.mark.parametrize("unlike", [False, True], ids=["alike", "unlike"])
def test_only_what_is_trained_is_seen(unlike):
    """A norm of all is that of what is trained; what is frozen stays as it is."""

    def upper(path: Any, variable: Any) -> bool:
        is_upper = path[0] == "head" or (path[0] == "stages" and path[1] >= 2)
        return is_upper and isinstance(variable, nnx.Param)

    pipe, tx = pipeline(2, schedule="zb_v", unlike=unlike, wrt=upper), optax.chain(clip, lamb)
    optimizer = make_optimizer(pipe, clip, lamb)
    weights = pipe.to_layers(nnx.state(pipe, pipe.wrt))
    assert (weights["stages"][:2], weights["embed"]) == ([{}, {}], {})
    state = tx.init(weights)
    for n in range(2):
        grads = gradients(weights, n)
        optimizer.update(pipe, pipe.from_layers(grads))
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
    found, before = pipe.to_layers(nnx.state(pipe, nnx.Param)), plain(unlike=unlike)
    assert_equal(found["stages"][2:], weights["stages"][2:], atol=1e-6)
    assert_equal(found["head"], weights["head"], atol=1e-6)
    assert_equal(found["stages"][:2], before["stages"][:2])
    assert_equal(found["embed"], before["embed"])


class Big(nnx.Module):
    """A module that holds a pipeline."""

    def __init__(self) -> None:
        self.front = nnx.Linear(4, 4, rngs=nnx.Rngs(9))
        self.body = Pipeline([nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(2)], 2)


@pytest.mark.parametrize("make", [make_optimizer, lambda module, tx: shard_optimizer(tx, module)])
def test_an_optimizer_of_a_module_that_holds_a_pipeline_says_where_it_is(make) -> None:
    """Issue 38: the message was that 'Big' object has no attribute 'plan'."""
    with pytest.raises(ValueError, match=r"was given a Big, which is no Pipeline; it holds a Pipe"):
        make(Big(), optax.sgd(1e-2))
    with pytest.raises(ValueError, match=r"optimizer\(module\.body, tx\), and its other param"):
        make(Big(), optax.sgd(1e-2))
    with pytest.raises(ValueError, match=r"was given a Linear, which is no Pipeline; give the Pip"):
        make(Big().front, optax.sgd(1e-2))
    big = Big()
    optimizer = make_optimizer(big.body, optax.sgd(1e-2))
    with pytest.raises(ValueError, match=r"update was given a Big, which is no Pipeline"):
        optimizer.update(big, nnx.state(big, nnx.Param))


def test_noise_of_small_layers_is_that_of_the_plain_model() -> None:
    """Issue 71: keys of rows that are computed by different equations had no common dtype."""
    stages = [nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(2)]
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), loss_fn=models.squares)
    tx = optax.noisy_sgd(0.1, key=jax.random.key(0))
    optimizer = make_optimizer(pipe, tx)
    x = models.rows(8, width=4)
    _, grads = pipe.value_and_grad(x, x)
    weights, layers = (
        nnx.as_pure(pipe.to_layers(tree)) for tree in (nnx.state(pipe, nnx.Param), grads)
    )
    updates, _ = tx.update(layers, tx.init(weights), weights)
    optimizer.update(pipe, grads)
    found = nnx.as_pure(pipe.to_layers(nnx.state(pipe, nnx.Param)))
    wanted = optax.apply_updates(weights, updates)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert_close(a, b)
