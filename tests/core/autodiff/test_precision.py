"""Dtypes of parameters, of products and of summed gradients; and a configuration of them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import ParallelConfig, Pipeline
from tests.support import mixed, models
from tests.support.close import assert_close
from tests.support.float16 import needs_float16
from tests.support.models import Block, Readout, Words

M, ROWS = 4, 32


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return models.cross_entropy(logits.astype(jnp.float32), labels)


def batch() -> tuple[jax.Array, jax.Array]:
    return models.words(ROWS), models.words(ROWS, most=models.CLASSES, seed=4)


def pipeline(stages: list[Any] | None = None, **options: Any) -> Pipeline:
    mesh = make_mesh(stage=2, data=2)
    ends = {"embed": Words(nnx.Rngs(50)), "head": Readout(nnx.Rngs(51))}
    options = {"num_microbatches": M, "mesh": mesh, "schedule": "1f1b", **ends} | options
    stages = models.build(Block, 2) if stages is None else stages
    return Pipeline(stages, loss_fn=loss_fn, **options)


def reference(param: Any, compute: Any) -> Any:
    """Without a pipeline: parameters rounded to one dtype, and cast to another for a step."""

    def cast(module: nnx.Module, *dtypes: Any) -> nnx.Module:
        graphdef, state = nnx.split(module)
        for dtype in dtypes:
            state = jax.tree.map(lambda x, d=dtype: x.astype(d), state)
        return nnx.merge(graphdef, state)

    stages = [cast(stage, param, compute) for stage in models.build(Block, 2)]
    ends = {"embed": Words(nnx.Rngs(50)), "head": Readout(nnx.Rngs(51))}
    ends = {name: cast(end, param, compute) for name, end in ends.items()}
    return models.reference(stages, *batch(), loss_fn, **ends)


def dtypes(tree: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"schedule": "zb_h1", "remat": None}, marks=pytest.mark.slow),
        pytest.param({"data_parallel": "fsdp", "gather": "action"}, marks=pytest.mark.slow),
        pytest.param({"mesh": make_mesh(stage=1), "remat": None}, marks=pytest.mark.slow),
    ],
    ids=range(4),
)
def test_bfloat16_parameters_computed_with_in_float32(options: dict[str, Any]) -> None:
    """Exactly the plain model whose parameters were rounded; gradients are rounded each time."""
    pipe = pipeline(param_dtype="bfloat16", compute_dtype=jnp.float32, **options)
    assert dtypes(nnx.state(pipe, nnx.Param)) == {"bfloat16"}
    loss, grads = pipe.value_and_grad(*batch())
    want = reference("bfloat16", "float32")
    assert_close(loss, want[0])
    assert dtypes(grads) == {"bfloat16"}
    models.assert_matches(pipe, (loss, grads), want, tolerance=2**-6)


@pytest.mark.slow
def test_float32_parameters_computed_with_in_bfloat16() -> None:
    pipe = pipeline(compute_dtype="bfloat16")
    assert dtypes(nnx.state(pipe, nnx.Param)) == {"float32"}
    loss, grads = pipe.value_and_grad(*batch())
    assert dtypes(grads) == {"float32"}
    models.assert_matches(pipe, (loss, grads), reference("float32", "bfloat16"), tolerance=0.05)
    exact = reference("float32", "float32")
    assert loss != exact[0]
    assert dtypes(pipe(batch()[0])) == {"bfloat16"}
    text = pipe.lower(*batch()).as_text()
    sent = [line for line in text.splitlines() if "collective_permute" in line]
    assert sent
    assert all("bf16" in line or "bf16" in text for line in sent)
    products = re.findall(r"dot_general.*?: \((.*?)\) ->", text)
    assert products
    assert all("xbf16>" in operands and "xf32>" not in operands for operands in products)
    assert "parameters and activations are cast to bfloat16" in pipe.describe()


@pytest.mark.slow
def test_an_activation_without_embedding_is_cast_too() -> None:
    pipe = Pipeline(models.build(Block, 2), M, mesh=make_mesh(stage=2), compute_dtype="bfloat16")
    x = models.rows(ROWS)
    assert pipe(x).dtype == jnp.bfloat16
    found = jax.grad(lambda x: jnp.sum(pipe(x).astype(jnp.float32)))(x)
    plain = Pipeline(models.build(Block, 2), M, mesh=make_mesh(stage=2))
    want = jax.grad(lambda x: jnp.sum(plain(x)))(x)
    assert found.dtype == jnp.float32
    assert_close(found, want, tolerance=0.1)


@needs_float16
def test_parameters_are_cast_where_they_lie() -> None:
    mesh = make_mesh(stage=2, data=2, tensor=2)
    names = {"up": (None, "tensor"), "down": ("tensor",)}
    options = {"mesh": mesh, "data_parallel": "fsdp", "auto_axes": ("tensor",)}
    options |= {"engine": "programs", "sharding": lambda path, _: names.get(path)}
    pipe = pipeline(param_dtype="float16", **options)
    up = pipe.chunks[0].up.get_value()
    assert (up.dtype, up.sharding.spec) == (jnp.float16, P("stage", "data", "tensor"))
    types = nnx.eval_shape(lambda: nnx.List(models.build(Block, 2)))
    ends = dict(
        nnx.eval_shape(lambda: nnx.Dict(embed=Words(nnx.Rngs(50)), head=Readout(nnx.Rngs(51))))
    )
    chunk = pipeline(list(types), param_dtype="float16", mesh=mesh, **ends).chunks[0]
    assert (chunk.up.get_value().dtype, chunk.up.get_value().sharding.spec) == (
        jnp.float16,
        P("stage"),
    )


@pytest.mark.slow
def test_stages_that_are_not_alike() -> None:
    name = "10 layers"
    stages, (x, t) = mixed.build(name), mixed.batch(name)
    pipe = Pipeline(
        stages,
        2,
        mesh=make_mesh(stage=4),
        loss_fn=models.squares,
        param_dtype="bfloat16",
        compute_dtype="float32",
    )
    assert dtypes(nnx.state(pipe, nnx.Param)) == {"bfloat16"}
    rounded = [nnx.clone(stage) for stage in stages]
    for stage in rounded:
        cast = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
        nnx.update(stage, jax.tree.map(cast, nnx.state(stage)))
    want = models.reference(rounded, x, t, mixed.loss_of(name))
    models.assert_matches(pipe, pipe.value_and_grad(x, t), want, tolerance=2**-7)


# --- a configuration ---


@pytest.mark.slow
def test_a_configuration_is_what_runs() -> None:
    config = ParallelConfig(
        stage=2,
        data=2,
        batch_size=ROWS,
        microbatch_size=ROWS // (2 * M),
        param_dtype="bfloat16",
        compute_dtype="float32",
        grad_dtype="float32",
    )
    options = config.pipeline_options()
    mesh = options.pop("mesh")
    assert dict(mesh.shape) == config.sizes
    assert options == {
        "num_microbatches": M,
        "param_dtype": "bfloat16",
        "compute_dtype": "float32",
        "grad_dtype": "float32",
    }
    pipe = pipeline(**config.pipeline_options())
    assert pipe.mesh.shape == mesh.shape
    by_hand = pipeline(mesh=mesh, **options)
    found, want = (p.value_and_grad(*batch()) for p in (pipe, by_hand))
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert dtypes(found[1]) == {"bfloat16"}
    plain = pipeline(mesh=mesh).value_and_grad(*batch())
    assert found[0] != plain[0]


def test_a_configuration_without_microbatches() -> None:
    with pytest.raises(ValueError) as caught:
        ParallelConfig(stage=2, batch_size=32).pipeline_options()
    assert str(caught.value) == (
        "ParallelConfig has 1 fault\n- num_microbatches=None: a pipeline needs it; give it, or "
        "batch_size and microbatch_size, from which it follows"
    )


# --- bad input ---


@pytest.mark.parametrize("name", ["param_dtype", "compute_dtype"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "halves",
            (
                "'halves': must be None, for what the model has, or a floating dtype of 16 bits or "
                "more, such as 'bfloat16'"
            ),
        ),
        (
            "float8_e4m3fn",
            (
                "'float8_e4m3fn': must be None, for what the model has, or a floating dtype of 16 "
                "bits or more, such as 'bfloat16'"
            ),
        ),
        (
            "float64",
            (
                "'float64': JAX has no float64 unless jax_enable_x64 is set; set it, or use "
                "'float32'"
            ),
        ),
    ],
)
def test_what_is_no_precision(name: str, given: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        pipeline(**{name: given})
    assert str(caught.value) == f"{name}={text}"
