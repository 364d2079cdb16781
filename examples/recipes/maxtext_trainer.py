"""MaxText's trainer, by its own config and data, with its decoder as a pipeline.

    pip install --no-deps maxtext   # and what it imports: tests/zoo/alone.txt
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/recipes/maxtext_trainer.py

Within `as_pipeline(...)`, MaxText's `train_loop(config, recorder)` makes its model, optimizer and
data by its config. Then the decoder's layers become stages, and MaxText's step, loss, clipping,
learning rate and metrics work on the pipeline. The losses are those of MaxText without it. A model
without dropout, experts and scanned layers is meant. MaxText's checkpoints are off: they would hold
arrays in the pipeline's own order (save `pipeline.training.checkpoints.Checkpoints`).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import maxtext
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, train_utils

from pipeline import Pipeline, shard_optimizer, split

OPTIONS = {
    "run_name": "recipe",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "log_config": False,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "dataset_type": "synthetic",
    "per_device_batch_size": 4,
    "steps": 20,
    "learning_rate": 1e-2,
    "attention": "dot_product",
    "dtype": "float32",
    "matmul_precision": "float32",
    "scan_layers": False,
    "sharding_tolerance": 1.0,  # before it is cut, the model has nothing on the axis of stages
    "base_emb_dim": 16,
    "base_mlp_dim": 24,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "base_num_decoder_layers": 4,
    "head_dim": 8,
    "vocab_size": 32,
    "max_target_length": 8,
}


def layer_by_layer(model: Any, tokens: Any, positions: Any, segments: Any) -> Any:
    """Logits, by calls of the layers that `split` can see: MaxText calls copies of them."""
    decoder, table = model.decoder, model.token_embedder
    x = decoder.embed_tokens(table, tokens, "train")
    for k in range(model.config.num_decoder_layers):
        x, _ = getattr(decoder, f"layers_{k}")(x, segments, positions, True, "train")
    return decoder.apply_output_head(table, x, True, "train")


class Decoder(nnx.Module):
    """A pipeline with the arguments and the results of MaxText's `Transformer`."""

    def __init__(self, model: Any, mesh: Mesh, num_stages: int, **options: Any) -> None:
        config = model.config
        for _, module in nnx.iter_modules(model):  # one random stream, which no layer uses
            if hasattr(module, "rngs"):
                module.rngs = None
        shape = config.global_batch_size_to_train_on, config.max_target_length
        words = jax.ShapeDtypeStruct(shape, np.int32)
        parts = split(model, num_stages, words, words, words, call=layer_by_layer)
        self.inputs, self.mesh, self.config = parts.inputs, mesh, config
        self.pipe = Pipeline(**parts, mesh=mesh, **options)

    def __call__(
        self, decoder_input_tokens: Any, decoder_positions: Any, decoder_segment_ids: Any, **_: Any
    ) -> Any:
        args = decoder_input_tokens, decoder_positions, decoder_segment_ids
        inputs, extras = self.inputs(*args)
        return self.pipe(inputs, extras=extras)


def of_pipe(tx: Any) -> optax.GradientTransformation:
    """The transformation for a module that has a pipeline in the attribute `pipe`."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads["pipe"], state, params["pipe"])
        return jax.tree.unflatten(jax.tree.structure(grads), jax.tree.leaves(updates)), state

    return optax.GradientTransformation(lambda params: tx.init(params["pipe"]), update)


def on_mesh(x: jax.Array, everywhere: NamedSharding) -> jax.Array:
    """The array, on all devices of a mesh if it is on none."""
    return x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere)


@contextlib.contextmanager
def as_pipeline(num_stages: int, **options: Any) -> Iterator[None]:
    """Let MaxText's `train_loop` train a pipeline.

    Args:
      num_stages: how many.
      options: of `Pipeline`; num_microbatches is required.
    """
    make_mesh, make_state = maxtext_utils.get_mesh_from_config, train_utils.setup_train_loop
    rules_of = train.logical_axis_rules

    def mesh_of(_config: Any, devices: Any = None) -> Mesh:
        devices = np.array(jax.devices() if devices is None else devices)
        return Mesh(devices.reshape(-1, num_stages), ("data", "stage"))

    def setup(config: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        *found, state = make_state(config, *args, **kwargs)
        mesh = found[4]
        model = Decoder(state.model, mesh, num_stages, **options)
        tx = of_pipe(shard_optimizer(state.optimizer.tx, model.pipe))
        state = type(state)(model, nnx.Optimizer(model, tx, wrt=nnx.Param))
        everywhere = NamedSharding(mesh, PartitionSpec())  # of counts, which are on one device
        nnx.update(state, jax.tree.map(lambda x: on_mesh(x, everywhere), nnx.state(state)))
        found[2] = jax.tree.map(lambda x: x.sharding, nnx.state(state))
        return *found, state

    maxtext_utils.get_mesh_from_config, train_utils.setup_train_loop = mesh_of, setup
    # In a step the pipeline divides the work over both axes; layers have nothing to place on them.
    train.logical_axis_rules = lambda _rules: rules_of(())
    try:
        yield
    finally:
        maxtext_utils.get_mesh_from_config, train_utils.setup_train_loop = make_mesh, make_state
        train.logical_axis_rules = rules_of


def losses(**options: Any) -> list[float]:
    """The losses of a run of MaxText's trainer, by its own file of metrics."""
    defaults = Path(maxtext.__file__).parent / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        given = OPTIONS | {"metrics_file": file, "base_output_directory": folder} | options
        config = pyconfig.initialize(["", str(defaults), *(f"{k}={v}" for k, v in given.items())])
        train.train_loop(config, None)
        lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["learning/loss"] for line in lines]


def main() -> dict[str, Any]:
    """Losses of MaxText without and with a pipeline."""
    alone = losses()
    with as_pipeline(2, num_microbatches=4):
        found = losses()
    for step, pair in enumerate(zip(alone, found, strict=True)):
        print("step {:2}: loss {:.6f} alone, {:.6f} by the pipeline".format(step, *pair))
    apart = max(abs(a - b) for a, b in zip(alone, found, strict=True))
    print(f"losses differ by {apart:.1e}")
    return {"first": alone[0], "last": found[-1], "apart": apart}


if __name__ == "__main__":
    main()
