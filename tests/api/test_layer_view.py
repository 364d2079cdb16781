"""The layer view, and optimizers that are given it: the plain model's update, wherever layers lie.

Letters: S ranks, K stages, V chunks, D data shards.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close
from tests.support.hlo import computations, opcode, result

pytestmark = pytest.mark.usefixtures("lenient")
K, M, WIDTH = 4, 4, 8
Layers = dict[str, Any]


class Stage(nnx.Module):
    """Matrices, vectors, and perhaps more of them than other stages have."""

    def __init__(self, rngs: nnx.Rngs, *, more: int = 0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.more = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(more)])

    def __call__(self, x):
        y = self.down(jnp.tanh(self.up(self.norm(x))))
        for layer in self.more:
            y = y + jnp.tanh(layer(x))
        return x + y


def parts(*, unlike: bool = False) -> tuple[list[nnx.Module], nnx.Module, nnx.Module]:
    more = [1, 0, 0, 2] if unlike else [0] * K
    stages = [Stage(nnx.Rngs(k), more=n) for k, n in enumerate(more)]
    return stages, models.Words(nnx.Rngs(501)), models.Readout(nnx.Rngs(502))


def plain(*, unlike: bool = False) -> Layers:
    """The model's weights without a pipeline."""
    stages, embed, head = parts(unlike=unlike)
    pure = [nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (*stages, embed, head)]
    return {"stages": pure[:K], "embed": pure[K], "head": pure[K + 1]}


def pipeline(S: int, *, D: int = 1, unlike: bool = False, **options: Any) -> Pipeline:
    stages, embed, head = parts(unlike=unlike)
    mesh = make_mesh(stage=S, data=D)
    ends = {"embed": embed, "head": head, "loss_fn": models.cross_entropy}
    return Pipeline(stages, M, mesh=mesh, **ends, **options)


def assert_equal(found: Any, wanted: Any, *, atol: float = 0.0) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, tolerance=atol)


# --- the view ---

PLACES = {
    "one rank": (1, {}),
    "loop": (2, {"schedule": "interleaved_1f1b"}),
    "v": (2, {"schedule": "zb_v"}),
    "unlike": (2, {"unlike": True}),
    "fsdp": (2, {"D": 2, "data_parallel": "fsdp"}),
}


@pytest.mark.few
@pytest.mark.parametrize("place", PLACES)
def test_there_and_back(place):
    """In layer order, whatever the placement; what comes back lies where weights do."""
    S, options = PLACES[place]
    pipe = pipeline(S, **options)
    weights = nnx.state(pipe, nnx.Param)
    wanted = plain(unlike=options.get("unlike", False))
    assert_equal(pipe.to_layers(weights), wanted)
    back = pipe.from_layers(wanted)
    assert jax.tree.structure(back) == jax.tree.structure(weights)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_weights_move_between_pipelines():
    """From a V placement into a loop, by layers; in the optimizer's moments too."""
    one, other = pipeline(2, schedule="zb_v"), pipeline(4)
    changed = jax.tree.map(lambda x: x + 1, one.to_layers(nnx.state(one, nnx.Param)))
    nnx.update(other, other.from_layers(changed))
    assert_equal(other.to_layers(nnx.state(other, nnx.Param)), changed)
    moments = make_optimizer(one, optax.adam(1e-3)).opt_state[0].mu
    assert_equal(one.to_layers(moments), jax.tree.map(jnp.zeros_like, changed))


def test_under_jit_and_of_types():
    pipe = pipeline(2, schedule="zb_v")
    weights = nnx.as_pure(nnx.state(pipe, nnx.Param))
    layers = jax.jit(lambda tree: nnx.as_pure(pipe.from_layers(pipe.to_layers(tree))))(weights)
    assert_equal(layers, weights)
    types = jax.eval_shape(lambda: weights)
    found = pipe.to_layers(types)
    assert_equal(
        jax.tree.map(lambda x: np.array(x.shape), found),
        jax.tree.map(lambda x: np.array(x.shape), plain()),
    )
    back = jax.tree.leaves(pipe.from_layers(found))
    assert [leaf.shape for leaf in back] == [leaf.shape for leaf in jax.tree.leaves(weights)]


