"""Errors for layers and weights that do not fit a mesh, before anything runs."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.layers import ColumnLinear, RowLinear
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import LlamaConfig, build, loss_fn

LARGE = 8192  # with as many: 256 MiB


class Plain(nnx.Module):
    """A weight that says nothing."""

    def __init__(self, size: int = LARGE) -> None:
        self.up = nnx.Param(jnp.zeros((size, LARGE)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.up[...]


def types(make: Any) -> Any:
    """Types of a module, of which nothing is allocated."""
    return nnx.eval_shape(make)


def pipeline(stages: list[Any], **options: Any) -> Pipeline:
    return Pipeline(stages, 4, **options)


def said(stages: list[Any], **options: Any) -> list[str]:
    """Every warning; it names the line that made the pipeline."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline(stages, **options)
    assert all(Path(one.filename) == Path(__file__) for one in caught)
    return [str(one.message) for one in caught]


# --- weights ---


WEIGHT = (
    "parameters of more than 64.0 MiB that several devices hold alike\n"
    "- chunks.0.up float32[2,8192,8192]: 256.0 MiB alike along tensor 4; dividing dimension 2 "
    "by tensor, PartitionSpec('stage', None, 'tensor'), leaves 64.0 MiB\n"
    "name their axes in Pipeline(..., sharding=) or in their metadata "
    "(nnx.with_partitioning), those of a stage without the leading 'stage'; layers must know "
    "the axis, as those of pipeline.layers do, or leave it to the compiler by auto_axes="
)


def test_a_large_weight_that_tensor_could_divide() -> None:
    stages = [types(Plain) for _ in range(2)]
    mesh = make_mesh(stage=2, tensor=4)
    assert said(stages, mesh=mesh) == [WEIGHT]
    assert said(stages, mesh=mesh, sharding=lambda *_: (None, "tensor")) == []
    assert said(stages, mesh=make_mesh(stage=2, data=4)) == []
    assert said([types(lambda: Plain(2048)) for _ in range(2)], mesh=mesh) == []


VOCABULARY = (
    "parameters of more than 64.0 MiB that several devices hold alike\n"
    "- ends.embed.table float32[4194304,8]: 128.0 MiB alike along stage 4, tensor 2; dividing "
    "dimension 0 by stage, PartitionSpec('stage'), leaves 32.0 MiB, or dimension 0 by tensor, "
    "PartitionSpec('tensor'), leaves 64.0 MiB\n"
    "- ends.head.table float32[4194304,8]: 128.0 MiB alike along stage 4, tensor 2; dividing "
    "dimension 0 by stage, PartitionSpec('stage'), leaves 32.0 MiB, or dimension 0 by tensor, "
    "PartitionSpec('tensor'), leaves 64.0 MiB\n"
    "name their axes in Pipeline(..., sharding=) or in their metadata "
    "(nnx.with_partitioning), those of a stage without the leading 'stage'; layers must know "
    "the axis, as those of pipeline.layers do, or leave it to the compiler by auto_axes=; "
    "divide embed and head over 'stage' by vocabulary='stage', with a VocabularyEmbedding and "
    "a VocabularyHead of pipeline.vocabulary"
)


def test_a_large_vocabulary_that_all_stages_hold() -> None:
    stages = [types(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))) for _ in range(4)]
    embed = types(lambda: VocabularyEmbedding(4 * 2**20, 8, rngs=nnx.Rngs(0)))
    head = types(lambda: VocabularyHead(4 * 2**20, 8, rngs=nnx.Rngs(0)))
    given: dict[str, Any] = {"embed": embed, "head": head, "loss_fn": CrossEntropy()}
    mesh = make_mesh(stage=4, tensor=2)
    found = said(stages, mesh=mesh, **given)
    assert found == [VOCABULARY]
    assert said(stages, mesh=mesh, vocabulary="stage", **given) == []


# --- layers ---


def llama(**changes: Any) -> tuple[list[Any], dict[str, Any]]:
    config = LlamaConfig.tiny(num_hidden_layers=2, **changes)
    stages, embed, head = build(config, 2, seed=0)
    return stages, {"embed": embed, "head": head, "loss_fn": loss_fn(config)}


