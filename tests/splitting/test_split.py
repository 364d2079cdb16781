"""A model that `split` cuts computes what it computed: loss and gradients of every parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, split
from pipeline.splitting.cutting import balance
from tests.splitting import models
from tests.splitting.parity import assert_same, check, check_parts, cross_entropy, plain, squares
from tests.support.close import assert_close
from tests.support.poison import poison  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("lenient")
N, LENGTH = 8, 5


def words(rows=N, length=LENGTH):
    return jax.random.randint(jax.random.key(1), (rows, length), 0, models.WORDS)


def images(channels, rows=N):
    return jax.random.normal(jax.random.key(2), (rows, 4, 4, channels))


def logits(model, tokens, cache=None, padding=None):
    return model(tokens, cache, padding)[0]


# --- what it computes ---


@pytest.mark.slow
@pytest.mark.usefixtures("poison")
def test_decoder() -> None:
    """Its stages call the blocks themselves, and are alike; masks are made in each, of tokens."""
    tokens = words()
    parts, pipe = check(
        models.Decoder(), cross_entropy, tokens, tokens, call=logits, num_stages=4, ranks=4
    )
    assert parts.why == ""
    assert [len(stage.blocks) for stage in parts.stages] == [1, 1, 1, 1]
    assert "packed" not in str(nnx.state(pipe.chunks))
    inputs, extras = parts.inputs(tokens)
    assert inputs is tokens
    assert extras == {}  # of tokens only their shape is needed


@pytest.mark.slow
def test_what_is_made_of_an_argument_goes_as_extras() -> None:
    tokens, padding = words(), jnp.arange(LENGTH)[None] < (jnp.arange(N)[:, None] % 4 + 2)
    args = tokens, None, padding
    parts, pipe = check(models.Decoder(6), cross_entropy, tokens, *args, call=logits)
    _, extras = parts.inputs(*args)
    assert list(extras) == ["padding"]
    with pytest.raises(
        ValueError, match="extras lack 'padding', which blocks need as an input, or"
    ):
        pipe.value_and_grad(parts.inputs(*args)[0], tokens)


@pytest.mark.slow
def test_vision_transformer() -> None:
    """Blocks that are numbered attributes, called by keywords."""
    parts, _ = check(
        models.Vision(), cross_entropy, words()[:, 0], images(3), deterministic=True, microbatches=4
    )
    assert parts.why == ""
    assert parts.blocks[0][0] == "block_0"


@pytest.mark.slow
@pytest.mark.usefixtures("poison")
def test_unet() -> None:
    """Skips and the embedding of times travel in messages, the last of them beside the image."""
    x, time = images(2), jnp.arange(N)
    parts, _ = check(models.UNet(), squares, x, x, time)
    assert "runs between calls" in parts.why or "needed after" in parts.why


@pytest.mark.slow
def test_encoder_decoder() -> None:
    """One table for source, target and logits: embed looks both up."""
    parts, _ = check(
        models.EncoderDecoder(), cross_entropy, words(), words()[::-1], words(), num_stages=4
    )
    assert [names[0] for names in parts.blocks] == [
        "encoder.0",
        "encoder.1",
        "decoder.0",
        "decoder.1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_unet_over_ranks(ranks, microbatches) -> None:
    x, time = images(2), jnp.arange(N)
    options = {"ranks": ranks, "microbatches": microbatches}
    check(models.UNet(), squares, x, x, time, num_stages=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb_h1", "gpipe"])
def test_encoder_decoder_by_schedules(schedule) -> None:
    sides = words(), words()[::-1]
    pipe = {"schedule": schedule, "remat": None}
    check(models.EncoderDecoder(), cross_entropy, words(), *sides, num_stages=4, ranks=4, pipe=pipe)


@pytest.mark.slow
def test_thirty_layers_over_four_stages() -> None:
    model, tokens = models.Decoder(30), words()
    parts = split(model, 4, tokens, call=logits)
    counts = [len(names) for names in parts.blocks]
    assert sum(counts) == 30
    assert counts[0] >= counts[-1]  # the head takes its time, a lookup none
    cut = "E|t*8|t*11|t*11L"
    parts = split(model, 4, tokens, call=logits, cut=cut)
    assert [len(names) for names in parts.blocks] == [0, 8, 11, 11]
    check_parts(model, parts, cross_entropy, tokens, tokens, call=logits, ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "unet"])
def test_other_sizes_than_those_of_the_example(name) -> None:
    """Batch and length are those of each call."""
    if name == "decoder":
        model, loss_fn, call = models.Decoder(), cross_entropy, logits
        parts = split(model, 2, jax.ShapeDtypeStruct((3, 4), jnp.int32), call=call)
        given, target = (words(12, 7),), words(12, 7)
    else:
        model, loss_fn, call = models.UNet(), squares, None
        parts = split(model, 2, images(2, 1), jnp.arange(1))
        target = jax.random.normal(jax.random.key(3), (6, 8, 8, 2))
        given = target[::-1], jnp.arange(6)
    check_parts(model, parts, loss_fn, target, *given, call=call, microbatches=3)


@pytest.mark.slow
def test_inputs_of_floats_have_gradients() -> None:
    """Inputs of floats that later parts need too travel in the messages."""
    model, x, time = models.UNet(), images(2), jnp.arange(N)
    parts = split(model, 2, x, time)
    pipe = Pipeline(**parts, num_microbatches=2, loss_fn=squares, mesh=make_mesh(stage=2))

    def loss(x):
        inputs, extras = parts.inputs(x, time)
        return pipe.loss(inputs, jnp.zeros_like(x), extras=extras)

    wanted = jax.grad(lambda x: squares(model(x, time), jnp.zeros_like(x)))(x)
    assert_close(jax.grad(loss)(x), wanted, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_weights_go_there_and_back(name) -> None:
    """Weights that a pipeline has learned go into the model, and back."""
    tokens = words()
    if name == "decoder":
        model, other, call, given = (
            models.Decoder(),
            models.Decoder(rngs=nnx.Rngs(5)),
            logits,
            (tokens,),
        )
    else:
        model, other = models.EncoderDecoder(), models.EncoderDecoder(rngs=nnx.Rngs(5))
        call, given = None, (tokens, tokens)
    parts = split(model, 2, *given, call=call)
    pipe = Pipeline(**parts, num_microbatches=2, loss_fn=cross_entropy, mesh=make_mesh(stage=2))
    inputs, extras = parts.inputs(*given)
    nnx.update(pipe, pipe.from_layers(parts.to_layers(nnx.state(other, nnx.Param))))
    wanted = (call or type(other).__call__)(other, *given)
    assert_close(pipe(inputs, extras=extras), wanted)
    _, grads = pipe.value_and_grad(inputs, tokens, extras=extras)
    learned = jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(pipe, nnx.Param), grads)
    nnx.update(pipe, learned)
    back = parts.from_layers(pipe.to_layers(learned))
    nnx.update(model, jax.device_get(back))
    wanted = (call or type(model).__call__)(model, *given)
    assert_close(pipe(inputs, extras=extras), wanted)
    assert_same(parts.from_layers(parts.to_layers(back)), nnx.state(model, nnx.Param))


@pytest.mark.slow
def test_dropout_is_that_of_a_pipeline() -> None:
    """Anew in each call and microbatch; `eval` switches it off in blocks and in other parts."""
    model, tokens = models.Decoder(rate=0.5), words()
    model.final = nnx.Dropout(0.5, rngs=nnx.Rngs(3))

    def call(model, tokens):
        return model.final(logits(model, tokens))

    parts = split(model, 2, tokens, call=call)
    pipe = Pipeline(**parts, num_microbatches=2, loss_fn=cross_entropy, mesh=make_mesh(stage=2))
    one, two = pipe(tokens), pipe(tokens)
    assert float(jnp.abs(one - two).max()) > 0.1
    assert 0.3 < float((one == 0).mean()) < 0.7
    pipe.eval()
    model.eval()
    assert_close(pipe(tokens), call(model, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "unet"])
def test_half_precision(name) -> None:
    """``compute_dtype`` and ``param_dtype`` mean what they mean for stages of one's own."""
    if name == "decoder":
        model, loss_fn, call, given = models.Decoder(), cross_entropy, logits, (words(),)
        target = words()
    else:
        model, loss_fn, call = models.UNet(), squares, None
        given, target = (images(2), jnp.arange(N)), images(2)
    parts = split(model, 2, *given, call=call)
    inputs, extras = parts.inputs(*given)
    loss, grads = plain(model, loss_fn, target, given, {}, call)
    mesh = make_mesh(stage=2)
    pipe = Pipeline(
        **parts, num_microbatches=2, loss_fn=loss_fn, mesh=mesh, compute_dtype="bfloat16"
    )
    found, own = pipe.value_and_grad(inputs, target, extras=extras)
    assert 1e-6 < abs(float(found - loss)) < 0.05
    assert_same(parts.from_layers(pipe.to_layers(own)), grads, tolerance=0.05)
    pipe = Pipeline(**parts, num_microbatches=2, loss_fn=loss_fn, mesh=mesh, param_dtype="bfloat16")
    found, own = pipe.value_and_grad(inputs, target, extras=extras)
    assert jax.tree.leaves(own)[0].dtype == jnp.bfloat16
    assert abs(float(found - loss)) < 0.05


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(models.WIDTH, momentum=0.5, rngs=rngs)
        self.linear = nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(self.norm(x))


