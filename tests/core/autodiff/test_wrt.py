"""Trained parts: gradients, work and memory of the variables that a filter finds, and no others.

Letters: S ranks, K stages, V chunks per rank, M microbatches, D data shards.
"""

from __future__ import annotations

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval

from collectives import make_mesh
from examples import gpt
from pipeline import Pipeline, make_optimizer
from pipeline.insight.forecast import traffic
from pipeline.vocabulary import CrossEntropy
from tests.core.step import test_vocabulary
from tests.models.layers import test_tensor_axis
from tests.support import dots, hlo, models, tensor_stages
from tests.support.models import CLASSES, WIDTH

K, M, ROWS = 4, 8, 16
NORMAL = nnx.initializers.normal(1.0)


class Block(nnx.Module):
    """A residual MLP with adapters, each after a norm; layers of them where lengths differ."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 1):
        def adapted(width: int, out: int) -> nnx.LoRALinear:
            linear = nnx.LoRALinear(width, out, lora_rank=2, bias_init=NORMAL, rngs=rngs)
            shape = linear.lora.lora_b.shape
            linear.lora.lora_b.set_value(rngs.params.normal(shape))  # zeros by default
            return linear

        self.layers = nnx.List(
            [nnx.List([adapted(WIDTH, 6), adapted(6, WIDTH)]) for _ in range(layers)]
        )

    def __call__(self, x):
        for up, down in self.layers:
            x = models.unit(x + down(jnp.tanh(up(x))))
        return x


class Plain(nnx.Module):
    """The plain model, under the names that filters see."""

    def __init__(self, lengths: tuple[int, ...] = (1,) * K):
        self.stages = nnx.List([Block(nnx.Rngs(k), n) for k, n in enumerate(lengths)])
        self.embed = nnx.Linear(5, WIDTH, rngs=nnx.Rngs(50))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(51))

    def __call__(self, x):
        return models.compose(self.stages, self.embed, self.head, x)


def param(path, variable, wanted):
    return isinstance(variable, nnx.Param) and wanted(path)


WRT = {
    "adapters": nnx.LoRAParam,
    "upper stages": functools.partial(param, wanted=lambda p: p[0] == "stages" and p[1] >= 2),
    "head": nnx.filterlib.PathContains("head"),
    "embed": nnx.filterlib.PathContains("embed"),
    "kernels above": functools.partial(
        param, wanted=lambda p: p[0] != "embed" and p[-1] == "kernel" and p[1] != 0
    ),
}
UNLIKE = (1, 2, 1, 3)


@functools.cache
def batch():
    with jax.ensure_compile_time_eval():  # whoever asks first may be traced
        return models.rows(ROWS, width=5), models.rows(ROWS, seed=1, width=CLASSES)


def make(wrt, *, S=4, D=1, lengths=(1,) * K, **options):
    model = Plain(lengths)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "wrt freezes a part")
        return Pipeline(
            list(model.stages),
            M,
            embed=model.embed,
            head=model.head,
            loss_fn=models.squares,
            mesh=make_mesh(stage=S, data=D),
            wrt=wrt,
            **options,
        )


def loss_of(model, *data):
    x, t = data or batch()
    return models.squares(model(x), t)


@functools.cache
def plain_gradients(lengths=(1,) * K):
    """Loss, and by path the gradients of all parameters.

    In float64: of three adapted layers in a row some gradients are a hundredth of their neighbours,
    and two ways to sum them in float32 differ by 1.03e-5.
    """
    held = jax.tree.map(np.asarray, (nnx.state(Plain(lengths)), batch()))
    with jax.enable_x64(True):
        state, (x, t) = jax.tree.map(functools.partial(jnp.asarray, dtype=float), held)
        model = nnx.merge(nnx.graphdef(Plain(lengths)), state)
        loss, grads = nnx.jit(nnx.value_and_grad(loss_of))(model, x, t)
        found = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(grads)}
        return np.asarray(loss), found


def by_path(pipe, grads):
    """A pipeline's gradients under these names; zeros where it has none."""
    filled = nnx.clone(pipe)
    nnx.update(filled, jax.tree.map(jnp.zeros_like, nnx.state(filled, nnx.Param)))
    nnx.update(filled, grads)
    parts = {("stages", k): stage for k, stage in enumerate(filled.stages())}
    parts |= {("embed",): filled.embed, ("head",): filled.head}
    return {
        (*prefix, *path): v.get_value()
        for prefix, part in parts.items()
        for path, v in nnx.to_flat_state(nnx.state(part, nnx.Param))
    }