def test_heads_and_words_that_tensor_cannot_share() -> None:
    stages, ends = llama(vocab_size=61, num_key_value_heads=2, intermediate_size=50)
    with pytest.raises(ValueError, match="num_kv_heads") as raised:
        pipeline(stages, mesh=make_mesh(stage=2, tensor=4), **ends)
    assert str(raised.value) == (
        "num_kv_heads=2 over the axis 'tensor' of size 4: every rank holds the same number of "
        "whole ones; sizes of 'tensor' that fit: 1, 2; or let every rank have all with "
        "replicate_kv=True\n"
        "hidden=50 over the axis 'tensor' of size 4: every rank holds the same number of whole "
        "ones; sizes of 'tensor' that fit: 1, 2, 5, 10, 25, 50\n"
        "vocabulary=61 over the axis 'tensor' of size 4: every rank holds the same number of whole "
        "ones; sizes of 'tensor' that fit: 1, 61; or pad it to 64 with multiple_of=4"
    )


def test_the_compiler_may_cut_through_heads() -> None:
    stages, ends = llama(num_key_value_heads=2)
    options = {"auto_axes": ("tensor",), "engine": "programs"}
    pipeline(stages, mesh=make_mesh(stage=2, tensor=4), **options, **ends)


class Layer(nnx.Module):
    def __init__(self, axis: str) -> None:
        self.up = ColumnLinear(8, 16, nnx.Rngs(0), axis=axis)
        self.down = RowLinear(16, 8, nnx.Rngs(1), axis=axis)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


AXIS = (
    "layers were made for the axis 'model', which the mesh lacks, and no weight is divided "
    "over its axis 'tensor' of size 4, along which all devices do the same; give layers and "
    "mesh one name for it"
)


def test_layers_for_an_axis_of_another_name() -> None:
    stages = [Layer("model"), Layer("model")]
    assert said(stages, mesh=make_mesh(stage=2, tensor=4)) == [AXIS]
    assert said(stages, mesh=make_mesh(stage=2, model=4)) == []


def test_a_mesh_without_the_axis_runs_the_plain_model() -> None:
    """Nobody is warned: the same modules are meant to run so."""
    for mesh in (make_mesh(stage=2, data=4), make_mesh(stage=2, tensor=1)):
        assert said([Layer("tensor"), Layer("tensor")], mesh=mesh) == []


def idle(batch: Any = None, kind: Any = None, **sizes: int) -> list[str]:
    loss_fn = lambda y, t: (y - t).mean()  # noqa: E731
    stages = [kind() if kind else nnx.Linear(4, 4, rngs=nnx.Rngs(k)) for k in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = Pipeline(
            stages,
            2,
            mesh=make_mesh(stage=2, **sizes),
            batch=batch,
            loss_fn=loss_fn,
        )
        for _ in range(2):
            pipe.value_and_grad(jnp.ones((8, 4)), jnp.ones((8, 4)))
        pipe(jnp.ones((8, 4)))
    return [str(one.message) for one in caught]


@pytest.mark.few
@pytest.mark.parametrize(
    ("axis", "spec", "hint"),
    [
        ("dp", "P(('data', 'dp'))", ", call the axis 'data' if it is that"),
        ("model", "P(('data', 'model'))", ", call the axis 'tensor' if it is that"),
        ("context", "P('data', 'context')", ""),
    ],
)
def test_an_axis_in_no_role_is_warned_of_once(axis, spec, hint):
    """Its devices all do the same work (issue 52)."""
    (text,) = idle(**{axis: 2})
    assert text == (
        f"the mesh axis {axis!r} of size 2 is in no role: batch= splits nothing over it, no weight "
        f"names it and no forward computation uses it, so its devices all do the same work; let it "
        f"split the batch, Pipeline(..., batch={spec}){hint}, shard weights over it, or leave it "
        f"out of the mesh"
    )


class UsesAxis(nnx.Module):
    """A layer without a weight on the axis that it sums over."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "dp") / 2


@pytest.mark.slow
def test_axes_with_a_role_are_passed_over():
    assert idle(batch=P("dp"), dp=2) == []
    assert idle(dp=1) == []
    assert idle(kind=UsesAxis, dp=2) == []
