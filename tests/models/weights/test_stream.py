"""Weights on another mesh, one at a time, and in a model without a pipeline (issue 56)."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, split, weights
from pipeline.decoders import DecoderConfig, Parts, build, next_token_loss
from pipeline.models.weights import save as module
from tests.models.weights import tiny
from tests.trainers.models import LAYERS, ROWS, WORDS, Plain, pipelined

CONFIG = DecoderConfig(
    vocabulary=12, width=8, layers=4, heads=2, kv_heads=2, head_dim=4, hidden=8, tied=True
)


def rollout_mesh(*names: str) -> Mesh:
    """Two devices, of which a pipeline of four ranks has none."""
    return Mesh(np.array(jax.devices()[6:]).reshape(2, *[1] * (len(names) - 1)), names)


def moved(model: nnx.Module, mesh: Mesh, dtype: Any = None) -> nnx.Module:
    """The model with zeros on a mesh."""
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype), nnx.state(model))
    nnx.update(model, jax.device_put(zeros, NamedSharding(mesh, P())))
    return model


def assert_same(model: nnx.Module, wanted: nnx.Module) -> None:
    """To the last bit."""
    state, values = (dict(nnx.to_flat_state(nnx.state(one, nnx.Param))) for one in (model, wanted))
    assert state.keys() == values.keys()
    for path, variable in state.items():
        np.testing.assert_array_equal(variable[...], values[path][...], str(path))


PLACEMENTS = {
    "1f1b": {},
    "fsdp": {"data": 2, "data_parallel": "fsdp"},
    "zb_v": {"stage": 2, "schedule": "zb_v"},
    "programs": {"stage": 2, "schedule": "interleaved_1f1b", "engine": "programs"},
    "stage_meshes": {
        "mesh": None,
        "engine": "programs",
        "stage_meshes": [Mesh(np.array(jax.devices()[n : n + 1]), ("stage",)) for n in range(4)],
    },
}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS)
def test_layers_in_the_order_of_the_model(options: dict[str, Any]) -> None:
    plain, mesh = Plain(), rollout_mesh("x")
    pipe = pipelined(plain, **options)
    arrays = list(weights.stream(pipe, mesh=mesh))
    layers = list(dict.fromkeys(layer for layer, _, _ in arrays))
    assert layers == ["embed", *(f"layers.{k}" for k in range(LAYERS)), "head"]
    assert all(name.startswith(f"{layer}.") for layer, name, _ in arrays)
    assert {array.sharding.mesh for _, _, array in arrays} == {mesh}
    assert [a.shape for _, _, a in weights.stream(pipe)] == [a.shape for _, _, a in arrays]
    model = moved(Plain(), mesh)
    weights.to_plain(pipe, model)
    assert_same(model, plain)
    assert {x.sharding for x in jax.tree.leaves(nnx.state(model))} == {NamedSharding(mesh, P())}


def equations(model: Plain, words: jax.Array) -> jax.Array:
    """Work between the blocks, so that stages are equations."""
    x = model.embed(words)
    for block in model.blocks:
        before, x = x, block(x)
        x = x + before
    return model.head(x)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("call", [None, equations], ids=["blocks", "equations"])
@pytest.mark.parametrize("stages", [2, 4])
def test_names_of_a_model_that_was_split(call: Any, stages: int) -> None:
    plain, words = Plain(), jnp.zeros((ROWS,), jnp.int32)
    plain.unused = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    parts = split(plain, stages, words, call=call)
    assert bool(parts.why) == (call is not None)
    schedule = "1f1b" if stages == 2 else "zb_v"
    pipe = Pipeline(**parts, num_microbatches=2, mesh=make_mesh(stage=2), schedule=schedule)
    found = {name: layer for layer, name, _ in weights.stream(pipe)}
    paths = {".".join(map(str, p)) for p, _ in nnx.to_flat_state(nnx.state(plain))}
    assert paths - found.keys() == {"unused.bias", "unused.kernel"}
    assert found["blocks.3.norm.scale"] == f"layers.{(stages if call else LAYERS) - 1}"
    model = moved(nnx.clone(plain), rollout_mesh("x"))
    weights.to_plain(pipe, model)
    model.unused = plain.unused
    assert_same(model, plain)


def decoder(stages: list[int]) -> Parts:
    return Parts(*build(CONFIG, stages, nnx.Rngs(0)))


def decoder_pipe(stages: list[int], **options: Any) -> Pipeline:
    parts = decoder(stages)
    return Pipeline(
        list(parts.stages),
        2,
        embed=parts.embed,
        head=parts.head,
        loss_fn=next_token_loss,
        **options,
    )


def test_blocks_are_numbered_through_and_a_tied_table_comes_once() -> None:
    """A pipeline of three stages fills a model of one stage, and types of two stages."""
    pipe = decoder_pipe([1, 2, 1], mesh=make_mesh(stage=3))
    names = [name for _, name, _ in weights.stream(pipe)]
    assert names[0] == "embed.table"
    assert not any(name.startswith("head.table") for name in names)
    assert len(names) == len({*names}) == len(jax.tree.leaves(nnx.state(decoder([4]), nnx.Param)))
    on_mesh, types = moved(decoder([4]), rollout_mesh("x")), Parts(*build(CONFIG, [3, 1]))
    for model in (on_mesh, types):
        weights.to_plain(pipe, model)
    assert_same(on_mesh, decoder([4]))
    assert_same(types, decoder([3, 1]))


def test_arrays_follow_their_layers_axes_to_a_mesh() -> None:
    pipe = decoder_pipe([2, 2], mesh=make_mesh(stage=2, tensor=2))
    target = rollout_mesh("tensor")
    specs = {name: array.sharding.spec for _, name, array in weights.stream(pipe, mesh=target)}
    assert {axis for spec in specs.values() for axis in spec} == {None, "tensor"}
    with pytest.raises(ValueError) as error:
        weights.stream(pipe, mesh=rollout_mesh("x"))  # before it is iterated
    sharded = [name for name, spec in specs.items() if "tensor" in spec]
    said = ", ".join(f"{name} is sharded over 'tensor'" for name in sharded[:8])
    assert str(error.value) == (
        f"mesh={{'x': 2}}: {said} and {len(sharded) - 8} more; give a mesh with the axes that "
        f"layers name, whose sizes divide their dims (an axis of 1 keeps weights whole)"
    )
    three = Mesh(np.array(jax.devices()[:3]), ("tensor",))
    with pytest.raises(ValueError, match=r"has \d+ entries in dim \d, over 3 devices"):
        weights.stream(pipe, mesh=three)


def live_bytes() -> Counter[Any]:
    """Bytes of all arrays, by device; arrays that share a buffer count once."""
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        if not jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
        for shard in array.addressable_shards
    }
    found: Counter[Any] = Counter()
    for (device, _), size in buffers.items():
        found[device] += size
    return found


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("options", [{}, {"stage": 2, "schedule": "zb_v"}], ids=["1f1b", "zb_v"])
def test_a_device_holds_no_more_than_a_layer_beyond_the_weights(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on devices that have both the pipeline and the model, and while an array is moved."""
    plain = Plain()
    pipe, mesh = pipelined(plain, **options), Mesh(np.array(jax.devices()[:4]), ("x",))
    model = moved(Plain(), mesh)
    layers = plain.embed, plain.blocks[0], plain.head
    layer = max(sum(x.nbytes for x in jax.tree.leaves(nnx.state(one))) for one in layers)
    most: Counter[Any] = Counter()

    def watched(array: jax.Array, target: Any) -> jax.Array:
        result = move(array, target)
        most.update({d: max(n, most[d]) - most[d] for d, n in live_bytes().items()})
        return result

    move = module._move
    for array in weights.stream(pipe, mesh=mesh):  # caches of one-off programs
        del array
    gc.collect()  # what other tests have left
    before = live_bytes()
    monkeypatch.setattr(module, "_move", watched)
    weights.to_plain(pipe, model)
    for array in weights.stream(pipe, mesh=mesh):
        del array
    beyond = {device: most[device] - before[device] for device in most}
    assert 0 < max(beyond.values()) <= layer, beyond


