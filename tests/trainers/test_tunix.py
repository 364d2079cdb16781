"""The PeftTrainer of google-tunix, unmodified: full and LoRA, accumulation, its own checkpoints.

An optional lane: without the package nothing runs (docs/trainers.md says how to install it).
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, shard_optimizer
from pipeline.training.checkpoints import Checkpoints
from tests.support.foreign import Blocks, Embed, Head
from tests.trainers.models import (
    MARKS,
    ROWS,
    WIDTH,
    Adapted,
    Plain,
    assert_equal_losses,
    batches,
    cross_entropy,
    pipelined,
    quietly,
)

with quietly():
    peft = pytest.importorskip("tunix.sft.peft_trainer", exc_type=ImportError)
    import qwix
    from orbax import checkpoint as ocp
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import hooks

pytestmark = MARKS


class Seen(hooks.TrainingHooks):
    """The losses that the trainer reports."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def on_train_start(self, train_ctx): ...
    def on_train_end(self, train_ctx): ...
    def on_train_step_start(self, train_ctx): ...
    def on_eval_step_start(self, train_ctx): ...

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.losses.append(float(train_loss))

    def on_eval_step_end(self, train_ctx, eval_loss):
        self.evaluated.append(float(eval_loss))


def by_outputs(model, words, targets):
    return cross_entropy(model(words), targets)


def by_loss(model, words, targets):
    return model.loss(words, targets)


def make(model, *, steps, tx=None, accumulate=None, folder=None, axes=("fsdp",)):
    options = ocp.CheckpointManagerOptions(save_interval_steps=5)
    config = peft.TrainingConfig(
        eval_every_n_steps=4,
        max_steps=steps,
        gradient_accumulation_steps=accumulate,
        checkpoint_root_directory=folder and str(folder),
        checkpointing_options=options if folder else None,
        data_sharding_axis=axes,
    )
    loss = by_loss if isinstance(model, Pipeline) else by_outputs
    return peft.PeftTrainer(model, tx or optax.adamw(1e-2), config).with_loss_fn(loss)


def train(model, steps=12, *, data=None, within=None, **options):
    """The losses of a run: of its steps, and then of its evaluations."""
    trainer, seen = make(model, steps=steps, **options), Seen()
    trainer.with_training_hooks(seen)
    data = data or list(batches(steps * (options.get("accumulate") or 1)))
    with within or contextlib.nullcontext():
        trainer.train(data, data[:2])
    assert steps < 4 or seen.evaluated[-1] < seen.evaluated[0]
    return seen.losses + seen.evaluated


def count_of(steps, since=0):
    """With an evaluation before the first step and every four."""
    return steps - since + 1 + steps // 4 - since // 4


@pytest.mark.parametrize("block", [None, Adapted], ids=["full", "lora"])
@pytest.mark.parametrize("accumulate", [None, 3])
def test_losses_are_those_of_the_plain_model(block, accumulate):
    blocks = [block] if block else []
    wrt = nnx.LoRAParam if block else nnx.Param
    losses = train(Plain(*blocks), accumulate=accumulate)
    found = train(pipelined(Plain(*blocks), wrt=wrt), accumulate=accumulate)
    assert_equal_losses(found, losses, count=count_of(12))


def test_its_mesh_and_its_sharded_inputs():
    """Within a mesh the trainer lays out the optimizer's state and the inputs itself."""
    losses = train(Plain())
    pipe = pipelined(Plain(), data=2, data_parallel="fsdp")
    assert_equal_losses(train(pipe, within=pipe.mesh, axes=("data",)), losses, count=count_of(12))


def test_an_optimizer_that_looks_at_layers():
    losses = train(Plain(), tx=optax.lamb(1e-2), accumulate=2)
    pipe = pipelined(Plain())
    tx = shard_optimizer(optax.lamb(1e-2), pipe)
    assert_equal_losses(train(pipe, tx=tx, accumulate=2), losses, count=count_of(12))
    other = train(pipelined(Plain()), tx=optax.lamb(1e-2), accumulate=2)
    assert np.max(np.abs(np.subtract(other, losses))) > 1e-3  # norms of all layers in one


