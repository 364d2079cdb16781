"""A whole training step before there is a machine: on types, lowered, compiled, predicted.

Letters: S ranks, D data shards, V chunks per rank, M microbatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, shard_optimizer
from pipeline.base.chips import CHIPS
from pipeline.core.options.plan import Plan
from pipeline.insight.forecast.bytes import StepBytes
from pipeline.insight.forecast.step_memory import predict_step
from pipeline.layers import RMSNorm
from pipeline.planner.layout import MeshLayout, PlannedJob
from pipeline.planner.memory import bytes_of
from pipeline.planner.models import MODELS as SIZES
from pipeline.vocabulary import CrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.support import chips, models
from tests.support.models import CLASSES, Hostile

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from llama import LlamaConfig, build, loss_fn
from tests.support.close import assert_close

pytestmark = pytest.mark.usefixtures("standard_promotion")
M, ROWS = 4, 32
OPTIONS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero1": {"data_parallel": "zero1"},
    "fsdp": {"data_parallel": "fsdp"},
    "action": {"data_parallel": "fsdp", "gather": "action"},
}
adam = functools.partial(optax.adam, 1e-2, eps=1e-3)


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def parts() -> tuple[Any, Any, Any]:
    embed, head = models.Words(nnx.Rngs(501)), models.Readout(nnx.Rngs(502))
    return models.build(Hostile, 2), embed, head


def pipeline(option: str, *, types: bool, D: int = 2) -> Pipeline:
    stages, embed, head = nnx.eval_shape(parts) if types else parts()
    return Pipeline(
        stages,
        M,
        schedule="1f1b",
        mesh=make_mesh(stage=2, data=D),
        embed=embed,
        head=head,
        loss_fn=models.cross_entropy,
        **OPTIONS[option],
    )


def batch() -> tuple[jax.Array, jax.Array]:
    return models.words(ROWS), models.words(ROWS, most=CLASSES, seed=4)


def types(tree: Any) -> Any:
    """The types of arrays, and where they lie."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def of_batch(mesh: Any) -> Any:
    rows = NamedSharding(mesh, P("data"))
    return [jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=rows)] * 2


def update(pipe: Pipeline, optimizer: Any, x: jax.Array, t: jax.Array) -> jax.Array:
    """A step as a user writes it."""
    loss, grads = pipe.value_and_grad(x, t)
    optimizer.update(pipe, grads)
    return loss


# --- types are the types of arrays ---


@pytest.mark.parametrize("option", ["zero1", *(slow(name) for name in OPTIONS if name != "zero1")])
def test_an_optimizer_of_types(option):
    """Its leaves are those of one of arrays, each where that lies."""
    found, wanted = (
        make_optimizer(pipe, adam())
        for pipe in (pipeline(option, types=True), pipeline(option, types=False))
    )
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(nnx.state(found)), nnx.to_flat_state(nnx.state(wanted)), strict=True
    ):
        assert isinstance(a.get_value(), jax.ShapeDtypeStruct), path
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if path[0] != "step" and b.shape:
            assert a.get_value().sharding.is_equivalent_to(b.get_value().sharding, len(b.shape))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["zero1", slow("action")])
def test_a_step_of_types_is_that_of_arrays(option):
    """To the letter of its StableHLO; also a step that the user wrote."""
    texts = []
    for kind in (True, False):
        pipe = pipeline(option, types=kind)
        optimizer = make_optimizer(pipe, adam())
        if not kind:  # a new one's counters lie on one device
            nnx.update(optimizer, jax.device_put(nnx.state(optimizer), _places(pipe, optimizer)))
        x, t = of_batch(pipe.mesh)
        texts.append(pipe.lower(x, t, optimizer=optimizer).as_text())
    assert texts[0] == texts[1]


def _places(pipe: Pipeline, optimizer: Any) -> Any:
    everywhere = NamedSharding(pipe.mesh, P())
    return jax.tree.map(
        lambda x: x.sharding if len(x.sharding.device_set) > 1 else everywhere,
        nnx.state(optimizer),
    )


@pytest.mark.parametrize("option", [slow(name) for name in ("zero1", "replicated", "fsdp")])
def test_the_users_own_step_takes_the_same_memory(option):
    pipe = pipeline(option, types=True)
    optimizer, words = make_optimizer(pipe, adam()), of_batch(pipe.mesh)
    own = nnx.jit(update, donate_argnums=(0, 1)).lower(pipe, optimizer, *words).compile()
    found = pipe.lower(*words, optimizer=optimizer).compile()
    a, b = own.memory_analysis(), found.memory_analysis()
    assert a.argument_size_in_bytes == b.argument_size_in_bytes
    assert a.alias_size_in_bytes == b.alias_size_in_bytes
    assert a.temp_size_in_bytes == pytest.approx(b.temp_size_in_bytes, rel=0.02)


