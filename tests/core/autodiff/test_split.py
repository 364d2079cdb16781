"""A stage's backward taken apart: what each half computes, what crosses, what stays whole.

Letters: b rows of a microbatch, here 5; d and e widths, 7 and 13; l layers, 3.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.autodiff.residuals import Residuals, stage_pullback
from pipeline.core.autodiff.split_backward import SplitBackward
from pipeline.layers.experts import Router, combine, route, run_grouped
from pipeline.models.layers.experts import products
from tests.support import dots
from tests.support.close import assert_close
from tests.support.outcomes import told

D, E, ROWS, LAYERS = 7, 13, 5, 3
X = jax.random.normal(jax.random.key(3), (ROWS, D))
UP = jax.random.normal(jax.random.key(1), (D, E))
DOWN = jax.random.normal(jax.random.key(2), (E, D))
SQUARE = jax.random.normal(jax.random.key(9), (D, D))
LAYER = jax.random.normal(jax.random.key(4), (LAYERS, D, D))
ONES = jnp.ones((1, D))

BD, BE, LBD = "float32[5,7]", "float32[5,13]", "float32[3,5,7]"


def mlp(w, fixed, side, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def with_biases(w, fixed, side, x):
    h = jnp.square(jax.nn.relu(x @ w[0] + w[2]))
    return x + h @ w[1] + w[3]


def normalised(w, fixed, side, x):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w[0]
    return x + jnp.tanh(h @ w[1]) @ w[2]


def layers(w, fixed, side, x):
    return jax.lax.scan(lambda x, a: (x + jnp.tanh(x @ a) @ w[1], None), x, w[0])[0]


def layers_backwards(w, fixed, side, x):
    def layer(x, a):
        return x + jnp.tanh(x @ a) @ w[1], None

    return jax.lax.scan(layer, x, w[0], reverse=True, unroll=2)[0]


def layers_within_layers(w, fixed, side, x):
    def inner(x, b):
        return jnp.tanh(x @ b @ w[1]), None

    def outer(x, a):
        return jax.lax.scan(inner, x, jnp.stack([a, a + 1]))[0], None

    return jax.lax.scan(outer, x, w[0])[0]


def layers_by_index(w, fixed, side, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: x + jnp.tanh(x @ w[0][i]), x)


def delayed_layers(w, fixed, side, x):
    """Each adds to the activation before the last; a scale is carried and returned unchanged."""

    def layer(carry, a):
        x, before, scale = carry
        return (before + jnp.tanh(x @ a) * scale, x, scale), (scale, x)

    (y, before, _), (scales, xs) = jax.lax.scan(layer, (x, x, w[1]), w[0])
    return y + before * scales.sum(0) + xs.sum(0)


def normalised_layers(w, fixed, side, x):
    """Each with a scale, whose gradient is a sum over rows."""

    def layer(x, p):
        scale, a = p
        h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
        return x + jnp.tanh(h @ a), None

    return jax.lax.scan(layer, x, (w[0], w[1]))[0]


def called(w, fixed, side, x):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return layer(layer(x, w[0]), w[0])


def checkpointed(w, fixed, side, x):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))
    return layer(layer(x, w[0]), w[1])


def checkpointed_layers(w, fixed, side, x):
    layer = jax.checkpoint(
        lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) @ w), None), prevent_cse=False
    )
    return jax.lax.scan(layer, x, w[0])[0]


def checkpointed_by_policy(w, fixed, side, x):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), policy=policy)(x)


def branches(w, fixed, side, x):
    return jax.lax.cond(
        side, lambda x: jnp.tanh(x @ w[0]) @ w[1], lambda x: jnp.sin(x) @ w[1] @ w[1], x
    )


def branches_of_layers(w, fixed, side, x):
    """A layer of two kinds within a scan."""

    def layer(x, p):
        a, kind = p
        return jax.lax.cond(kind, lambda x: jnp.tanh(x @ a), lambda x: x + jnp.sin(x @ a @ a), x)

    kinds = jnp.array([True, False, True])
    return jax.lax.scan(lambda x, p: (layer(x, p), None), x, (w[0], kinds))[0]


def looping(w, fixed, side, x):
    """A while that is not differentiated."""

    def halve(carry):
        return carry[0] + 1, carry[1] * 0.5 + 1

    start = 0, jax.lax.stop_gradient(x)
    return x @ w[0] * jax.lax.while_loop(lambda carry: carry[0] < 3, halve, start)[1]


@jax.custom_vjp
def dense(x, w):
    return jnp.tanh(x @ w)


def dense_forward(x, w):
    y = dense(x, w)
    return y, (x, w, y)


def dense_backward(kept, ct):
    x, w, y = kept
    d = ct * (1 - y * y)
    return d @ w.T, x.T @ d


dense.defvjp(dense_forward, dense_backward)


def own_rules(w, fixed, side, x):
    return dense(dense(x, w[0]), w[1])


def gelu(w, fixed, side, x):
    """Functions with rules of their own, of data and of weights."""
    return jax.nn.gelu(x @ w[0]) @ jax.nn.silu(w[1])


def dropout(w, fixed, side, x):
    kept = jax.random.bernoulli(side, 0.5, (ROWS, E))
    return x + jnp.where(kept, jnp.tanh(x @ w[0]), 0.0) @ w[1]


def derived_weights(w, fixed, side, x):
    """A normalised weight, masked by state beside the weights."""
    v = jnp.where(fixed, w[0] / jnp.linalg.norm(w[0]), 0.0)
    return x + jnp.tanh(x @ v) @ w[1]


def low_precision(w, fixed, side, x):
    return x + (jnp.tanh(x.astype(jnp.bfloat16) @ w[0]) @ w[1]).astype(jnp.float32)


def tree(w, fixed, side, x):
    change = jnp.tanh(x["row"] @ w[0] + w[1][x["kind"]]) * x["gate"]
    return {**x, "row": x["row"] + change}


def tied(w, fixed, side, x):
    return jnp.tanh(x @ w[0]) @ w[0].T


def sliced(w, fixed, side, x):
    return jnp.tanh(x @ w[0][0]) @ w[0][1]


def unweighted(w, fixed, side, x):
    return jnp.tanh(x)


def deaf(w, fixed, side, x):
    """Its output does not depend on its input's value."""
    return 0.0 * x + jnp.tanh(w[0][:ROWS])