@pytest.mark.slow
def test_a_table_that_ranks_share_is_as_long_as_it_was_made():
    """Rows of zeros behind its last are the pipeline's own."""
    embed = VocabularyEmbedding(11, WIDTH, rngs=nnx.Rngs(0))
    head = VocabularyHead(WIDTH, 11, rngs=nnx.Rngs(1))
    pipe = Pipeline(
        [Stage(nnx.Rngs(k)) for k in range(2)],
        M,
        mesh=make_mesh(stage=2),
        embed=embed,
        head=head,
        loss_fn=CrossEntropy(),
        vocabulary="stage",
    )
    assert pipe.embed.table.shape == (12, WIDTH)
    weights = nnx.state(pipe, nnx.Param)
    layers = pipe.to_layers(weights)
    np.testing.assert_array_equal(layers["embed"]["table"], embed.table[...])
    assert_equal(nnx.as_pure(pipe.from_layers(layers)), nnx.as_pure(weights))
    tx = optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(1.0))  # a mean over all rows
    optimizer = make_optimizer(pipe, tx)
    grads = jax.tree.map(jnp.ones_like, layers)
    wanted = optax.apply_updates(layers, tx.update(grads, tx.init(layers), layers)[0])
    optimizer.update(pipe, pipe.from_layers(grads))
    assert_equal(pipe.to_layers(nnx.state(pipe, nnx.Param)), wanted, atol=1e-6)
    np.testing.assert_array_equal(pipe.embed.table[...][11:], 0)


def test_labels():
    """A label of a stack is one of all its layers; labels that differ do not go back."""
    pipe = pipeline(2)
    labels = jax.tree.map(lambda x: f"{x.ndim}", nnx.as_pure(nnx.state(pipe, nnx.Param)))
    layers = pipe.to_layers(labels)
    assert layers["stages"][3]["up"] == {"kernel": "3", "bias": "2"}
    assert nnx.as_pure(pipe.from_layers(layers)) == labels
    layers["stages"][3]["up"]["bias"] = "other"
    assert refusal(pipe.from_layers, layers) == (
        "from_layers: chunks.1.up.bias is one array for layers of which some have '2' and others "
        "'other'; give what differs between layers to make_optimizer, whose masks and labels are "
        "trees of layers"
    )


def test_trees_of_other_shapes():
    pipe = pipeline(2)
    weights = nnx.state(pipe, nnx.Param)
    layers, rows = pipe.to_layers(weights), jax.tree.map(lambda x: x[0], weights)
    assert refusal(pipe.from_layers, layers["stages"]) == (
        "from_layers was given stages in list; give the layers that pipe.to_layers(tree) returns, "
        "a dictionary with a list of one tree for each stage"
    )
    assert refusal(pipe.from_layers, layers | {"stages": {}}) == (
        "from_layers was given stages in dict; give the layers that pipe.to_layers(tree) returns, "
        "a dictionary with a list of one tree for each stage"
    )
    remedy = "; give the layers that pipe.to_layers(tree) returns, one tree for each stage"
    assert refusal(pipe.from_layers, layers | {"stages": layers["stages"][:3]}) == (
        f"from_layers was given layers without stages.3.down.bias{remedy}"
    )
    more = layers | {"head": layers["head"] | {"scale": jnp.zeros(())}}
    assert refusal(pipe.from_layers, more) == (
        f"from_layers was given layers with head.scale{remedy}"
    )
    assert refusal(pipe.to_layers, {"ends": rows["ends"]}) == (
        "a tree has no leaf chunks.0.down.bias; give one that is shaped like the pipeline's "
        "parameters: nnx.state(pipe, nnx.Param), gradients, moments"
    )
    assert refusal(pipe.to_layers, rows) == (
        "to_layers: chunks.0.down.bias has the shape (8,); an array at this place holds the layers "
        "of 2 ranks: (2, ...)"
    )
    layers["stages"][2]["up"]["bias"] = jnp.zeros(3)
    assert refusal(pipe.from_layers, layers) == (
        "from_layers: chunks.1.up.bias is one array, its layers have float32[3], float32[16]; give "
        "leaves of one shape and dtype"
    )
    unlike = pipeline(2, unlike=True)
    layers = unlike.to_layers(nnx.state(unlike, nnx.Param))
    layers["stages"][0]["up"]["bias"] = jnp.zeros(3)
    assert refusal(unlike.from_layers, layers) == (
        "from_layers: a layer's leaf of chunks.0.named.up.bias has the shape (3,), its parameter "
        "(16,); stages that are not alike share storage, in which there is room for leaves of the "
        "parameters' shapes"
    )


def refusal(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match="a") as error:
        call(*args, **options)
    return str(error.value)


# --- optimizers ---


def matrices(layers: Layers) -> Layers:
    return jax.tree.map(lambda x: x.ndim > 1, layers)


def by_layer(layers: Layers) -> Layers:
    """Another rule for the last stage and the head."""
    rest = {"embed": layers["embed"], "stages": layers["stages"][:-1]}
    labels = jax.tree.map(lambda _: "body", rest)
    top = jax.tree.map(lambda _: "top", (layers["stages"][-1], layers["head"]))
    return {"stages": [*labels["stages"], top[0]], "embed": labels["embed"], "head": top[1]}