@pytest.mark.slow
def test_three_compiled_steps_train():
    """A lowered step runs, and gives the plain model's losses."""
    pipe = pipeline("zero1", types=False)
    optimizer = make_optimizer(pipe, adam())
    _, state = nnx.split((pipe, optimizer))
    step = pipe.lower(*batch(), optimizer=optimizer).compile()
    found = []
    for _ in range(3):
        state, loss = step(state, *batch(), None)
        found.append(float(loss))
    assert_close(found, unpipelined(3))


def unpipelined(steps: int) -> list[float]:
    stages, embed, head = parts()
    whole = models.Ends(nnx.List(stages), nnx.List([embed, head]))
    optimizer = nnx.Optimizer(whole, adam(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            outputs = models.compose(model.embed, *model.head, x)
            return models.cross_entropy(outputs, t)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return [float(step(whole, optimizer, *batch())) for _ in range(steps)]


class Drop(nnx.Module):
    """Has random streams, whose keys are types too."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


MODELS: dict[str, Any] = {
    "random": lambda: models.build(Drop, 4),
    "stacked": lambda: nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(
        nnx.Rngs(0).split(4)  # one module of four stages
    ),
    "unlike": lambda: [kind(nnx.Rngs(0)) for kind in (models.Block, Hostile) * 2],
}


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_models(name):
    """Stages come back as types, and a step is found."""
    stages = nnx.eval_shape(MODELS[name])
    pipe = Pipeline(stages, M, mesh=make_mesh(stage=2), loss_fn=models.squares)
    x = jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)
    optimizer = make_optimizer(pipe, optax.chain(optax.clip_by_global_norm(1.0), adam()))
    assert "while" in pipe.lower(x, x, optimizer=optimizer).as_text()
    first = nnx.eval_shape(MODELS[name] if name == "stacked" else lambda: MODELS[name]()[0])
    wanted = [x.shape[1:] if name == "stacked" else x.shape for x in jax.tree.leaves(first)]
    found = jax.tree.leaves(nnx.state(pipe.stages()[0]))
    assert [x.shape for x in found] == wanted
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in found)


# --- what it takes ---


class Wide(nnx.Module):
    """A residual MLP whose arrays outweigh a program's tables."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = models.normal(rngs, 256, 512), models.normal(rngs, 512, 256)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


def wide(*, S: int = 2, D: int = 4, **options: Any) -> tuple[Pipeline, Any, Any]:
    stages = nnx.eval_shape(lambda: models.build(Wide, S))
    mesh = make_mesh(stage=S, data=D)
    pipe = Pipeline(stages, M, schedule="1f1b", mesh=mesh, loss_fn=models.squares, **options)
    x = jax.ShapeDtypeStruct((M * D * 64, 256), jnp.float32)
    return pipe, make_optimizer(pipe, adam()), x


@pytest.mark.parametrize("option", ["zero1", slow("replicated"), slow("fsdp")])
def test_bytes_of_a_step(option):
    """Arguments exactly, results in their place but for pointers; temporaries as a lower bound."""
    pipe, optimizer, x = wide(**OPTIONS[option])
    found = predict_step(pipe, optimizer, *pipe._operands(x, x, None))
    said = pipe.lower(x, x, optimizer=optimizer).compile().memory_analysis()
    assert found.arguments == said.argument_size_in_bytes
    state = found.arguments - found.batch
    assert said.alias_size_in_bytes == state
    assert said.output_size_in_bytes == pytest.approx(state, abs=1024)
    assert 0 < found.temporaries <= said.temp_size_in_bytes


@pytest.mark.slow
def test_describe_with_an_optimizer():
    pipe, optimizer, x = wide(data_parallel="zero1")
    found = predict_step(pipe, optimizer, *pipe._operands(x, x, None))
    said = pipe.lower(x, x, optimizer=optimizer).compile().memory_analysis()
    total = said.argument_size_in_bytes + said.output_size_in_bytes
    total += said.temp_size_in_bytes - said.alias_size_in_bytes
    weights = 2 * 256 * 512 * 4
    first = f"bytes per rank of gradients and update, predicted: {found.total:,}"
    second = (
        f"  arguments {found.arguments:,}: weights {weights:,}, optimizer {weights // 2 + 8:,}, "
        f"batch {2 * M * 64 * 256 * 4:,}"
    )
    third = "  results use the memory of weights and optimizer"
    *last, more = pipe.describe(x, x, optimizer=optimizer).splitlines()[6:11]
    assert (
        more == "  temporaries within an action are not counted: describe(compiled=True) has them"
    )
    assert last[:3] == [first, second, third]
    assert re.fullmatch(
        rf"  temporaries between actions {found.temporaries:,}: .* messages of .*, sums .*", last[3]
    )
    again = pipe.describe(x, x, optimizer=optimizer, compiled=True).splitlines()[6:10]
    assert again == [
        f"{first}; compiled {total:,}",
        f"{second}; compiled {said.argument_size_in_bytes:,}",
        third,
        f"{last[3]}; compiled {said.temp_size_in_bytes:,}",
    ]


def test_the_last_batch_is_remembered():
    pipe, optimizer, x = wide()
    text = pipe.describe(x, x, optimizer=optimizer)
    pipe.lower(x, x)
    assert pipe.describe(optimizer=optimizer) == text


# --- Llama 8B and 70B ---


def on_paper(*sizes: int, **axes: int) -> Any:
    """A mesh of v5p chips."""

    class Client:
        def devices(self) -> list[Any]:
            return found

    devices = chips.tpu(chips.V5P, *(*sizes, 1, 1)[:3])
    found = [dataclasses.replace(device, client=Client()) for device in devices]
    return make_mesh(devices=found, **axes)


CASES = {
    "8B": ((4, 4, 4), {"data": 8, "stage": 8}, LlamaConfig.llama_8b, {}),
    "70B": (
        (8, 8, 8),
        {"data": 16, "stage": 8, "tensor": 4},
        LlamaConfig.llama_70b,
        {"sequence_parallel": True, "loss_chunks": 8},
    ),
}


@functools.cache
def predicted(name: str) -> tuple[LlamaConfig, StepBytes, Plan]:
    """As `bench/ahead_of_time.py` compiles it."""
    sizes, axes, make, changes = CASES[name]
    config = make(dtype="bfloat16", scan_layers=True, remat_blocks=True, query_chunk=512, **changes)

    def model() -> tuple[Any, Any, Any]:
        stages, embed, head = build(config, axes["stage"], 0)
        if "tensor" in axes:
            return stages, embed, head
        words, d, rngs = config.vocab_size, config.hidden_size, nnx.Rngs(0)
        embed = VocabularyEmbedding(words, d, rngs=rngs, dtype=jnp.bfloat16)
        return stages, embed, VocabularyHead(words, d, rngs=rngs, norm=RMSNorm(d))

    stages, embed, head = nnx.eval_shape(model)
    options: dict[str, Any] = {"loss_fn": CrossEntropy(), "vocabulary": "stage"}
    alike: Any = contextlib.nullcontext()
    if "tensor" in axes:
        options = {"loss_fn": loss_fn(config)}
        alike = pytest.warns(UserWarning, match=r"ends.embed.table .* alike along stage 8")
    with alike:
        pipe = Pipeline(
            stages,
            32,
            mesh=on_paper(*sizes, **axes),
            embed=embed,
            head=head,
            remat=None,
            delayed=True,
            data_parallel="zero1",
            **options,
        )
    x = jax.ShapeDtypeStruct((32 * axes["data"], 8192), jnp.int32)
    optimizer = make_optimizer(pipe, adam())
    return config, predict_step(pipe, optimizer, *pipe._operands(x, x, None)), pipe.plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8B", slow("70B")])
def test_large_models_take_what_the_formula_says(name):
    """Nothing is allocated."""
    config, found, _ = predicted(name)
    axes = CASES[name][1]
    S, T, D = axes["stage"], axes.get("tensor", 1), axes["data"]
    d, tables = config.hidden_size, 2 * config.vocab_size * config.hidden_size
    norms = (2 * config.num_hidden_layers // S + 1) * d  # are not cut over tensor, nor cast
    blocks = config.count() - tables - (2 * config.num_hidden_layers + 1) * d
    cut = blocks // (S * T) + tables // (T if "tensor" in axes else S)
    assert found.weights == 4 * (cut + norms)
    assert found.optimizer == 2 * 4 * (cut + norms) // D + 8
    assert found.casts == 2 * (blocks // (S * T))  # rows of tables are cast as they are looked up


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8B", slow("70B")])
def test_the_planner_says_the_same_of_a_step(name):
    """Its arithmetic and the walk through the traced step agree, part by part."""
    _, found, plan = predicted(name)
    axes = CASES[name][1]
    D, S, T = axes["data"], axes["stage"], axes.get("tensor", 1)
    layout = MeshLayout(
        D,
        S,
        T,
        schedule=plan.schedule.name,
        microbatches=plan.schedule.num_microbatches,
        remat="block",
        data_parallel="zero1",
        vocabulary="stage" if plan.shared else "ends",
    )
    sizes, chip = SIZES[f"llama-{name.lower()}"], CHIPS["v5p"]
    job = PlannedJob(sizes, chip, D * S * T, 32 * D, 8192, 1, "lockstep", chip.efficiency)
    said = bytes_of(job, layout)
    for kind, size in {
        "weights": found.weights,
        "optimizer": found.optimizer,
        "gradients": found.totals,
        "stashes": found.stashes.size,
        "messages": found.messages.size,
        "weights cast": found.casts,
    }.items():
        assert said[kind] == pytest.approx(size, rel=1e-4), kind
    assert sum(said.values()) - said["workspace"] == pytest.approx(found.total, rel=0.01)


@pytest.mark.slow
def test_the_docs_have_the_predicted_bytes():
    found = [predicted(name)[1] for name in CASES]
    rows = {
        "weights": [one.weights for one in found],
        "Adam state, over `data`": [one.optimizer for one in found],
        "sums of gradients": [one.totals for one in found],
        "stashes: inputs of a stage's blocks, 15 microbatches": [one.stashes.size for one in found],
        "weights cast once to bfloat16": [one.casts for one in found],
        "messages": [one.messages.size for one in found],
        "all but the temporaries of an action": [one.total for one in found],
    }
    text = (Path(__file__).parents[3] / "bench" / "notes" / "llama.md").read_text(encoding="utf-8")
    for what, sizes in rows.items():
        (cells,) = re.findall(rf"^\| {re.escape(what)} \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
        assert [float(x) for x in cells] == pytest.approx([s / 1e9 for s in sizes], abs=0.006)


# --- bad input ---


def told(call: Any) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def test_types_cannot_be_computed_with():
    pipe = pipeline("zero1", types=True)
    x, t = batch()
    for method, call in {
        "pipe": lambda: pipe(x),
        "loss": lambda: pipe.loss(x, t),
        "value_and_grad": lambda: pipe.value_and_grad(x, t),
    }.items():
        assert told(call) == (
            f"{method}() computes, but the pipeline or the batch is made of types "
            f"(jax.ShapeDtypeStruct); make the stages without nnx.eval_shape, or ask for "
            f"pipe.describe(inputs, targets) or pipe.lower(inputs, targets), which run nothing"
        )


def test_an_optimizer_of_types_is_made_by_make_optimizer():
    pipe = pipeline("zero1", types=True)
    tx = shard_optimizer(adam(), pipe)
    assert told(lambda: nnx.Optimizer(pipe, tx, wrt=nnx.Param)) == (
        "a shard_optimizer was asked for the state of parameters that are types "
        "(jax.ShapeDtypeStruct); make the optimizer with pipeline.make_optimizer(pipe, tx), "
        "which then holds types too"
    )


def test_what_is_no_optimizer():
    pipe = pipeline("zero1", types=True)
    x, t = of_batch(pipe.mesh)
    for call in (pipe.lower, pipe.describe):
        assert told(lambda call=call: call(x, t, optimizer=adam())) == (
            "optimizer is of type GradientTransformationExtraArgs; give an nnx.Optimizer of this "
            "pipeline: pipeline.make_optimizer(pipe, tx), of arrays or of types"
        )


def test_an_optimizer_of_another_pipeline():
    pipe, (_, optimizer, _) = pipeline("zero1", types=True), wide()
    x, t = of_batch(pipe.mesh)
    assert told(lambda: pipe.lower(x, t, optimizer=optimizer)) == (
        "optimizer keeps the state of other parameters than this pipeline has; make one for it: "
        "pipeline.make_optimizer(pipe, tx)"
    )


def test_a_step_needs_a_batch():
    pipe, optimizer, _ = wide()
    assert told(lambda: pipe.describe(optimizer=optimizer)) == (
        "describe(optimizer=...) predicts a step, and no batch is known; give it one, "
        "describe(inputs, targets, optimizer=...), of arrays or jax.ShapeDtypeStruct"
    )


def test_arrays_and_types_cannot_be_mixed():
    stages = [nnx.eval_shape(lambda: Hostile(nnx.Rngs(0))), Hostile(nnx.Rngs(1))]
    assert told(lambda: Pipeline(stages, M, mesh=make_mesh(stage=2))) == (
        "stages[0] is made of types (jax.ShapeDtypeStruct), stages[1] of arrays; make all parts "
        "of a model by nnx.eval_shape, to describe and to compile, or none, to train"
    )