@pytest.mark.usefixtures("lenient")
def test_arrays_are_copies() -> None:
    """A model on the pipeline's devices keeps its weights when a step donates the pipeline's."""
    plain = Plain()
    pipe = pipelined(plain)
    model = moved(Plain(), pipe.mesh, jnp.bfloat16)
    arrays = {name: array for _, name, array in weights.stream(pipe, mesh=pipe.mesh)}
    weights.to_plain(pipe, model)
    optimizer = make_optimizer(pipe, optax.adamw(1e-2))
    step = jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)
    words = jnp.arange(ROWS)
    _, grads = pipe.value_and_grad(words, words)
    optimizer.update(pipe, grads)
    nnx.update(pipe, step(nnx.state(pipe)))
    np.testing.assert_array_equal(
        arrays["layers.2.linear.kernel"], plain.blocks[2].linear.kernel[...]
    )
    kernel = model.blocks[2].linear.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel, plain.blocks[2].linear.kernel[...].astype(jnp.bfloat16))


@pytest.mark.parametrize("iterator", ["weights.stream", "named_layers"])
def test_a_step_that_donates_the_weights_of_an_iterator_is_named(iterator: str) -> None:
    """Issue 67: the error was JAX's, of a deleted array."""
    decoder = weights.FAMILIES["llama"].config(tiny.CONFIGS["llama"])
    stages, embed, head = build(decoder, [2, 1], nnx.Rngs(0))
    pipe = Pipeline(stages, 1, embed=embed, head=head, loss_fn=next_token_loss)
    make = {
        "weights.stream": lambda: weights.stream(pipe),
        "named_layers": lambda: weights.named_layers(
            pipe, family="llama", config=tiny.CONFIGS["llama"]
        ),
    }[iterator]
    items = make()
    next(items)
    nnx.update(pipe, jax.jit(lambda s: s, donate_argnums=0)(nnx.state(pipe)))
    with pytest.raises(RuntimeError) as error:
        list(items)
    assert str(error.value) == (
        f"{iterator}: a step has deleted the weights that were not taken yet, because it donates "
        f"its arrays: take all of them before the next step, or make the step with Step(..., "
        f"donate=False)"
    )
    assert len(list(make())) > 2