class Counting(nnx.Module):
    """Blocks that keep statistics; ``joined`` makes it one that runs as equations."""

    def __init__(self, *, joined):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Normed(rngs) for _ in range(4)])
        self.joined = joined

    def __call__(self, x):
        first = self.layers[0](x)
        y = first
        for layer in self.layers[1:]:
            y = layer(y)
        return y + first if self.joined else y


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_declared_state_is_written(joined) -> None:
    model, x = Counting(joined=joined), jax.random.normal(jax.random.key(4), (N, models.WIDTH))
    parts = split(model, 2, x)
    assert (parts.why != "") == joined
    mesh = make_mesh(stage=2)
    options = {"num_microbatches": 1, "loss_fn": squares, "mesh": mesh, "state": nnx.BatchStat}
    pipe = Pipeline(**parts, **options)
    found, _ = pipe.value_and_grad(x, x)
    assert_close(found, squares(model(x), x))  # which writes too
    wanted = sorted(
        float(v[...].sum()) for _, v in nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
    )
    kept = [nnx.state(stage, nnx.BatchStat) for stage in pipe.stages()]
    own = sorted(float(v[...].sum()) for state in kept for _, v in nnx.to_flat_state(state))
    assert_close(own, wanted, tolerance=1e-4)


def test_types_of_weights_and_inputs_are_enough() -> None:
    model = nnx.eval_shape(lambda: models.Decoder(6))
    parts = split(model, 2, jax.ShapeDtypeStruct((8, 5), jnp.int32), call=logits)
    pipe = Pipeline(**parts, num_microbatches=2, loss_fn=cross_entropy, mesh=make_mesh(stage=2))
    tokens = jax.ShapeDtypeStruct((8, 5), jnp.int32)
    assert pipe.lower(tokens, tokens).out_info is not None