def scratch(w, fixed, side, x):
    """Writes to a buffer of its own on the way."""

    def layer(x, a):
        return jnp.tanh(x @ a), None

    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = jax.lax.scan(layer, x, w[0])[0]
    return x + ref[...]


def grouped(w, fixed, side, x):
    """Rows in groups, each with a matrix of its own."""
    return x + jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x, w[0], side)), w[1], side)


def experts(w, fixed, side, x):
    """A router, and products of what it chose, by the operation that TPUs have a kernel for."""
    with mock.patch.object(products, "platform", return_value="tpu"):
        return experts_in_blocks(w, fixed, side, x)


def experts_in_blocks(w, fixed, side, x):
    """A router, and products of what it chose, in blocks of rows."""
    routing = route(x @ w[2], Router(2, 1))

    def run(rows, product, pick):
        return product(jnp.tanh(product(rows, w[0])), w[1])

    y = run_grouped(x, routing.chosen, run, 2, all_here=True)
    return x + combine(y, routing.weights)


class Case(NamedTuple):
    """A stage, and what its backward is known to be.

    Attributes:
      dots: of I when it starts from residuals, and of W.
      again: how many more I does when it starts from the stage's input.
      crossing: how many values of each type.
      simplified: XLA simplifies whole and half differently, so they agree to rounding only.
    """

    f: Callable[..., Any]
    weights: list[Any]
    dots: tuple[int, int]
    again: int
    crossing: dict[str, int]
    fixed: Any = ()
    side: Any = ()
    x: Any = X
    simplified: bool = False


