"""Split backwards within a step: over a mesh, of GPT blocks, and counted as they are executed.

Letters: S ranks, M microbatches, b rows of a microbatch, d width.
"""

from __future__ import annotations

import collections
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from collectives import make_mesh, vary
from pipeline import Pipeline
from pipeline.core.autodiff.accumulate import as_summed
from pipeline.core.autodiff.residuals import Residuals, stage_pullback
from pipeline.core.autodiff.split_backward import SplitBackward
from pipeline.core.step import runtime
from tests.support import dots, models

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import gpt
from tests.support.close import assert_close
from tests.support.outcomes import told

# --- collectives over another axis ---

D, H = 8, 12


def column_then_row(w, fixed, side, x):
    """An MLP whose hidden layer is spread over ``model``: one sum at its end."""
    return x + jax.lax.psum(jnp.tanh(x @ w[0]) @ w[1], "model")


def gathered(w, fixed, side, x):
    """A weight that is whole only while it is used."""
    whole = jax.lax.all_gather(w[0], "model", axis=1, tiled=True)
    return x + jax.lax.pmean(jnp.tanh(x @ whole) @ jnp.ones((H, D)) * 0.1, "model")


def replicated_scale(w, fixed, side, x):
    """A weight that all members hold: its gradient is summed over them."""
    h = x * w[2]
    return x + jax.lax.psum(jnp.tanh(vary(h, "model") @ w[0]) @ w[1], "model")


def layers_of_them(w, fixed, side, x):
    def layer(x, p):
        return column_then_row(p, (), (), x), None

    stacked = [jnp.stack([w[0], 0.5 * w[0]]), jnp.stack([w[1], 0.5 * w[1]])]
    return jax.lax.scan(layer, x, stacked)[0]


@pytest.mark.few
@pytest.mark.parametrize("keep", ["input", "residuals"])
@pytest.mark.parametrize("f", [column_then_row, gathered, replicated_scale, layers_of_them])
def test_collectives_over_another_axis(f, keep):
    mesh = jax.make_mesh((2, 2), ("stage", "model"), axis_types=(AxisType.Auto,) * 2)
    k = jax.random.split(jax.random.key(0), 4)
    up, down = jax.random.normal(k[0], (D, H)), jax.random.normal(k[1], (H, D))
    scale, x = jax.random.normal(k[2], (1, D)), jax.random.normal(k[3], (4, D))

    def parts(up, down, scale, x):
        weights = list(vary((up, down, scale), "stage"))
        if keep == "input":
            linearize, stash = lambda *args: stage_pullback(told(f), *args), x
        else:
            residuals = Residuals(told(f), weights, (), (), x)
            _, stash = residuals.forward(weights, (), (), x)
            linearize = lambda *args: (None, residuals.backward(*args))  # noqa: E731
        return linearize, (weights, (), (), stash, [jnp.cos(x)])

    def whole(*arrays):
        linearize, arguments = parts(*arrays)
        refs = list(map(jax.new_ref, map(jnp.ones_like, as_summed(arguments[0]))))
        dx = linearize(*arguments[:4])[1](arguments[4], refs, want_x=True)
        return dx, [ref[...] for ref in refs]

    def halves(*arrays):
        linearize, arguments = parts(*arrays)
        split = SplitBackward(linearize, *arguments)
        assert split.whole == ()
        refs = list(map(jax.new_ref, map(jnp.ones_like, as_summed(arguments[0]))))
        dx, crossing = split.input_half(*arguments, refs)
        assert [jax.typeof(c) for c in crossing] == split.crossing
        split.weight_half(*arguments[:3], crossing, refs)
        return dx, [ref[...] for ref in refs]

    specs = P(None, "model"), P("model"), P(), P("stage")
    weights_specs = [P("stage", "model"), P(("stage", "model")), P("stage")]

    def sharded(body):
        return jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=([P("stage")], weights_specs)
        )

    arrays = up, down, scale, x
    wanted, found = (jax.jit(sharded(body))(*arrays) for body in (whole, halves))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, tolerance=1e-6)
    together, apart = (collectives(sharded(body), arrays) for body in (whole, halves))
    assert together
    assert apart <= together  # no collective runs twice