# --- where it cuts ---


def test_layers_are_cut_by_cost() -> None:
    assert balance([1] * 8, 4) == (2, 2, 2, 2)
    assert balance([1] * 30, 4, behind=2) == (8, 8, 8, 6)
    assert balance([4, 1, 1, 1, 1], 2) == (1, 4)
    assert balance([1, 1, 1], 3, before=50, behind=50) == (1, 1, 1)


@pytest.mark.slow
def test_costs_and_cuts_are_the_users_to_give() -> None:
    model, tokens = models.Decoder(6), words()

    def counts(**options):
        parts = split(model, 2, tokens, call=logits, **options)
        return [len(names) for names in parts.blocks]

    assert counts() == [3, 3]
    assert counts(costs=[9, 1, 1, 1, 1, 1]) == [1, 5]
    assert counts(cut=[2, 4]) == counts(cut="Et*2|t*4L") == [2, 4]


def test_it_says_what_it_did() -> None:
    parts = split(models.Decoder(6), 2, words(), call=logits)
    first, *lines = str(parts).splitlines()
    assert first == "2 stages that call the model's own blocks"
    assert [line.split()[2:] for line in lines] == [
        ["embed,", "layers.0-2"],
        ["layers.3-5,", "head"],
    ]


def test_the_model_is_as_it_was() -> None:
    """Also where its call raises."""
    model, tokens = models.Decoder(), words()
    own = models.DecoderBlock.__call__
    split(model, 2, tokens, call=logits)
    assert models.DecoderBlock.__call__ is own

    def wrong(model, tokens):
        logits(model, tokens)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        split(model, 2, tokens, call=wrong)
    assert models.DecoderBlock.__call__ is own
    assert vars(models.DecoderBlock)["__call__"] is own