HALF = [UP.astype(jnp.bfloat16), DOWN.astype(jnp.bfloat16)]
ROWS_TREE = {"row": X, "kind": jnp.array([0, 1, 2, 1, 0]), "gate": X + 1}
PAIR = {BD: 2, BE: 2}  # input and output gradient of each product
UPS, DOWNS = jnp.stack([UP, 2 * UP]), jnp.stack([DOWN, DOWN + 1])
BLOCKS = {BD: 1, "float32[2,16,13]": 2, "float32[32,7]": 2, "float32[5,2]": 1, "int32[2]": 1}
EXPERTS = PAIR | {BD: 3, "float32[5,2]": 1, "int32[2]": 1}
CASES = [
    Case(mlp, [UP, DOWN], (2, 2), 1, PAIR),
    Case(with_biases, [UP, DOWN, jnp.ones((1, E)), ONES], (2, 2), 1, PAIR),
    # A scale's gradient is summed over the rows before it crosses.
    Case(normalised, [ONES, UP, DOWN], (2, 2), 1, PAIR | {"a scale": 1}),
    Case(layers, [LAYER, SQUARE], (6, 6), 6, {LBD: 4}),
    Case(layers_backwards, [LAYER, SQUARE], (6, 6), 6, {LBD: 4}),
    Case(layers_within_layers, [LAYER, SQUARE], (12, 12), 12, {"float32[3,2,5,7]": 4}),
    Case(layers_by_index, [LAYER], (3, 3), 3, {LBD: 2, "int32[3]": 1}),
    Case(
        normalised_layers,
        [jnp.ones((LAYERS, 1, D)), LAYER],
        (3, 3),
        3,
        {LBD: 2, "a scale": 1},
    ),
    Case(called, [SQUARE], (2, 2), 2, {BD: 4}),
    Case(checkpointed, [SQUARE, SQUARE], (8, 4), 2, {BD: 8}),
    Case(checkpointed_layers, [LAYER], (12, 6), 6, {LBD: 4}),
    Case(checkpointed_by_policy, [SQUARE, SQUARE], (2, 2), 2, {BD: 4}),
    Case(branches, [SQUARE, SQUARE], (2, 2), 1, {BD: 5}, side=jnp.array(True)),
    Case(branches, [SQUARE, SQUARE], (2, 2), 1, {BD: 5}, side=jnp.array(False)),
    Case(branches_of_layers, [LAYER], (6, 6), 6, {LBD: 4, "int32[3]": 1}),
    Case(looping, [SQUARE], (1, 1), 0, {BD: 2}),
    Case(own_rules, [SQUARE, SQUARE], (2, 2), 2, {BD: 4}),
    Case(gelu, [UP, DOWN], (2, 2), 1, PAIR),
    # The mask is drawn again.
    Case(dropout, [UP, DOWN], (2, 2), 1, PAIR, side=jax.random.key(5)),
    Case(derived_weights, [UP, DOWN], (2, 2), 1, PAIR, fixed=UP > 0, simplified=True),
    Case(low_precision, HALF, (2, 2), 1, {"bfloat16[5,7]": 2, "bfloat16[5,13]": 2}),
    Case(tree, [SQUARE, SQUARE[:3]], (1, 1), 1, {BD: 2, "indices": 1}, x=ROWS_TREE),
    Case(tied, [UP], (2, 2), 1, PAIR),
    Case(sliced, [LAYER], (2, 2), 1, {BD: 4}),
    Case(mlp, [UP, DOWN, SQUARE], (2, 2), 1, PAIR),  # the last is not used
    Case(grouped, [UPS, DOWNS], (2, 2), 1, PAIR, side=jnp.array([3, 2]), simplified=True),
    # The router has a product, and the sum over a token's experts is one with two in its backward.
    Case(experts, [UPS, DOWNS, SQUARE[:, :2]], (5, 3), 3, EXPERTS, simplified=True),
    # A product is a loop over two blocks, of 16 rows each.
    Case(experts_in_blocks, [UPS, DOWNS, SQUARE[:, :2]], (7, 5), 5, BLOCKS, simplified=True),
    Case(unweighted, [], (0, 0), 0, {}),
    Case(deaf, [SQUARE], (0, 0), 0, {BD: 1}),
]
SAME_SHAPE = {"float32[7]": "a scale", "float32[1,7]": "a scale", "float32[3,7]": "a scale"}
SAME_SHAPE |= {"float32[3,1,7]": "a scale", "int32[5]": "indices", "int32[5,1]": "indices"}