def assert_parity(pipe, wrt, found, lengths=(1,) * K):
    loss, grads = found
    want_loss, wanted = plain_gradients(lengths)
    variables = dict(nnx.to_flat_state(nnx.state(Plain(lengths), nnx.Param)))
    predicate = nnx.filterlib.to_predicate(wrt)
    assert models.distance(loss, want_loss) <= 1e-5
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(pipe, pipe.wrt))
    own = by_path(pipe, grads)
    assert own.keys() == wanted.keys()
    trained = [path for path in wanted if predicate(path, variables[path])]
    assert 0 < len(trained) < len(wanted)
    for path in wanted:
        if path in trained:
            assert models.distance(own[path], wanted[path]) <= 1e-5, path
        else:
            assert not own[path].any(), path


FAST = [
    pytest.param("adapters", {"schedule": "zb_h1", "remat": None}, marks=pytest.mark.slow),
    ("upper stages", {"schedule": "1f1b"}),
    ("kernels above", {"schedule": "zb_v", "S": 2, "D": 2, "data_parallel": "fsdp"}),
    ("head", {"schedule": "zb_h1", "lengths": UNLIKE}),
]
LAYOUTS = {
    "1f1b": {"schedule": "1f1b"},
    "residuals": {"schedule": "1f1b", "remat": None},
    "zb_h1": {"schedule": "zb_h1"},
    "zb_v": {"schedule": "zb_v", "S": 2, "remat": None},
    "V = 2": {"schedule": "interleaved_1f1b", "S": 2},
    "alone": {"S": 1, "remat": None},
    "zero1": {"S": 2, "D": 2, "data_parallel": "zero1"},
    "fsdp": {"S": 2, "D": 2, "data_parallel": "fsdp", "gather": "action"},
    "delayed": {"schedule": "zb_v", "S": 2, "delayed": True},
    "partners": {"schedule": "1f1b", "pattern": "partner"},
    "unlike": {"schedule": "zb_h1", "lengths": UNLIKE},
    "unlike, V = 2": {"schedule": "zb_v", "S": 2, "lengths": UNLIKE, "remat": None},
    "unlike, 1f1b": {"schedule": "1f1b", "lengths": UNLIKE},
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("wrt", "options"),
    [
        *FAST,
        *(
            pytest.param(wrt, options, marks=(pytest.mark.slow, pytest.mark.exhaustive))
            for options in LAYOUTS.values()
            for wrt in WRT
        ),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_plain_model_and_zeros_of_what_is_frozen(wrt, options):
    pipe, filter_ = make(WRT[wrt], **options), WRT[wrt]
    lengths = options.get("lengths", (1,) * K)
    assert_parity(pipe, filter_, pipe.value_and_grad(*batch()), lengths)


@pytest.mark.slow
@pytest.mark.parametrize("wrt", ["adapters", pytest.param("upper stages", marks=pytest.mark.slow)])
def test_a_trainer_that_differentiates_the_loss_gets_the_same(wrt):
    pipe = make(WRT[wrt], S=2, schedule="1f1b")

    @nnx.jit
    def by_nnx(pipe):
        take = nnx.value_and_grad(lambda m: m.loss(*batch()), argnums=nnx.DiffState(0, pipe.wrt))
        return take(pipe)

    found = by_nnx(pipe)
    assert_parity(pipe, WRT[wrt], found)
    jax.tree.map(np.testing.assert_array_equal, found, pipe.value_and_grad(*batch()))


@pytest.mark.slow
def test_a_loss_outside_of_the_pipeline():
    pipe = make(WRT["upper stages"], S=2, schedule="zb_v")
    found = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, pipe.wrt))(pipe)
    assert_parity(pipe, WRT["upper stages"], found)