def collectives(f, arrays) -> collections.Counter:
    """Number of equations of each kind."""
    jaxpr = jax.make_jaxpr(f)(*arrays).jaxpr
    names = ("psum_invariant", "psum", "all_gather", "reduce_scatter")
    return collections.Counter(name for name in names for _ in dots.find(jaxpr, name))


# --- a GPT stage ---


SIZES = gpt.Sizes(layers=2, width=32, heads=2, context=16)


class Scanned(nnx.Module):
    """The blocks of a stage as a scan over stacked weights."""

    def __init__(self, sizes: gpt.Sizes, count: int, rngs: nnx.Rngs, *, remat: bool = False):
        self.blocks = nnx.vmap(lambda key: gpt.Block(sizes, nnx.Rngs(key)))(
            jax.random.split(rngs.params(), count)
        )
        self.remat = remat

    def __call__(self, x):
        graphdef, state = nnx.split(self.blocks)

        def block(x, state):
            return nnx.merge(graphdef, state)(x), None

        return jax.lax.scan(jax.checkpoint(block) if self.remat else block, x, state)[0]


# A block has four matrices and two products of attention, each with two in its backward. The last
# product of a forward that is run again serves nobody but the next block.
PRODUCTS = {"forward": 6, "for x": 4 + 4, "for weights": 4}


@pytest.mark.few
@pytest.mark.parametrize(
    ("make", "keep", "again"),
    [
        (gpt.Stage, "residuals", 0),
        (gpt.Stage, "input", 2 * PRODUCTS["forward"] - 1),
        (Scanned, "residuals", 0),
        pytest.param(Scanned, "input", 2 * PRODUCTS["forward"], marks=pytest.mark.slow),
        (functools.partial(Scanned, remat=True), "residuals", 2 * (PRODUCTS["forward"] - 1)),
    ],
    ids=["blocks", "blocks-input", "scanned", "scanned-input", "scanned-remat"],
)
def test_a_stage_of_gpt_blocks(make, keep, again):
    graphdef, state = nnx.split(make(SIZES, 2, nnx.Rngs(0)))
    weights, treedef = jax.tree.flatten(state)
    x = jax.random.normal(jax.random.key(1), (2, SIZES.context, SIZES.width))

    def f(weights, fixed, side, x):
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))(x)

    if keep == "input":
        linearize, stash = lambda *args: stage_pullback(told(f), *args), x
    else:
        residuals = Residuals(told(f), weights, (), (), x)
        linearize = lambda *args: (None, residuals.backward(*args))  # noqa: E731
        _, stash = residuals.forward(weights, (), (), x)
    arguments = weights, (), (), stash, [jnp.cos(x)]
    split = SplitBackward(linearize, *arguments)
    assert split.whole == ()

    def whole(*arguments):
        refs = list(map(jax.new_ref, weights))
        dx = linearize(*arguments[:4])[1](arguments[4], refs, want_x=True)
        return dx, [ref[...] for ref in refs]

    def first(*arguments):
        return split.input_half(*arguments, list(map(jax.new_ref, weights)))

    def second(*arguments):
        refs = list(map(jax.new_ref, weights))
        split.weight_half(*arguments, refs)
        return [ref[...] for ref in refs]

    dx, grads = jax.jit(whole)(*arguments)
    found, crossing = jax.jit(first)(*arguments)
    rest = *arguments[:3], crossing
    models.distance(found, dx)
    assert models.distance(found, dx) <= 1e-6
    assert models.distance(jax.jit(second)(*rest), grads) <= 1e-6
    count = dots.in_jaxpr(first, *arguments), dots.in_jaxpr(second, *rest)
    assert count == (2 * PRODUCTS["for x"] + again, 2 * PRODUCTS["for weights"])
    assert sum(count) == dots.in_jaxpr(whole, *arguments)
    # Input and output gradient of each matrix, where 2 x 16 rows are (3 + 1) + (1 + 1) + (1 + 4)
    # + (4 + 1) widths; a norm's scale sends its gradient.
    rows = 2 * SIZES.context * SIZES.width * 4
    most = 2 * (4 + 2 + 5 + 5) * rows + 2 * 2 * SIZES.width * 4
    assert sum(c.size * c.dtype.itemsize for c in split.crossing) <= most