def starts(case: Case, keep: str) -> tuple[Any, Any]:
    """The first operations of a backward, and the values that the forward left for it."""
    if keep == "input":
        return lambda *args: stage_pullback(told(case.f), *args), case.x
    residuals = Residuals(told(case.f), case.weights, case.fixed, case.side, case.x)
    _, stash = residuals.forward(case.weights, case.fixed, case.side, case.x)
    return lambda *args: (None, residuals.backward(*args)), stash


def cotangents(case: Case) -> list[Any]:
    y = jax.tree.leaves(case.f(case.weights, case.fixed, case.side, case.x))
    floats = [leaf for leaf in y if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return [jnp.cos(jnp.arange(float(a.size))).reshape(a.shape).astype(a.dtype) for a in floats]


class Functions(NamedTuple):
    """The whole backward and its halves, of arrays; gradients are added to ``refs``' values."""

    whole: Callable[..., Any]
    first: Callable[..., Any]
    second: Callable[..., Any]


def functions(linearize: Any, split: SplitBackward) -> Functions:
    def whole(grads, weights, fixed, side, stash, dy):
        refs = list(map(jax.new_ref, grads))
        _, pullback = linearize(weights, fixed, side, stash)
        dx = pullback(dy, refs, want_x=True)
        return dx, [ref[...] for ref in refs]

    def first(grads, weights, fixed, side, stash, dy):
        refs = list(map(jax.new_ref, grads))
        return *split.input_half(weights, fixed, side, stash, dy, refs), [r[...] for r in refs]

    def second(grads, weights, fixed, side, crossing):
        refs = list(map(jax.new_ref, grads))
        split.weight_half(weights, fixed, side, crossing, refs)
        return [r[...] for r in refs]

    return Functions(whole, first, second)


def assert_same(found: Any, wanted: Any, *, simplified: bool = False) -> None:
    """To the bit, where XLA has not fused or simplified differently on either side."""
    exact = "xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"] and not simplified
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            assert_close(a, b, tolerance=2e-6)


FROM_INPUT = (mlp, experts, normalised, normalised_layers, checkpointed, branches_of_layers, tree)


def marks_of(f, keep="residuals"):
    recomputes = f.__name__.startswith("checkpointed")
    return [
        *([pytest.mark.slow] if keep == "input" and f not in FROM_INPUT else []),
        *([pytest.mark.derivatives] if recomputes else []),
    ]


BOTH = [
    pytest.param(case, keep, id=f"{n}-{case.f.__name__}-{keep}", marks=marks_of(case.f, keep))
    for n, case in enumerate(CASES)
    for keep in ("residuals", "input")
]


@pytest.mark.few
@pytest.mark.parametrize(("case", "keep"), BOTH)
def test_the_halves_are_the_whole(case, keep):
    """Bit for bit, product by product, and no more crosses than must."""
    linearize, stash = starts(case, keep)
    dy = cotangents(case)
    arguments = case.weights, case.fixed, case.side, stash, dy
    split = SplitBackward(linearize, *arguments)
    whole, first, second = functions(linearize, split)
    grads = [jnp.ones_like(w) for w in as_summed(case.weights)]
    dx, want = jax.jit(whole)(grads, *arguments)
    found, crossing, untouched = jax.jit(first)(grads, *arguments)
    assert_same(untouched, grads)
    assert_same(found, dx, simplified=case.simplified)
    rest = grads, case.weights, case.fixed, case.side, crossing
    assert_same(jax.jit(second)(*rest), want, simplified=case.simplified)
    assert split.whole == ()
    assert [(c.shape, c.dtype) for c in crossing] == [(c.shape, c.dtype) for c in split.crossing]
    types = Counter(f"{c.dtype}[{','.join(map(str, c.shape))}]" for c in split.crossing)
    assert Counter({SAME_SHAPE.get(t, t): n for t, n in types.items()}) == case.crossing
    count = dots.in_jaxpr(first, grads, *arguments), dots.in_jaxpr(second, *rest)
    more = case.again if keep == "input" else 0
    assert count == (case.dots[0] + more, case.dots[1])
    assert sum(count) == dots.in_jaxpr(whole, grads, *arguments)


