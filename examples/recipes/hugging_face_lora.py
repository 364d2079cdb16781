"""A Hugging Face checkpoint: load it over devices, train LoRA adapters, merge them, save it again.

    python examples/recipes/hugging_face_lora.py [checkpoint] [output]

Without a checkpoint a small Llama of random weights is made. Any folder with a `config.json` and
safetensors of the families of docs/weights.md will do.
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from pipeline import Pipeline, decoders, make_optimizer, weights
from pipeline.decoders import next_token_loss

RANK, STEPS = 4, 20
TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def make_checkpoint(folder: Path) -> None:
    """Write a small Llama of random weights."""
    config = weights.FAMILIES["llama"].config(TINY)
    stages, embed, head = decoders.build(config, [4], nnx.Rngs(0))
    weights.save(Pipeline(stages, 1, embed=embed, head=head), folder, config=TINY)


def adapted(stage: nnx.Module, rngs: nnx.Rngs) -> nnx.Module:
    """Put adapters on the last matrix of attention and MLP of each block of a stage."""
    for block in stage.blocks:
        for part, name in ((block.attention, "out"), (block.mlp, "down")):
            layer = getattr(part, name)
            d, e = layer.weight.shape
            setattr(part, name, nnx.LoRA(d, RANK, e, base_module=layer, rngs=rngs))
    return stage


def merge(pipe: Pipeline, trained: Pipeline) -> None:
    """Add the adapters of one pipeline to the weights of another, which has none."""
    layers = pipe.to_layers(nnx.state(pipe, nnx.Param))
    for k, stage in enumerate(trained.stages()):
        for n, block in enumerate(stage.blocks):
            own = layers["stages"][k]["blocks"][n]
            for part, name in (("attention", "out"), ("mlp", "down")):
                lora = getattr(getattr(block, part), name)
                own[part][name]["weight"] += lora.lora_a[...] @ lora.lora_b[...]
    nnx.update(pipe, pipe.from_layers(layers))


def main(checkpoint: str | None = None, output: str | None = None) -> dict[str, float]:
    """Load, train adapters, merge, save, and load again."""
    work = Path(tempfile.mkdtemp())
    source = Path(checkpoint) if checkpoint else work / "checkpoint"
    if not checkpoint:
        make_checkpoint(source)
    target = Path(output) if output else work / "tuned"

    pipe = weights.load(source, num_microbatches=4, num_stages=2, loss_fn=next_token_loss)
    stages = [adapted(stage, nnx.Rngs(k)) for k, stage in enumerate(pipe.stages())]
    ends = {"embed": pipe.embed, "head": pipe.head}
    tuned = Pipeline(stages, 4, **ends, loss_fn=next_token_loss, wrt=nnx.LoRAParam)
    optimizer = make_optimizer(tuned, optax.adamw(1e-2))

    text = np.frombuffer(b"Adapters are small and the model is not. " * 10, np.uint8)
    rows = np.stack([text[at : at + 33] for at in range(0, 160, 10)]).astype(np.int32)
    inputs, targets = rows[:, :-1], rows[:, 1:]

    @nnx.jit
    def train_step(model: Pipeline, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = model.value_and_grad(inputs, targets)
        optimizer.update(model, grads)
        return loss

    losses = [float(train_step(tuned, optimizer)) for _ in range(STEPS)]
    last = float(tuned.loss(inputs, targets))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(tuned, nnx.LoRAParam)))
    print(f"{count} numbers trained: loss {losses[0]:.3f} -> {last:.3f}")

    merge(pipe, tuned)
    weights.save(pipe, target)
    again = weights.load(target, num_microbatches=4, loss_fn=next_token_loss)
    merged = float(again.loss(inputs, targets))
    print(f"saved in {target}; loaded again the loss is {merged:.3f}")
    return {"first": losses[0], "last": last, "merged": merged, "count": count}


if __name__ == "__main__":
    main(*sys.argv[1:])