# --- as executed ---


def step(name: str, S: int, M: int, remat):
    """The program of a step, and the bodies of its scans over ticks."""
    pipe = Pipeline(
        models.build(models.Block, S),
        M,
        schedule=name,
        mesh=make_mesh(stage=S),
        head=models.Readout(nnx.Rngs(5)),
        loss_fn=models.cross_entropy,
        remat=remat,
    )
    rows, labels = models.rows(2 * M), models.words(2 * M, most=models.CLASSES)
    operands = pipe._operands(rows, labels, None)
    train = functools.partial(runtime.train, pipe.plan)
    scans = dots.find(jax.make_jaxpr(train, static_argnums=0)(*operands).jaxpr, "scan")
    return pipe.plan.training, [scan.params["jaxpr"].jaxpr for scan in scans]


def needed(jaxpr):
    """Without what nobody reads."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def executed(name: str, S: int, M: int, remat) -> int:
    """Multiplications of all ranks in a step: of each action's body, times how often it runs."""
    program, (ticks,) = step(name, S, M, remat)
    loops, total = iter(dots.find(ticks, "while")), 0
    for index, slot in enumerate(program.slots):
        for branch in range(1, len(slot.ops) + 1):
            body = needed(next(loops).params["body_jaxpr"].jaxpr)
            total += dots.work(body) * int((program.op[:, index] == branch).sum())
    assert next(loops, None) is None
    return total


@pytest.mark.parametrize("remat", [None, "stage", jax.checkpoint_policies.dots_saveable])
def test_a_split_backward_multiplies_as_often_as_a_whole_one(remat):
    """Also on the last stage, whose W knows neither head nor loss."""
    S, M = 4, 8
    split, plain = executed("zb_h1", S, M, remat), executed("1f1b", S, M, remat)
    if remat is None:
        rows, width, hidden = 2, models.WIDTH, 2 * models.WIDTH
        stage, head = 3 * 2 * width * hidden, 3 * width * models.CLASSES
        # Stage 0 has no use for its input's gradient.
        assert plain == M * rows * (S * stage + head - width * hidden)
    assert split == plain


# --- what is said of it ---


@jax.custom_vjp
def entangled(x, w):
    """A product both of whose gradients come out of one loop that cannot be looked into."""
    return x @ w


def _both(kept, ct):
    x, w = kept

    def body(carry):
        n, dx, dw = carry
        return n + 1, dx + ct @ w.T, dw + x.T @ ct

    start = 0, jnp.zeros_like(x), jnp.zeros_like(w)
    start = jax.tree.map(lambda a: vary(a, ("data", "stage")), start)
    return jax.lax.while_loop(lambda carry: carry[0] < 1, body, start)[1:]


entangled.defvjp(lambda x, w: (x @ w, (x, w)), _both)


class Entangled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = models.normal(rngs, models.WIDTH, models.WIDTH)

    def __call__(self, x):
        return x + jnp.tanh(entangled(x, self.w[...]))


@pytest.mark.few
def test_what_cannot_be_split_is_right_and_listed():
    stages = models.build(Entangled, 2)
    pipe = Pipeline(
        stages,
        4,
        schedule="zb_h1",
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
    )
    assert "whole" not in pipe.describe()
    x, t = models.rows(8), models.rows(8, seed=1)
    found = pipe.value_and_grad(x, t)
    models.assert_matches(pipe, found, models.reference(stages, x, t, models.squares))
    places, *_, last = pipe.describe().splitlines()[4:]
    assert places.endswith(" message buffers, 0 residual stashes, 2 stashes of what I leaves for W")
    assert last == "I does whole what cannot be split: while -> int32[], float32[2,8], float32[8,8]"
