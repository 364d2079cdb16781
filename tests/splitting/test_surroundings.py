"""A cut keeps the context that a model sets around its blocks (issue 38, B12)."""

from __future__ import annotations

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pipeline import split
from pipeline.splitting.tracing import Recipe
from tests.splitting.parity import check_parts, squares

WIDTH, ROWS = 8, 8
SCALE = contextvars.ContextVar("scale", default=1.0)
X, T = jax.random.normal(jax.random.key(0), (2, ROWS, WIDTH))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.0, rngs=rngs)
        self.gain = 1.0

    def __call__(self, x):
        return x + SCALE.get() * self.gain * jnp.tanh(self.drop(self.up(x)))


class Model(nnx.Module):
    """Calls its blocks; ``around`` enters what it sets, ``each`` what it sets for one of them."""

    def __init__(self, around=None, each=None):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])
        self.around, self.each = around, each

    def __call__(self, x):
        with self.around(x) if self.around else contextlib.nullcontext():
            for number, block in enumerate(self.blocks):
                with self.each(number) if self.each else contextlib.nullcontext():
                    x = block(x)
        return x


@contextlib.contextmanager
def scaled(value=0.1):
    token = SCALE.set(value)
    try:
        yield
    finally:
        SCALE.reset(token)


@contextlib.contextmanager
def another_rule(_):
    """A library's scope that gives linear layers another rule, as quantization does."""
    own = nnx.Linear.__call__
    nnx.Linear.__call__ = lambda self, x: own(self, x).astype(jnp.bfloat16).astype(x.dtype)
    try:
        yield
    finally:
        nnx.Linear.__call__ = own


AROUND = {
    "a context variable": {"around": lambda _: scaled()},
    "a context of some blocks": {"each": lambda n: scaled(1.0 if n < 3 else 0.5)},
    "an array of the model's": {"around": lambda x: scaled(jnp.mean(x))},
    "a precision": {"around": lambda _: jax.default_matmul_precision("float32")},
    "a scope of a library": {"around": another_rule},
}


@pytest.mark.few
@pytest.mark.parametrize("name", AROUND)
def test_what_is_set_around_blocks(name):
    model = Model(**AROUND[name])
    parts = split(model, 4, X)
    number = 3 if "some" in name else 0
    assert parts.why == (
        f"blocks.{number} computes something else by itself than within the model's call, which "
        f"sets something around it (a context, a precision, an adapter)"
    )
    # A mean over rows is that of a microbatch.
    microbatches = 1 if "array" in name else 2
    check_parts(model, parts, squares, T, X, ranks=4, microbatches=microbatches)


def wrap_with_adapters(model, rank=2):
    """Adapters of a library that wraps a model whole: in its call, linear layers add theirs.

    As `qwix.apply_lora_to_model` does: it gives the model a class of its own, whose call changes
    what layers within it do, and puts new parameters beside their own.
    """
    rngs = nnx.Rngs(7)
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, nnx.Linear):
            module.lora_a = nnx.LoRAParam(0.3 * jax.random.normal(rngs.params(), (WIDTH, rank)))
            module.lora_b = nnx.LoRAParam(0.3 * jax.random.normal(rngs.params(), (rank, WIDTH)))

    @contextlib.contextmanager
    def adding():
        own = nnx.Linear.__call__
        nnx.Linear.__call__ = lambda m, x: own(m, x) + x @ m.lora_a[...] @ m.lora_b[...]
        try:
            yield
        finally:
            nnx.Linear.__call__ = own

    kind = type(model)

    class Wrapped(kind):
        def __call__(self, *args, **kwargs):
            with adding():
                return super().__call__(*args, **kwargs)

    model.__class__ = Wrapped
    return model