@pytest.mark.parametrize("block", [None, Adapted], ids=["full", "lora"])
def test_its_checkpoints(block, tmp_path):
    blocks = [block] if block else []
    options = {"wrt": nnx.LoRAParam} if block else {}
    options |= {"stage": 2, "schedule": "zb_v"}
    whole = train(Plain(*blocks))[6:12]
    train(pipelined(Plain(*blocks), **options), 6, folder=tmp_path)
    pipe = pipelined(Plain(*blocks), **options)
    found = train(pipe, 12, folder=tmp_path, data=list(batches(12)))
    assert_equal_losses(found[:6], whole, count=6)


def test_its_checkpoints_of_another_placement(tmp_path):
    """Refused by orbax, by the name of the mark; those of adapters alone have no mark."""
    options = {"stage": 2, "schedule": "zb_v"}, {"stage": 2, "schedule": "interleaved_1f1b"}
    train(pipelined(Plain(), **options[0]), 2, folder=tmp_path / "full")
    with pytest.raises(ValueError, match=r"(?s)do not match.*layout.*v_2x2"):
        make(pipelined(Plain(), **options[1]), steps=4, folder=tmp_path / "full")

    def adapters(pipe):
        return jax.tree.leaves(nnx.as_pure(pipe.to_layers(nnx.state(pipe, nnx.LoRAParam))))

    pipe, same, other = (
        pipelined(Plain(Adapted), wrt=nnx.LoRAParam, **options[n]) for n in (0, 0, 1)
    )
    train(pipe, 2, folder=tmp_path / "lora")
    for found, is_equal in ((same, True), (other, False)):
        make(found, steps=4, folder=tmp_path / "lora")
        pairs = zip(adapters(pipe), adapters(found), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs) == is_equal


class Saving(Seen):
    """Keeps checkpoints in layer order."""

    def __init__(self, checkpoints):
        super().__init__()
        self.checkpoints = checkpoints

    def on_train_end(self, train_ctx):
        self.checkpoints.save(train_ctx.train_steps, train_ctx.model, train_ctx.optimizer)


@pytest.mark.parametrize("block", [None, Adapted], ids=["full", "lora"])
def test_checkpoints_in_layer_order(block, tmp_path):
    """From a hook: they go on in another placement."""
    blocks, wrt = ([block], nnx.LoRAParam) if block else ([], nnx.Param)
    whole, data = train(Plain(*blocks))[6:12], list(batches(12))
    with Checkpoints(tmp_path) as checkpoints:
        pipe = pipelined(Plain(*blocks), wrt=wrt, stage=2, schedule="zb_v")
        trainer = make(pipe, steps=6, tx=shard_optimizer(optax.adamw(1e-2), pipe))
        trainer.with_training_hooks(Saving(checkpoints))
        trainer.train(data)
        pipe, seen = pipelined(Plain(*blocks), wrt=wrt, stage=4), Seen()
        trainer = make(pipe, steps=6, tx=shard_optimizer(optax.adamw(1e-2), pipe))
        trainer.with_training_hooks(seen)
        assert checkpoints.restore(trainer.model, trainer.optimizer) == 6
        trainer.train(data[6:])
    assert_equal_losses(seen.losses, whole, count=6)


def test_state_after_a_restore(tmp_path):
    """Weights and the optimizer's state are restored to the ranks of their stages."""

    def places(tree: Any) -> set:
        return {x.sharding.spec for x in jax.tree.leaves(nnx.as_pure(tree)) if x.ndim == 3}

    train(pipelined(Plain()), 2, folder=tmp_path)
    pipe = pipelined(Plain())
    trainer = make(pipe, steps=3, folder=tmp_path)
    for _ in range(2):
        assert places(nnx.state((pipe, trainer.optimizer))) == {jax.P("stage")}
        trainer.train(list(batches(3)))


# --- qwix: adapters put on by wrapping ---


def provider():
    return qwix.LoraProvider(module_path=".*linear", rank=2, alpha=4.0)


def adapted_by_qwix() -> Plain:
    words = jnp.zeros((ROWS,), jnp.int32)
    return qwix.apply_lora_to_model(Plain(), provider(), words, rngs=nnx.Rngs(7))


def with_wrapped_blocks(plain: Plain) -> Plain:
    """Adapters act where the module is called that they were put on: here each block."""
    x, own = jnp.zeros((ROWS, WIDTH)), provider()
    plain.blocks = nnx.List(
        [qwix.apply_lora_to_model(b, own, x, rngs=nnx.Rngs(7)) for b in plain.blocks]
    )
    return plain


