"""Reinforcement learning by google-tunix: a pipeline trains, a plain model writes the texts.

    pip install google-tunix
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/recipes/grpo_by_tunix.py

tunix's GRPO learner is used as it is, once with Qwen 3 alone, and once with the same model as a
pipeline on two devices. After each step the weights go to a plain model on two other devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout, vanilla_rollout
from tunix.sft import hooks

from collectives import make_mesh
from pipeline import Pipeline, split, weights

STEPS, PROMPTS, GENERATIONS, LENGTH = 10, 4, 2, 8
CONFIG = qwen3.ModelConfig(
    num_layers=4,
    vocab_size=128,
    embed_dim=16,
    hidden_dim=32,
    num_heads=2,
    head_dim=8,
    num_kv_heads=1,
    rope_theta=10_000,
    norm_eps=1e-6,
    remat_config=qwen3.RematConfig.NONE,
)


class Letters:
    """A tokenizer of one token for each ASCII character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any) -> str:
        return "".join(chr(n) for n in ids)

    bos_id, eos_id, pad_id = (staticmethod(lambda n=n: n) for n in (2, 1, 0))


def reward(*, completions: list[str], **_: Any) -> list[float]:
    """Small letters are worth a point each."""
    return [sum(c.islower() for c in text) / LENGTH for text in completions]


class Actor(nnx.Module):
    """A pipeline with the arguments and the results of tunix's models."""

    def __init__(self, model: nnx.Module, mesh: Mesh) -> None:
        rows = PROMPTS * GENERATIONS
        words = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
        mask = jax.ShapeDtypeStruct((rows, LENGTH, LENGTH), jnp.bool_)
        parts = split(model, 2, words, words, None, mask, call=lambda model, *x: model(*x)[0])
        self.inputs = parts.inputs
        self.pipe = Pipeline(**parts, num_microbatches=4, mesh=mesh)

    def __call__(self, words: Any, positions: Any, cache: Any, attention_mask: Any) -> Any:
        inputs, extras = self.inputs(words, positions, cache, attention_mask)
        return self.pipe(inputs, extras=extras), cache


class Rollout(vanilla_rollout.VanillaRollout):
    """tunix's own rollout by a plain model, which takes the weights of a pipeline."""

    def __init__(
        self, *, rollout_actor: Actor, tokenizer: Any, rollout_config: Any, plain: Any, **_: Any
    ) -> None:
        sizes = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim
        cache = base_rollout.CacheConfig(rollout_config.kv_cache_size, *sizes)
        super().__init__(plain, tokenizer, cache)
        self.actor, self.plain = rollout_actor, plain

    def update_params(self, *_: Any) -> None:
        with jax.transfer_guard("allow"):  # tunix forbids transfers here
            weights.to_plain(self.actor.pipe, self.plain)
        super().update_params(nnx.state(self.plain, nnx.Param))

    def model(self) -> None:
        """None: tunix compares its arrays with the actor's, and that needs models of one class."""


class Losses(hooks.TrainingHooks):
    """The losses of the actor's steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, *args: Any) -> None:
        self.losses.append(float(args[-1]))

    def ignored(self, *_: Any) -> None: ...

    on_train_start = on_train_end = on_train_step_start = ignored
    on_eval_step_start = on_eval_step_end = ignored


def run(actor: nnx.Module, meshes: dict[Any, Mesh], engine: Any) -> tuple[list[float], Any]:
    """Losses of ten steps of GRPO, and the trained actor."""
    config = rl_cluster.ClusterConfig(
        role_to_mesh=meshes,
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-2),
            eval_every_n_steps=STEPS + 1,
            max_steps=STEPS,
            data_sharding_axis=("data",),
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=LENGTH, max_prompt_length=LENGTH, kv_cache_size=3 * LENGTH
        ),
    )
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=on(make(), meshes[rl_cluster.Role.REFERENCE]),
        tokenizer=Letters(),
        cluster_config=config,
    )
    seen = Losses()
    cluster.actor_trainer.with_training_hooks(seen)
    learner = grpo_learner.GRPOLearner(
        cluster, grpo_learner.GRPOConfig(num_generations=GENERATIONS), reward
    )
    prompts = np.array([[f"{n}{k}?" for k in range(PROMPTS)] for n in range(STEPS)])
    learner.train([{"prompts": some} for some in prompts])
    return seen.losses, cluster.actor_trainer.model


def make() -> nnx.Module:
    """Qwen 3, with the same weights in each call."""
    return qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(0))


def on(model: nnx.Module, mesh: Mesh) -> nnx.Module:
    """The model with its weights on a mesh."""
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    return model


def main() -> dict[str, Any]:
    """Losses and weights of both, and how far apart they are."""
    train = make_mesh(stage=2, devices=jax.devices()[:2])
    write = Mesh(np.array(jax.devices()[2:4]).reshape(1, 2, 1), ("data", "fsdp", "tp"))
    meshes = dict.fromkeys(rl_cluster.Role, write)
    alone, model = run(on(make(), write), meshes, "vanilla")
    engine = functools.partial(Rollout, plain=on(make(), write))
    losses, actor = run(Actor(make(), train), meshes | {rl_cluster.Role.ACTOR: train}, engine)
    trained = on(make(), write)
    weights.to_plain(actor.pipe, trained)
    for step, pair in enumerate(zip(alone, losses, strict=True)):
        print("step {}: loss {:.6f} alone, {:.6f} by the pipeline".format(step, *pair))
    apart = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
    states = [jax.tree.leaves(nnx.state(one, nnx.Param)) for one in (model, trained)]
    far = max(
        float(np.abs(np.subtract(*map(np.asarray, pair))).max())
        for pair in zip(*states, strict=True)
    )
    print(f"losses differ by {apart:.1e}, weights by {far:.1e}")
    return {"losses": losses, "apart": apart, "weights": far}


if __name__ == "__main__":
    main()