@pytest.mark.parametrize("keep", ["residuals", "input"])
def test_a_loop_that_returns_values_that_no_step_makes(keep):
    case = Case(delayed_layers, [LAYER, ONES], (3, 3), 3, {LBD: 2, "a scale": 1})
    test_the_halves_are_the_whole(case, keep)


@pytest.mark.few
@pytest.mark.parametrize(
    "f",
    [
        pytest.param(f, marks=marks_of(f))
        for f in (layers, with_biases, checkpointed_layers, branches, sliced)
    ],
)
def test_gradients_by_value(f):
    """A loop's second half then carries the sum for what all its trips share."""
    case = next(case for case in CASES if case.f is f)
    in_place, stash = starts(case, "residuals")

    def linearize(*given):
        outcome, pullback = in_place(*given)
        return outcome, dataclasses.replace(pullback, by_value=(True,) * len(pullback.by_value))

    arguments = case.weights, case.fixed, case.side, stash, cotangents(case)
    split = SplitBackward(linearize, *arguments)
    whole, first, second = functions(linearize, split)
    grads = [jnp.zeros_like(w) for w in as_summed(case.weights)]
    dx, dw = jax.jit(whole)(grads, *arguments)
    found, crossing, _ = jax.jit(first)(grads, *arguments)
    assert_same(found, dx)
    rest = grads, case.weights, case.fixed, case.side, crossing
    assert_same(jax.jit(second)(*rest), dw)
    count = dots.in_jaxpr(first, grads, *arguments), dots.in_jaxpr(second, *rest)
    assert count == case.dots


@pytest.mark.parametrize("keep", ["residuals", "input"])
@pytest.mark.parametrize("f", [mlp, normalised, checkpointed, gelu, dropout])
def test_the_compiled_halves_hold_no_product_twice(f, keep):
    case = next(case for case in CASES if case.f is f)
    linearize, stash = starts(case, keep)
    arguments = case.weights, case.fixed, case.side, stash, cotangents(case)
    split = SplitBackward(linearize, *arguments)
    grads = as_summed(case.weights)
    whole, first, second = functions(linearize, split)
    rest = grads, case.weights, case.fixed, case.side, jax.jit(first)(grads, *arguments)[1]
    compiled = [
        jax.jit(whole).lower(grads, *arguments).compile(),
        jax.jit(first).lower(grads, *arguments).compile(),
        jax.jit(second).lower(*rest).compile(),
    ]
    count = list(map(dots.in_hlo, compiled))
    assert count[0] == count[1] + count[2]
    assert count[2] == case.dots[1]


def test_gradients_of_layers_are_added_row_by_row():
    """In place, from inside the second half's loop, which carries nothing."""
    case = next(case for case in CASES if case.f is layers)
    linearize, stash = starts(case, "residuals")
    arguments = case.weights, case.fixed, case.side, stash, cotangents(case)
    split = SplitBackward(linearize, *arguments)
    _, first, second = functions(linearize, split)
    grads = case.weights
    crossing = first(grads, *arguments)[1]
    jaxpr = jax.make_jaxpr(second)(grads, case.weights, (), (), crossing).jaxpr
    (loop,) = dots.find(jaxpr, "scan")
    assert loop.outvars == []  # neither a carry nor stacked gradients
    assert len(dots.find(loop.params["jaxpr"].jaxpr, "addupdate")) == 2


def test_the_gradient_may_follow_from_the_output():
    """A last stage: its forward runs once for the loss and for the backward."""
    case = CASES[0]
    linearize, stash = starts(case, "input")
    (dy,) = cotangents(case)
    arguments = case.weights, case.fixed, case.side, stash
    split = SplitBackward(linearize, *arguments, [dy])

    def first(make):
        refs = list(map(jax.new_ref, case.weights))
        return split.input_half(*arguments, make, refs)

    found = jax.jit(lambda: first(lambda y: [dy * jnp.sin(y)]))()
    assert_same(found, jax.jit(lambda: first([dy * jnp.sin(case.f(*arguments))]))())
    assert dots.in_jaxpr(lambda: first(lambda y: [dy * jnp.sin(y)])) == 2 + 2