class Counted(nnx.Module):
    """A stage with state that it writes."""

    def __init__(self, k: int) -> None:
        self.scale = nnx.Param(jnp.full((3,), 1.0 + k))
        self.mean = nnx.BatchStat(jnp.full((3,), 10.0 + k))
        self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(k))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] = self.mean[...] * 0.5
        return x * self.scale[...]


def test_declared_state_is_with_its_layer() -> None:
    pipe = Pipeline([Counted(0), Counted(1)], 2, state=nnx.BatchStat)
    names = [name for _, name, _ in weights.stream(pipe)]
    assert names == ["layers.0.scale", "layers.0.mean", "layers.1.scale", "layers.1.mean"]
    model = nnx.Dict(layers=nnx.List([Counted(5), Counted(6)]))
    keys = [layer.drop.rngs.key[...] for layer in model.layers]
    weights.to_plain(pipe, model)
    assert [float(x.mean[0]) for x in model.layers] == [10.0, 11.0]
    assert [layer.drop.rngs.key[...] for layer in model.layers] == keys


@pytest.mark.usefixtures("lenient")
class Bare(nnx.Module):
    """A block without weights."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(x)


class Blocks(nnx.Module):
    def __init__(self, blocks: list[nnx.Module]) -> None:
        self.blocks = nnx.List(blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Listed(nnx.Module):
    """A model without a pipeline, of layers or of stages."""

    def __init__(self, layers: list[nnx.Module]) -> None:
        self.layers = nnx.List(layers)


ENDINGS = {
    "a function": lambda k: [Bare()],
    "dropout": lambda k: [nnx.Dropout(0.1, rngs=nnx.Rngs(k))],
    "nothing": lambda k: [],
    "unlike": lambda k: [Bare() for _ in range(2 * k)],
    "a norm": lambda k: [
        nnx.LayerNorm(4, use_bias=False, use_scale=False, rngs=nnx.Rngs(0)),
        nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(k + 5)), nnx.relu),
        Bare(),
    ],
}


@pytest.mark.filterwarnings("ignore:stages.* differs from stages")
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", ["layers", "stages", "split"])
def test_blocks_without_weights_count_as_layers(ending: str, way: str) -> None:
    """Issue 67: after blocks that end in modules without weights all layers were "others"."""

    def blocks(seed: int) -> list[list[nnx.Module]]:
        ends = map(ENDINGS[ending], range(3))
        return [[nnx.Linear(4, 4, rngs=nnx.Rngs(seed + k)), *end] for k, end in enumerate(ends)]

    def plain(seed: int) -> nnx.Module:
        layers = [block for stage in blocks(seed) for block in stage]
        if way == "split":
            return Blocks(layers)
        return Listed(list(map(Blocks, blocks(seed))) if way == "stages" else layers)

    pipe = Pipeline(list(map(Blocks, blocks(0))), 1)
    if way == "split":
        parts = split(plain(0), 2, jnp.ones((2, 4)))
        pipe = Pipeline(parts.stages, 1, embed=parts.embed, head=parts.head)
    model = plain(7)
    weights.to_plain(pipe, model)
    assert_same(model, plain(0))
    ahead = [len(stage) for stage in blocks(0)]
    wanted = [f"layers.{sum(ahead[:k]) + n}" for k in range(3) for n in (0, 2)[: ahead[k]]]
    if ending != "a norm":
        wanted = [f"layers.{sum(ahead[:k])}" for k in range(3)]
    assert list(dict.fromkeys(layer for layer, _, _ in weights.stream(pipe))) == wanted


def test_a_model_of_other_layers() -> None:
    """All differences are named, and nothing is written."""
    pipe, model = pipelined(Plain()), Plain()
    model.blocks[1].linear = nnx.Linear(8, 9, rngs=nnx.Rngs(0))
    model.blocks[2].norm = nnx.RMSNorm(8, rngs=nnx.Rngs(0))
    model.extra = nnx.Param(jnp.zeros(3))
    zeros = jax.tree.map(lambda x: x * 0, nnx.state(model.embed))
    nnx.update(model.embed, zeros)
    with pytest.raises(ValueError) as error:
        weights.to_plain(pipe, model)
    assert str(error.value) == (
        "to_plain: the model's layers are not the pipeline's: layers.1.linear.bias is [8], and [9] "
        "in the model, layers.1.linear.kernel is [8, 8], and [8, 9] in the model, "
        "layers.2.norm.bias [8] is not in the model, extra [3] is in the model alone; give a model "
        "of the class that pipeline.split was given, or one with embed, head and one list of the "
        "same layers"
    )
    assert not model.embed.embedding[...].any()
    assert model.embed.embedding.shape == (WORDS, 8)


def test_types_in_place_of_weights() -> None:
    stages = nnx.eval_shape(lambda: nnx.List([Counted(0), Counted(1)]))
    pipe = Pipeline(list(stages), 2, state=nnx.BatchStat)
    with pytest.raises(ValueError) as error:
        weights.stream(pipe)
    assert str(error.value) == (
        "this pipeline has types in place of weights, made under nnx.eval_shape: read weights into "
        "it first"
    )