clip = optax.clip_by_global_norm(0.5)
LAYERWISE: dict[str, Any] = {
    "adamw(mask)": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(1e-2), optax.sgd(0.1)),
    "multi_transform": lambda: optax.multi_transform(
        {"body": optax.chain(clip, optax.lamb(1e-2)), "top": optax.adam(1e-2)}, by_layer
    ),
}


def gradients(like: Layers, step: int) -> Layers:
    leaves, treedef = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(step), len(leaves))
    found = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, found)


def updated(tx: Any, steps: int, **extra: Any) -> Layers:
    """The plain model's weights after some updates with random gradients."""
    tx, weights = optax.with_extra_args_support(tx), plain(**extra)
    state = tx.init(weights)

    @jax.jit
    def step(weights: Layers, state: Any, grads: Layers) -> Any:
        updates, state = tx.update(grads, state, weights, value=jnp.float32(2))
        return optax.apply_updates(weights, updates), state

    for n in range(steps):
        weights, state = step(weights, state, gradients(weights, n))
    return weights


def updated_stacks(pipe: Pipeline, tx: Any, steps: int) -> Layers:
    """Layers of a pipeline, trained by `make_optimizer`."""
    optimizer = make_optimizer(pipe, *tx)
    for n in range(steps):
        layers = pipe.to_layers(nnx.state(pipe, nnx.Param))
        grads = pipe.from_layers(gradients(layers, n))
        optimizer.update(pipe, grads, value=jnp.float32(2))
    return pipe.to_layers(nnx.state(pipe, nnx.Param))


slow = (pytest.mark.slow, pytest.mark.exhaustive)
FAST = ("adamw(mask)", "lamb")


@pytest.mark.few
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(n, marks=slow) for n in LAYERWISE if n not in FAST)]
)
def test_an_update_is_the_plain_models(name):
    """Layers that two ranks hold there and back, with a clip before it that sees all of them."""
    tx = clip, LAYERWISE[name]()
    pipe = pipeline(2, D=2, schedule="zb_v", data_parallel="zero1")
    assert_equal(updated_stacks(pipe, tx, 3), updated(optax.chain(*tx), 3), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["lamb", *(pytest.param(n, marks=slow) for n in LAYERWISE if n != "lamb")]
)
def test_an_update_of_stages_that_are_not_alike(name):
    """Although several weights lie in one array."""
    tx = clip, LAYERWISE[name]()
    found = updated_stacks(pipeline(2, unlike=True), tx, 3)
    assert_equal(found, updated(optax.chain(*tx), 3, unlike=True), atol=1e-5)


# --- what it costs ---


def exchanges(text: str) -> list[tuple[str, int]]:
    """The collectives of a program, and the most numbers that any of them makes."""
    lines = [line for body in computations(text).values() for line in body]
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    found = []
    for line in lines:
        kind = opcode(line).removesuffix("-start")
        if kind in kinds:
            shapes = re.findall(r"\[([\d,]*)\]", result(line))
            sizes = [int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes]
            found.append((kind, max(sizes)))
    return found


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("muon", 0),
        ("multi_transform", 2 * K),  # numbers of a norm
        *(
            pytest.param(n, 0, marks=slow)
            for n in LAYERWISE
            if n not in ("muon", "multi_transform")
        ),
    ],
)
def test_what_an_update_sends(name, most):
    """No rank needs a weight of another; nor the state."""
    pipe = pipeline(4)
    optimizer = make_optimizer(pipe, LAYERWISE[name]())
    weights, state = (nnx.as_pure(nnx.state(x)) for x in (pipe, optimizer.opt_state))
    step = jax.jit(optimizer.tx.update).lower(weights, nnx.as_pure(optimizer.opt_state), weights)
    found = exchanges(step.compile().as_text())
    assert max((size for _, size in found), default=0) <= most
    of_layers = [x for x in jax.tree.leaves(state) if x.ndim and x.shape[0] == 4]
    assert all(x.sharding.spec[:1] == ("stage",) for x in of_layers)
    assert len(of_layers) >= 6 or name == "clip_by_block_rms"  # which has no state


def test_with_zero_1_updates_are_gathered_and_nothing_else():
    pipe = pipeline(2, D=2, data_parallel="zero1")
    optimizer = make_optimizer(pipe, optax.lamb(1e-2))
    weights = nnx.as_pure(nnx.state(pipe, nnx.Param))
    step = jax.jit(optimizer.tx.update).lower(weights, nnx.as_pure(optimizer.opt_state), weights)
    found = exchanges(step.compile().as_text())
    gathered = sum(size for kind, size in found if kind == "all-gather")
    assert gathered == sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(weights))
    assert max(size for kind, size in found if kind != "all-gather") == 1