# --- what cannot be taken apart ---


@jax.custom_vjp
def entangled(x, w):
    return x @ w


def both_gradients(kept, ct):
    """Both gradients come out of one loop that cannot be looked into."""
    x, w = kept

    def body(carry):
        n, dx, dw = carry
        return n + 1, dx + ct @ w.T, dw + x.T @ ct

    start = 0, jnp.zeros_like(x), jnp.zeros_like(w)
    return jax.lax.while_loop(lambda carry: carry[0] < 2, body, start)[1:]


entangled.defvjp(lambda x, w: (x @ w, (x, w)), both_gradients)


def opaque(w, fixed, side, x):
    return jnp.tanh(entangled(jnp.tanh(x @ w[0]), w[1]))


def opaque_layers(w, fixed, side, x):
    return jax.lax.scan(lambda x, a: (jnp.tanh(entangled(x, a)), None), x, w[0])[0]


@pytest.mark.parametrize(
    ("f", "weights", "whole"),
    [
        (opaque, [SQUARE, SQUARE], "while -> int32[], float32[5,7], float32[7,7]"),
        (opaque_layers, [LAYER], "in a scan: while -> int32[], float32[5,7], float32[7,7]"),
    ],
)
def test_what_cannot_be_taken_apart_is_in_the_first_half_and_named(f, weights, whole):
    case = Case(f, weights, (0, 0), 0, {})
    linearize, stash = starts(case, "residuals")
    arguments = weights, (), (), stash, cotangents(case)
    split = SplitBackward(linearize, *arguments)
    assert split.whole == (whole,)
    together, first, second = functions(linearize, split)
    grads = [jnp.ones_like(w) for w in weights]
    dx, want = jax.jit(together)(grads, *arguments)
    found, crossing, _ = jax.jit(first)(grads, *arguments)
    assert_same(found, dx)
    assert_same(jax.jit(second)(grads, weights, (), (), crossing), want)


def test_a_barrier_is_cut_between_the_halves():
    """It hands each value through: neither half waits for the other's."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def back(kept, ct):
        x, w, ct = jax.lax.optimization_barrier((*kept, ct))
        return ct @ w.T, x.T @ ct

    product.defvjp(lambda x, w: (x @ w, (x, w)), back)
    case = Case(lambda w, fixed, side, x: product(x, w[0]), [SQUARE], (1, 1), 1, {})
    linearize, stash = starts(case, "residuals")
    arguments = case.weights, (), (), stash, cotangents(case)
    split = SplitBackward(linearize, *arguments)
    assert split.whole == ()
    _, first, second = functions(linearize, split)
    crossing = first([SQUARE], *arguments)[1]
    assert dots.in_jaxpr(second, [SQUARE], case.weights, (), (), crossing) == 1


def test_a_print_is_printed_once(capfd):
    def f(w, fixed, side, x):
        jax.debug.print("the input begins with {}", x[0, 0])
        return jnp.tanh(x @ w[0])

    case = Case(f, [SQUARE], (1, 1), 1, {})
    linearize, stash = starts(case, "input")
    arguments = case.weights, (), (), stash, [X]
    split = SplitBackward(linearize, *arguments)
    _, first, second = functions(linearize, split)
    crossing = jax.jit(first)([SQUARE], *arguments)[1]
    jax.block_until_ready(jax.jit(second)([SQUARE], case.weights, (), (), crossing))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("the input begins with") == 1


def test_a_buffer_of_the_stages_own():
    case = Case(scratch, [LAYER], (3, 3), 3, {})
    linearize, stash = starts(case, "input")
    arguments = case.weights, (), (), stash, [X]
    split = SplitBackward(linearize, *arguments)
    whole, first, second = functions(linearize, split)
    dx, want = jax.jit(whole)([LAYER], *arguments)
    found, crossing, _ = jax.jit(first)([LAYER], *arguments)
    assert_same(found, dx)
    assert_same(jax.jit(second)([LAYER], case.weights, (), (), crossing), want)