def products(f, *args):
    """Multiplications of a function's matrix products, in loops times their length."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return dots.work(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def test_a_call_may_ask_for_less_and_then_does_less():
    pipe = make(nnx.Param, S=2, schedule="zb_v")
    x, t = batch()
    graphdef, state = nnx.split(pipe)

    def call(**options):
        return lambda s: nnx.merge(graphdef, s).value_and_grad(x, t, **options)

    def differentiated(wrt):
        of = nnx.DiffState(0, wrt)
        return lambda s: nnx.grad(lambda m: m.loss(x, t), argnums=of)(nnx.merge(graphdef, s))

    work = [
        products(call(), state),
        products(call(wrt=nnx.LoRAParam), state),
        products(differentiated(nnx.Param), state),
        products(differentiated(nnx.LoRAParam), state),
    ]
    assert work[1] == work[3]
    assert work[1] < 0.8 * min(work[0], work[2])
    grads = jax.eval_shape(call(wrt=nnx.LoRAParam), state)[1]
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(pipe, nnx.LoRAParam))


# --- what a step takes ---


class Decoder(nnx.Module):
    """A decoder block with adapters on all its matrices: [b, t, d] -> [b, t, d]."""

    def __init__(self, d: int, rngs: nnx.Rngs):
        adapted = functools.partial(nnx.LoRALinear, lora_rank=4, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(d, rngs=rngs) for _ in range(2)])
        self.qkv, self.mix = adapted(d, 3 * d), adapted(d, d)
        self.up, self.down = adapted(d, 4 * d), adapted(4 * d, d)

    def __call__(self, x):
        x = x + self.mix(gpt.attention(self.qkv(self.norms[0](x)), 4))
        return x + self.down(jax.nn.relu(self.up(self.norms[1](x))))


class Multiplied(hlo.Sent):
    """[devices] the multiplications of matrix products in a step, times how often each runs."""

    def __init__(self, compiled, pipe):
        self.count = np.zeros(pipe.mesh.size)
        text = compiled.as_text()
        found = re.findall(r"^\s+(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]", text, re.MULTILINE)
        self._shapes = {name: [int(n) for n in dims.split(",") if n] for name, dims in found}
        super().__init__(text, pipe.plan.training, pipe.mesh)

    def _visit(self, name, times):
        for line in self._found[name]:
            if hlo.opcode(line) == "dot":
                made, left = re.findall(r"%?([\w.\-]+) = .* dot\([^%)]*%?([\w.\-]+)", line)[0]
                (dims,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", line)
                summed = [self._shapes[left][int(n)] for n in dims.split(",")]
                self.count += times * math.prod(self._shapes[made]) * math.prod(summed)
        super()._visit(name, times)


D_MODEL, TOKENS = 32, 8


def decoder(wrt, **options):
    blocks = [Decoder(D_MODEL, nnx.Rngs(k)) for k in range(K)]
    mesh = make_mesh(stage=K)
    return Pipeline(blocks, M, loss_fn=models.squares, mesh=mesh, wrt=wrt, **options)


def alone(wrt, *, again: bool):
    """Multiplications of the plain model's gradients of one row."""
    graphdef, trained, rest = nnx.split(
        nnx.List([Decoder(D_MODEL, nnx.Rngs(k)) for k in range(K)]), wrt, ...
    )

    def loss(trained, x):
        for block in nnx.merge(graphdef, trained, rest):
            own, state = nnx.split(block)

            def run(state, x, own=own):
                return nnx.merge(own, state)(x)

            x = (jax.checkpoint(run) if again else run)(state, x)
        return models.squares(x, x)

    return products(jax.grad(loss), trained, jnp.ones((1, TOKENS, D_MODEL)))


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        pytest.param("zb_h1", None, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for case in (("1f1b", None), ("1f1b", "stage"), ("zb_h1", "stage"))
        ),
    ],
)
def test_adapters_cost_what_they_cost_alone(schedule, remat):
    x = jnp.ones((M, TOKENS, D_MODEL))
    steps = {}
    for wrt in (nnx.Param, nnx.LoRAParam):
        pipe = decoder(wrt, schedule=schedule, remat=remat)
        compiled = pipe.lower(x, x).compile()
        done = Multiplied(compiled, pipe).count.sum()
        want = M * alone(wrt, again=remat == "stage")
        if remat is None:
            assert done == want
        assert 0.9 < done / want <= 1  # the last stage's forward is not run twice
        steps[wrt] = done, compiled.memory_analysis()
    (full, full_bytes), (own, own_bytes) = steps.values()
    assert own < 0.8 * full
    assert own_bytes.temp_size_in_bytes < full_bytes.temp_size_in_bytes
    sums = sum(x.nbytes for x in jax.tree.leaves(nnx.state(pipe, nnx.LoRAParam))) // K
    assert sums < own_bytes.output_size_in_bytes < sums + 512