@pytest.mark.slow
def test_adapters_that_wrap_the_whole_model():
    model = wrap_with_adapters(Model())
    parts = split(model, 4, X)
    assert not parts.unused
    assert "an adapter" in parts.why
    pipe = check_parts(model, parts, squares, T, X, ranks=4)
    _, grads = pipe.value_and_grad(X, T, wrt=nnx.LoRAParam)
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def with_cotangent_scaled(scale):
    """An identity whose rule closes over a number."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, ct: (ct * scale,))
    return same


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled_back(x, scale):
    return x


scaled_back.defvjp(lambda x, scale: (x, None), lambda scale, _, ct: (ct * scale,))


def in_a_scan(rule, x):
    return jax.lax.scan(lambda x, _: (jax.jit(rule)(x) * 0.9, None), x, length=2)[0]


def jumps(scale):
    """A step whose tangent is of another size."""

    @jax.custom_jvp
    def step(x):
        return jnp.floor(x)

    step.defjvp(lambda x, dx: (step(*x), dx[0] * scale))
    return step


RULES = {
    "closes over it": (with_cotangent_scaled, lambda rule, x: rule(x)),
    "is in a loop": (with_cotangent_scaled, in_a_scan),
    "is given it": (lambda scale: lambda x: scaled_back(x, scale), lambda rule, x: rule(x)),
    "of a derivative forward": (jumps, lambda rule, x: rule(x)),
}


class Ruled(nnx.Module):
    def __init__(self, make, apply):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.make, self.apply = make, apply

    def __call__(self, x):
        return x + self.apply(self.make(SCALE.get()), self.up(x))


@pytest.mark.few
@pytest.mark.parametrize("name", RULES)
def test_rules_of_derivatives_that_read_what_is_set_around_blocks(name):
    """Values are equal then, gradients are not (issue 38)."""
    model = Model(around=lambda _: scaled())
    model.blocks = nnx.List([Ruled(*RULES[name]) for _ in range(4)])
    parts = split(model, 4, X)
    assert "computes something else by itself" in parts.why
    check_parts(model, parts, squares, T, X, ranks=4)


class Tied(nnx.Module):
    """Blocks that are given one value twice, and have rules of their own in their equations."""

    def __init__(self):
        rngs = nnx.Rngs(0)

        class Own(nnx.Module):
            def __init__(own):  # noqa: N805
                own.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
                own.table = jnp.linspace(0, 1, WIDTH)[None]

            def __call__(own, x, y, flag):  # noqa: N805
                inner = jax.jit(lambda x: jax.nn.relu(x) * jnp.arange(1.0 * WIDTH)[None])
                return (jax.nn.gelu(own.up(x)) + inner(x)) * own.table + (y if flag else 0)

        self.blocks = nnx.List([Own() for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, x, flag=True)
        return x


@pytest.mark.parametrize("model", [Model, Tied])
def test_blocks_that_compute_the_same_by_themselves_are_called(model):
    parts = split(model(), 4, X)
    assert not parts.why


class Scored(nnx.Module):
    """A block that adds a weakly typed value to what it multiplies."""

    def __init__(self, rngs, dtype):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs, dtype=dtype)

    def __call__(self, x, mask):
        scores = nnx.softmax(x @ x.T + (x.sum() if mask is None else mask))
        return x + self.up(scores @ x)


class Weak(nnx.Module):
    """Blocks on a weakly typed mask, number or activation (issue 52, U-split-weak-mask)."""

    def __init__(self, what, dtype=None):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Scored(rngs, dtype) for _ in range(2)])
        self.what, self.dtype = what, dtype

    def __call__(self, x):
        mask = None
        if self.what == "mask":
            mask = jnp.where(jnp.tril(jnp.ones((ROWS // 2, ROWS // 2), bool)), 0.0, -1e4)
        elif self.what == "number":
            mask = jnp.full((), 0.3)
        elif self.what == "sent":
            mask = jnp.where(x[:, :1] > 0, 0.3, -1.0)
        else:
            x = jnp.where(x > 0, 1.0, 0.5)
        x = x if self.dtype is None else x.astype(self.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return x.astype(jnp.float32)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("what", ["mask", "number", "activation"])
def test_blocks_on_weakly_typed_values_are_called(what, dtype):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert not split(Weak(what, dtype), 2, X[: ROWS // 2]).why


def test_a_weak_value_that_is_sent_is_named_where_its_dtype_matters():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert not split(Weak("sent"), 2, X[: ROWS // 2]).why
        why = split(Weak("sent", "bfloat16"), 2, X[: ROWS // 2]).why
    assert why == (
        "blocks.0 is given a weakly typed value, and computes in other dtypes on what a stage "
        "receives, which has the same dtype, not weak: give the value a dtype where it is made "
        "(dtype=, astype)"
    )


def test_a_block_is_traced_without_the_others(monkeypatch):
    """Merging the whole model for each block made split quadratic in blocks (issue 38)."""
    sizes, trace = [], Recipe.trace

    def counted(recipe, *args):
        sizes.append(len(recipe.state))
        return trace(recipe, *args)

    monkeypatch.setattr(Recipe, "trace", counted)
    model = Model()
    split(model, 4, X)
    of_block = len(nnx.to_flat_state(nnx.state(model.blocks[0])))
    assert sizes[1:] == [of_block] * 4
