"""Losses that are modules, and parameters that nobody would train, which are named."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer
from pipeline.lint.outside import warn_of_parameters_read_from_outside
from pipeline.vocabulary import VocabularyEmbedding
from tests.support import models
from tests.support.close import assert_close
from tests.support.models import CLASSES, WIDTH, Block, Readout, Words

ROWS, M = 8, 2
X, T = models.words(ROWS), models.words(ROWS, most=CLASSES)
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


# --- a loss that is a module ---


class Tempered(nnx.Module):
    """Cross entropy at a learned temperature; with a table, of products with its first rows."""

    def __init__(self, table=None):
        self.scale = nnx.Param(jnp.full((), 0.7))
        self.table = table

    def __call__(self, outputs, labels):
        if self.table is not None:
            outputs = outputs @ self.table[...][:CLASSES].T
        return models.cross_entropy(outputs * self.scale[...], labels)


def plain_loss(model):
    x = model.embed(X)
    for stage in model.stages:
        x = stage(x)
    return model.loss_fn(x if model.head is None else model.head(x), T)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "K", "options"),
    [
        (True, 2, {"schedule": "zb_h1"}),
        pytest.param(False, 4, {"schedule": "zb_v"}, marks=EXHAUSTIVE),
        pytest.param(True, 2, {"data_parallel": "zero1"}, marks=EXHAUSTIVE),
        pytest.param(False, 2, {"remat": None, "S": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_loss_that_is_a_module_is_trained(tied, K, options):
    options = dict(options)
    stages, embed = models.build(Block, K), Words(nnx.Rngs(1))
    head = None if tied else Readout(nnx.Rngs(2))
    loss_fn = Tempered(embed.table if tied else None)
    model = nnx.Dict(stages=nnx.List(stages), embed=embed, head=head, loss_fn=loss_fn)
    wanted_loss, wanted = nnx.value_and_grad(plain_loss)(model)
    mesh = make_mesh(stage=options.pop("S", 2), data=2)
    ends = {"embed": embed, "head": head, "loss_fn": loss_fn}
    pipe = Pipeline(stages, M, mesh=mesh, **ends, **options)
    loss, grads = pipe.value_and_grad(X, T)
    stages_wanted = [wanted["stages"][k] for k in range(K)]
    ends_wanted = {name: wanted[name] for name in ends if name in wanted}
    models.assert_matches(pipe, (loss, grads), (wanted_loss, stages_wanted, ends_wanted))
    again = nnx.value_and_grad(lambda m: m.loss(X, T))(pipe)
    models.assert_matches(pipe, again, (wanted_loss, stages_wanted, ends_wanted))
    make_optimizer(pipe, optax.sgd(0.1)).update(pipe, grads)
    step = 0.1 * wanted["loss_fn"]["scale"][...]
    assert_close(pipe.ends.loss_fn.scale[...], 0.7 - step)
    assert float(loss_fn.scale[...]) == np.float32(0.7)  # what was given is not changed


def test_a_loss_that_counts_is_refused():
    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, outputs, targets):
            self.count.set_value(self.count[...] + 1)
            return jnp.mean(outputs - targets)

    pipe = Pipeline(models.build(Block, 2), M, mesh=make_mesh(stage=2), loss_fn=Counting())
    with pytest.raises(ValueError, match="embed, head or loss_fn writes to its Variable"):
        pipe.value_and_grad(models.rows(ROWS), models.rows(ROWS))


def test_a_loss_that_shares_a_table_with_all_ranks_is_refused():
    embed = VocabularyEmbedding(12, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="vocabulary") as caught:
        Pipeline(
            models.build(Block, 2),
            M,
            mesh=make_mesh(stage=2),
            embed=embed,
            loss_fn=Tempered(embed.table),
            vocabulary="stage",
        )
    assert str(caught.value) == (
        "vocabulary='stage': loss_fn of type Tempered uses the table that all ranks share, of "
        "which none has all rows; give it a table of its own, or vocabulary='ends'"
    )


# --- read, and not held ---

GLOBAL = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
LOCAL = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))


def of_global(y, t):
    return helper(y)


def helper(y):
    return jax.vmap(lambda row: GLOBAL(row))(y)  # noqa: PLW0108  the name is read in a lambda


class Whole(nnx.Module):
    """A model whose methods are taken for embed and head."""

    def __init__(self):
        self.table = nnx.Embed(4, 2, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.gain = nnx.Param(jnp.ones(()))

    def embed(self, words):
        return self.table(words)

    def decode(self, x):
        return self.table.attend(self.last(x))

    def last(self, x):
        return self.out(x) * self.own_gain

    @property
    def own_gain(self):
        return self.gain[...]


class Trainer:
    """Not a module; holds models, and its loss reads one parameter or none."""

    def __init__(self):
        self.model, self.stages, self.rate = WHOLE, [LOCAL], 0.1

    def loss(self, y, t):
        return jnp.mean((y - t) ** 2) * self.rate * self.model.gain.shape[0]

    def weighed(self, y, t):
        return jnp.mean(y) * self.model.gain[...]

    @staticmethod
    def fixed(y, t):
        return GLOBAL(y)

    def __call__(self, y, t):
        return self.fixed(y, t)


class Wrapped(nnx.Module):
    """Holds a function, and reads a global."""

    def __init__(self, function):
        self.function, self.own = function, nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return self.function(x) * self.own[...] @ GLOBAL.kernel[...]


WHOLE = Whole()


def closure():
    local = LOCAL

    def f(y, t):
        return jnp.mean(local(y))

    return f


def shadowed(y, t):
    GLOBAL = y
    return GLOBAL + t


GAIN = "self.last: self.out.kernel, self.last: self.own_gain: self.gain"
READS = {
    "global": (of_global, "helper: GLOBAL.kernel"),
    "closure": (closure(), "local.kernel"),
    "jit": (jax.jit(closure()), "local.kernel"),
    "checkpoint": (jax.checkpoint(closure()), "local.kernel"),
    "partial": (functools.partial(lambda y, t, m: m(y), m=LOCAL), "loss_fn['m'].kernel"),
    "default": (lambda y, t, m=LOCAL: m(y), "m.kernel"),
    "method": (WHOLE.embed, "self.table.embedding"),
    "two": (WHOLE.decode, "self.table.embedding, " + GAIN),
    "trainer": (Trainer().weighed, "self.model.gain"),
    "called": (Trainer(), "self.fixed: GLOBAL.kernel"),
    "module": (Wrapped(closure()), "self.function: local.kernel, GLOBAL.kernel"),
}


@pytest.mark.parametrize("name", READS)
def test_parameters_that_are_read_and_not_held_are_named(name):
    function, paths = READS[name]
    with pytest.warns(UserWarning, match="they are not trained") as caught:
        warn_of_parameters_read_from_outside([], loss_fn=function)
    text = (
        f"loss_fn reads parameters that it does not hold, so they are not trained: {paths}; give "
        f"loss_fn as an nnx.Module that holds them as attributes (where a method or a function "
        f"calls a module: that module), or, if they are to stay as they are, let it read arrays "
        f"(parameter[...])"
    )
    assert [str(w.message) for w in caught] == [text]


@pytest.mark.parametrize(
    "function",
    [models.squares, Trainer().loss, shadowed, WHOLE, optax.l2_loss, jnp.tanh, None],
    ids=["plain", "trainer", "shadowed", "module", "library", "jitted", "none"],
)
def test_nobody_is_warned_of_what_holds_or_reads_none(function):
    warn_of_parameters_read_from_outside([WHOLE, LOCAL], head=function)


def test_a_dictionary_that_grows_while_it_is_searched():
    """Objects that load something when they are looked at fill the names of a module (issue 56)."""

    class Late:
        @property
        def __class__(self):
            names["more"] = 1
            return Late

    names = {"first": Late(), "second": LOCAL}
    with pytest.warns(UserWarning, match=r"names\['second'\]\.kernel"):
        warn_of_parameters_read_from_outside([], loss_fn=lambda y, t: names["second"](y) - t)
    assert names["more"]


def test_a_pipeline_warns_at_the_line_that_makes_it():
    options = {"mesh": make_mesh(stage=2), "embed": WHOLE.embed}
    with pytest.warns(UserWarning, match=r"^embed reads .*: self.table.embedding; ") as caught:
        Pipeline(models.build(Block, 2), M, **options)
    assert [w.filename for w in caught] == [__file__]


# --- held, and not read ---


class Adapted(Block):
    """A block that was given adapters; only those of some are used by the block itself."""

    def __init__(self, rngs: nnx.Rngs, *, reads: bool = False):
        super().__init__(rngs)
        self.adapter = nnx.Dict(a=nnx.LoRAParam(jnp.ones((WIDTH, 2))), b=nnx.LoRAParam(jnp.ones(2)))
        self.reads = reads

    def __call__(self, x):
        @jax.jit
        def after(x, a):  # which does nothing with it
            return x

        y = after(super().__call__(x), self.adapter.a[...])
        return y + jnp.sum(self.adapter.a[...]) * jnp.sum(self.adapter.b[...]) if self.reads else y


def adapted(reads, **options):
    stages = [Adapted(nnx.Rngs(k), reads=yes) for k, yes in enumerate(reads)]
    options = {"loss_fn": models.squares} | options
    pipe = Pipeline(stages, M, mesh=make_mesh(stage=2), **options)
    return lambda rows: jax.eval_shape(pipe.value_and_grad, *[models.rows(rows)] * 2)


@pytest.mark.parametrize(
    ("K", "schedule"), [(2, "1f1b"), pytest.param(4, "zb_v", marks=pytest.mark.slow)]
)
def test_parameters_that_nobody_reads_are_named_once(K, schedule):
    embed = Adapted(nnx.Rngs(9))
    take = adapted([False] * K, schedule=schedule, head=lambda x: x, embed=embed)
    with pytest.warns(UserWarning, match="they are not trained") as caught:
        take(ROWS)
    text = (
        f"parameters are read by no part of the model, so they are not trained: "
        f"stages[0].adapter.a (so in {K} stages), stages[0].adapter.b (so in {K} stages), "
        f"embed.adapter.a, embed.adapter.b; what acts only where a whole model is called "
        f"(adapters put on it before it was cut) must be put on the stages, or else leave it out"
    )
    assert [str(w.message) for w in caught] == [text]
    assert caught[0].filename == __file__
    take(2 * ROWS)


def test_what_one_stage_reads_is_no_mistake_in_another():
    adapted([False, True])(ROWS)


def test_another_plan_keeps_the_loss_with_its_weights():
    loss_fn, options = Tempered(), {"embed": Words(nnx.Rngs(1)), "head": Readout(nnx.Rngs(2))}
    pipe = Pipeline(models.build(Block, 2), M, mesh=make_mesh(stage=2), loss_fn=loss_fn, **options)
    pipe.ends.loss_fn.scale.set_value(jnp.full((), 1.5))
    assert float(pipe.replace(num_microbatches=4).ends.loss_fn.scale[...]) == 1.5
    assert not hasattr(pipe.replace(loss_fn=models.cross_entropy).ends, "loss_fn")