@pytest.mark.slow
def test_below_what_is_trained_nothing_goes_back():
    x = jnp.ones((M, TOKENS, D_MODEL))
    with pytest.warns(UserWarning, match="wrt freezes a part"):
        pipe = decoder(
            lambda path, v: path[1] >= 2 and isinstance(v, nnx.LoRAParam), schedule="zb_h1"
        )
    found = Multiplied(pipe.lower(x, x).compile(), pipe)
    count = found.count
    forward = products(
        nnx.merge(*nnx.split(Decoder(D_MODEL, nnx.Rngs(0)))), jnp.ones((1, TOKENS, D_MODEL))
    )
    assert count[0] == count[1] == M * forward
    assert M * forward < count[2:].min()
    # Stage 3 sends M gradients to stage 2, stages 0 to 2 send M activations each.
    assert found.over("stage").sum() >= 4 * M * x[0].nbytes
    below = traffic.predict_traffic(pipe.plan, *pipe._operands(x, x, None))
    np.testing.assert_array_equal(below.over("stage"), found.over("stage"))
    np.testing.assert_array_equal(below.read, [M, M, M, M])


def test_bytes_are_predicted_and_said():
    x, t = batch()
    pipe = make(nnx.LoRAParam, S=2)
    params, adapters = (nnx.state(pipe, wrt) for wrt in (nnx.Param, nnx.LoRAParam))
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, adapters)]
    said = f"trained: {sizes[1]:,} of {sizes[0]:,} parameters"
    assert said in pipe.describe().splitlines()
    assert f"sums of gradients {4 * sizes[1] // 2:,};" in pipe.describe()
    found = pipe.describe(x, t).splitlines()
    assert said in found
    assert f"  results {4 * sizes[1] // 2 + 4:,}: gradients and loss" in found
    assert "trained:" not in make(nnx.Param).describe()
    above = make(WRT["upper stages"]).describe(x, t)
    assert "parameters; nothing in stages 0, 1\n" in above


# --- updates ---


@pytest.mark.parametrize(
    "lengths",
    [pytest.param(n, marks=pytest.mark.slow) for n in ((1,) * K, UNLIKE)],
    ids=["alike", "unlike"],
)
def test_an_optimizer_leaves_frozen_stages_as_they_are(lengths):
    wrt, tx = WRT["upper stages"], optax.sgd(0.1, momentum=0.9)
    tx = optax.chain(optax.add_decayed_weights(0.5), tx)
    x, t = batch()
    pipe, plain = make(wrt, lengths=lengths), Plain(lengths)
    optimizer, own = make_optimizer(pipe, tx), nnx.Optimizer(plain, tx, wrt=wrt)

    @nnx.jit
    def step(pipe, optimizer, plain, own):
        optimizer.update(pipe, pipe.value_and_grad(x, t)[1])
        own.update(plain, nnx.grad(loss_of, argnums=nnx.DiffState(0, wrt))(plain))

    before = [nnx.state(nnx.clone(stage)) for stage in pipe.stages()]
    for _ in range(2):
        step(pipe, optimizer, plain, own)
    for k, (stage, wanted) in enumerate(zip(pipe.stages(), plain.stages, strict=True)):
        if k < 2:
            jax.tree.map(np.testing.assert_array_equal, nnx.state(stage), before[k])
        assert models.distance(nnx.state(stage), nnx.state(wanted)) <= 1e-5


def test_an_optimizer_has_slots_for_what_is_trained():
    pipe = make(nnx.LoRAParam)
    optimizer = make_optimizer(pipe, optax.adam(0.1))
    adapters = len(jax.tree.leaves(nnx.state(pipe, nnx.LoRAParam)))
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
    assert len(moments) == 2 * adapters
    text = pipe.describe(*batch(), optimizer=optimizer)
    assert "bytes per rank of gradients and update, predicted" in text
    other = nnx.Optimizer(pipe, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"updates 12 parameters.*pipeline trains 4.*make_opt"):
        pipe.describe(*batch(), optimizer=other)


def test_a_warning_tells_who_shares_arrays_with_whom():
    model = Plain()
    with pytest.warns(UserWarning, match=r"that of stages 0, 1, in 8 such as chunks/0/layers/0/0"):
        Pipeline(list(model.stages), M, mesh=make_mesh(stage=4), wrt=WRT["upper stages"])