def test_adapters_of_qwix():
    losses = train(adapted_by_qwix())
    pipe = pipelined(with_wrapped_blocks(adapted_by_qwix()), wrt=nnx.LoRAParam)
    assert_equal_losses(train(pipe), losses, count=count_of(12))


def test_adapters_put_on_the_whole_model_and_cut():
    pipe = pipelined(adapted_by_qwix(), wrt=nnx.LoRAParam)
    with pytest.warns(UserWarning, match="read by no part of the model") as said:
        train(pipe, 1)
    (text,) = [str(w.message) for w in said if "read by no part" in str(w.message)]
    assert "stages[0].linear.kernel_lora_a (so in 4 stages)" in text
    assert "must be put on the stages" in text


def test_adapters_put_on_a_pipeline():
    with pytest.raises(ValueError) as error:
        qwix.apply_lora_to_model(
            pipelined(Plain()), provider(), jnp.zeros((ROWS,), jnp.int32), rngs=nnx.Rngs(7)
        )
    assert str(error.value) == (
        "the pipeline has a variable of type RngCount at 0.linear.qwix_rngs.default.count, a "
        "scalar where there is one for each of 4 ranks: it was added after the pipeline was made; "
        "change stages before that (adapters are put on each stage, and not on a pipeline)"
    )


# --- the trainer's own loss, and a decoder of its own ---

LENGTH, VOCABULARY = 6, 32


class Decoder(nnx.Module):
    """A pipeline with the arguments and the results of tunix's models."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __call__(self, words, positions, cache, mask):
        return self.pipe(words, extras={"positions": positions, "mask": mask}), cache


def make_qwen3(lora: bool):
    config = qwen3.ModelConfig(
        num_layers=4,
        vocab_size=VOCABULARY,
        embed_dim=16,
        hidden_dim=24,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        rope_theta=10_000,
        norm_eps=1e-6,
        remat_config=qwen3.RematConfig.NONE,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    if not lora:
        return model, None
    own = qwix.LoraProvider(module_path=".*(q_proj|gate_proj|down_proj)", rank=2, alpha=4.0)
    example = next(texts(1))
    words, positions, mask = (example[k] for k in ("input_tokens", "positions", "attention_mask"))
    given = words, positions, None, mask
    return qwix.apply_lora_to_model(model, own, *given, rngs=nnx.Rngs(7)), own


def texts(count):
    for n in range(count):
        rng = np.random.default_rng(n)
        words = rng.integers(VOCABULARY, size=(ROWS, LENGTH), dtype=np.int32)
        words[:, 1::2] = words[:, ::2]
        held = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, size=(ROWS, 1))
        yield {
            "input_tokens": words,
            "input_mask": held,
            "positions": np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH)),
            "attention_mask": np.tril(np.ones((LENGTH, LENGTH), bool)) & held[:, None],
        }


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora of qwix"])
def test_its_own_loss_and_its_own_decoder(lora):
    """Nothing but the model is changed: `with_loss_fn` is not called."""

    def run(model):
        config = peft.TrainingConfig(eval_every_n_steps=4, max_steps=10)
        trainer, seen = peft.PeftTrainer(model, optax.adamw(1e-2), config), Seen()
        trainer.with_training_hooks(seen)
        trainer.train(list(texts(10)), list(texts(2)))
        assert seen.evaluated[-1] < seen.evaluated[0]
        return seen.losses + seen.evaluated

    losses = run(make_qwen3(lora)[0])
    model, own = make_qwen3(lora)
    stages = [Blocks(list(model.layers)[k : k + 2]) for k in (0, 2)]
    if lora:  # the adapters that the model has, wrapped anew
        example = next(texts(1))
        extras = {"positions": example["positions"], "mask": example["attention_mask"]}
        x = jnp.zeros((ROWS, LENGTH, 16))
        stages = [
            qwix.apply_lora_to_model(stage, own, x, rngs=nnx.Rngs(7), **extras) for stage in stages
        ]
    pipe = Pipeline(
        stages,
        4,
        embed=Embed(model),
        head=Head(model),
        mesh=make_mesh(stage=2),
        wrt=nnx.LoRAParam if lora else nnx.Param,
    )
    assert_equal_losses(run(Decoder(pipe)), losses, count=count_of(10))