# --- foreign adapters, and refusals ---


class Quantized(nnx.Module):
    """A layer of integers with an adapter beside it."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.round(20 * rngs.params.normal((WIDTH, WIDTH))).astype(jnp.int8))
        self.adapter = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)
        self.adapter.lora_b.set_value(rngs.params.normal((2, WIDTH)))
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        base = x @ (self.table[...].astype(x.dtype) / 20)
        return models.unit(x + jnp.tanh(self.dropout(base) + self.adapter(x)))


@pytest.mark.slow
def test_adapters_beside_integers():
    stages = models.build(Quantized, 2)
    x = models.rows(ROWS)
    pipe = Pipeline(
        models.build(Quantized, 2),
        M,
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
        schedule="zb_h1",
        wrt=nnx.LoRAParam,
    )
    _, grads = pipe.value_and_grad(x, x)

    def loss(stages):
        return models.squares(models.compose(stages, None, None, x), x)

    wanted = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(nnx.List(stages))
    for k, found in enumerate(models.by_stage(pipe, grads)):
        assert models.distance(found, wanted[k]) <= 1e-5


@pytest.mark.parametrize(
    ("wrt", "said"),
    [
        (3, r"wrt=3 is no filter; give a type such as nnx.Param"),
        (nnx.BatchStat, r"finds no parameter, .* paths of .*\('stages', 0, 'adapter', 'lora_a'\)"),
        (..., r"finds \('stages', 0, 'table'\), a Param int8\[8,8\], which holds no floats"),
        (
            nnx.filterlib.PathContains("count"),
            r"'count'\), a RngCount .*which is no nnx.Param.*All",
        ),
    ],
    ids=str,
)
def test_filters_that_find_what_has_no_gradient(wrt, said):
    with pytest.raises(ValueError, match=said):
        Pipeline(models.build(Quantized, 2), M, mesh=make_mesh(stage=2), wrt=wrt)


def test_what_is_frozen_has_no_gradient_for_a_trainer_either():
    pipe = make(nnx.LoRAParam, S=2)
    x, t = batch()
    with pytest.raises(ValueError, match=r"chunks.0.layers.0.0.bias, which its wrt= leaves froz"):
        nnx.grad(lambda m: m.loss(x, t))(pipe)


# --- other axes ---

PARTS = {
    "embed": nnx.filterlib.PathContains("embed"),
    "head": nnx.filterlib.PathContains("head"),
    "stages": nnx.filterlib.PathContains("stages"),
    "stage 1": functools.partial(param, wanted=lambda p: p[:2] == ("stages", 1)),
}


def assert_part_of(whole, wrt, *given):
    """A call that asks for a part gets that part of what a call without a filter gets."""
    loss, wanted = whole.value_and_grad(*given)
    part_loss, grads = whole.value_and_grad(*given, wrt=wrt)
    assert models.distance(part_loss, loss) <= 1e-6
    wanted = dict(nnx.to_flat_state(wanted))
    found = nnx.to_flat_state(grads)
    assert 0 < len(found) < len(wanted)
    for path, variable in found:
        want = np.array(wanted[path].get_value())
        if wrt is PARTS["stage 1"]:
            want[[held[path[1]] != 1 for held in whole.schedule.stages_of]] = 0
        assert models.distance(variable.get_value(), want) <= 1e-5, path


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("wrt", PARTS)
def test_with_a_vocabulary_on_all_ranks(wrt):
    options = {"vocabulary": "stage", "schedule": "zb_h1"}
    pipe = Pipeline(
        models.build(models.Hostile, 2),
        4,
        mesh=make_mesh(stage=2),
        loss_fn=CrossEntropy(),
        **options,
        **test_vocabulary.ends(tied=False),
    )
    assert_part_of(pipe, PARTS[wrt], *test_vocabulary.batch())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [tensor_stages.Parallel, tensor_stages.Sequence])
@pytest.mark.parametrize(
    "options", [{"family": "zb_h1"}, {"family": "zb_v", "remat": None, "V": 2}], ids=str
)
def test_with_weights_over_a_tensor_axis(kind, options):
    pipe = test_tensor_axis.pipeline(kind, **options)
    assert_part_of(pipe, PARTS["stage 1"], *test_tensor_axis.batch()[:2])
