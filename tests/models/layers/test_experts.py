"""Mixtures of experts against the dense formula, a loop over tokens, and written-out numbers.

Letters: n tokens, d = 8 width, e experts, k experts of a token, R ranks of the axis ``expert``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from collectives.compat import vary, varying_axes
from pipeline import Pipeline, with_losses
from pipeline.layers import ExpertState, MixtureOfExperts, advance_experts, settle_experts
from pipeline.layers.experts import Router, capacity_of, route
from pipeline.models.layers import mixture
from pipeline.models.layers.experts import dispatch, products
from tests.support import models
from tests.support.close import assert_close
from tests.support.grids import effort
from tests.support.group import mesh, normal
from tests.support.poison import poison  # noqa: F401, a fixture

D, F, E, K = models.WIDTH, 12, 4, 2
ROWS = 24
X, T = models.rows(ROWS), models.rows(ROWS, seed=3)


def made(**options: Any) -> MixtureOfExperts:
    return MixtureOfExperts(D, F, E, options.pop("top_k", K), nnx.Rngs(0), **options)


def dense(moe: MixtureOfExperts, x: Any) -> Any:
    """Every expert computes every token, and those that were not chosen count for nothing."""
    flat = x.reshape(-1, D)
    bias = None if moe.bias is None else moe.bias[...]
    found = route(moe.logits(flat), moe.router, bias=bias)
    chosen = jax.nn.one_hot(found.chosen, moe.router.num_experts) * found.weights[..., None]
    both = jnp.einsum("nd,edcf->necf", flat, moe.gate_up[...])
    if moe.gate_up_bias is not None:
        both += moe.gate_up_bias[...][None]
    y = jnp.einsum("nef,efd->ned", moe.gate(both[:, :, 0], both[:, :, 1]), moe.down[...])
    if moe.down_bias is not None:
        y += moe.down_bias[...][None]
    return jnp.einsum("ned,nke->nd", y, chosen).reshape(x.shape)


# ---- routers -----------------------------------------------------------------------------------

LOGITS = jnp.array([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, -1.0, 5.0]])


def chosen_by_hand(logits: np.ndarray, router: Router, bias: np.ndarray) -> tuple[list, list]:
    """Experts and weights of one token, by sorting Python numbers."""
    e = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if router.scoring == "sigmoid" else e / e.sum()
    ranked = (logits if router.scoring == "topk_softmax" else scores) + bias
    allowed = set(range(len(logits)))
    if router.groups is not None:
        number, some = router.groups
        groups = np.split(np.arange(len(logits)), number)
        score = [sum(sorted(ranked[g])[-router.group_top :]) for g in groups]
        best = sorted(range(number), key=lambda g: -score[g])[:some]
        allowed = {int(n) for g in best for n in groups[g]}
    order = sorted(allowed, key=lambda n: (-ranked[n], n))[: router.top_k]
    weights = scores[order]
    if router.scoring == "topk_softmax" or router.renormalise:
        weights = weights / weights.sum()
    return order, list(weights * router.scale)


ROUTERS = [
    Router(4, 2),
    Router(4, 2, renormalise=False),
    Router(4, 2, "topk_softmax"),
    Router(4, 2, "sigmoid", scale=2.5),
    Router(4, 2, groups=(2, 1), renormalise=False, scale=16.0),
    Router(4, 2, "sigmoid", groups=(2, 1), group_top=2),
    Router(4, 3, "sigmoid", groups=(4, 3), renormalise=False),
]


@pytest.mark.few
@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_routers_choose_as_by_hand(router):
    bias = np.array([0.9, 0.0, 0.4, -0.3]) if router.scoring == "sigmoid" else np.zeros(4)
    found = route(LOGITS, router, bias=jnp.asarray(bias))
    for n, logits in enumerate(np.asarray(LOGITS, np.float64)):
        order, weights = chosen_by_hand(logits, router, bias)
        assert found.chosen[n].tolist() == order
        assert_close(found.weights[n], np.array(weights))
    assert_close(found.shares.sum(-1), 1.0)


@pytest.mark.slow
def test_of_equal_scores_the_first_experts_are_chosen_and_weights_have_gradients():
    logits = jnp.zeros((3, 4))
    assert route(logits, Router(4, 2)).chosen.tolist() == [[0, 1]] * 3
    grad = jax.grad(lambda x: route(x, Router(4, 2)).weights[:, 0].sum())(LOGITS)
    p = jax.nn.softmax(LOGITS[0, jnp.array([1, 2])])[0]
    assert_close(grad[0], jnp.array([0.0, 1.0, -1.0, 0.0]) * p * (1 - p))


# ---- one rank ----------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "gather": {},
    "one expert": {"top_k": 1, "renormalise": False},
    "all experts": {"top_k": E},
    "biases": {"bias": True},
    "chunks": {"chunk": 6},
    "capacity": {"dispatch": "capacity", "capacity_factor": float(E)},
    "capacity in chunks": {"dispatch": "capacity", "capacity_factor": float(E), "chunk": 6},
}


def random_biases(moe: MixtureOfExperts) -> MixtureOfExperts:
    for n, one in enumerate((moe.gate_up_bias, moe.down_bias)):
        if one is not None:
            one.set_value(normal(*one.shape, seed=n))
    return moe


def gradients(moe: MixtureOfExperts, x: Any, f: Any) -> Any:
    graphdef, params, rest = nnx.split(moe, nnx.Param, ...)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(f(nnx.merge(graphdef, params, rest, copy=True), x)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_the_dense_formula(kind):
    moe = random_biases(made(**KINDS[kind]))
    x = X.reshape(4, 6, D)
    assert_close(gradients(moe, x, lambda m, x: m(x)), gradients(moe, x, dense))


def test_an_expert_without_tokens_has_no_gradient():
    moe = made(router_bias=True)
    moe.router_bias.set_value(jnp.array([-1e9, 0.0, 0.0, 0.0]))
    _, (grads, dx) = gradients(moe, X, lambda m, x: m(x))
    assert not jnp.any(grads["gate_up"][...][0])
    assert jnp.all(jnp.isfinite(dx))
    assert all(jnp.any(grads["gate_up"][...][n]) for n in (1, 2, 3))


@pytest.mark.few
@pytest.mark.parametrize("all_here", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "size"), [(13, 3, 4), (3, 8, 4), (24, 2, 16)])
def test_products_in_blocks_are_those_of_ragged_dot(tokens, experts, size, all_here, monkeypatch):
    """Several blocks an expert, experts without rows, and rows of experts that lie elsewhere."""
    monkeypatch.setattr(products, "block_size", lambda *_: size)
    rng = np.random.default_rng(tokens)
    x, w = jnp.asarray(rng.normal(size=(tokens, D))), jnp.asarray(rng.normal(size=(experts, D, F)))
    chosen = rng.integers(1, experts, (tokens, K)) + (0 if all_here else rng.integers(-2, 3, K))

    def run(x, w, bias):
        def some(rows, product, pick):
            return jnp.tanh(product(rows, w)) + pick(bias)

        y = products.run_grouped(x, jnp.asarray(chosen), some, experts, all_here=all_here)
        return y, jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    def values(platform):
        monkeypatch.setattr(products, "platform", lambda: platform)
        arguments = x, w, jnp.full((experts, F), 0.5)
        both = jax.value_and_grad(lambda *a: run(*a)[::-1], argnums=(0, 1, 2), has_aux=True)
        (_, y), grads = jax.jit(both)(*arguments)
        return y, grads

    assert_close(values("cpu"), values("tpu"))
    here = (chosen >= 0) & (chosen < experts)
    wanted = np.tanh(np.einsum("nd,nkdf->nkf", x, np.asarray(w)[np.clip(chosen, 0, experts - 1)]))
    assert_close(values("cpu")[0], np.where(here[..., None], wanted + 0.5, 0))


@pytest.mark.slow
def test_shared_experts_are_added_to_what_was_chosen():
    moe = made(shared_hidden=10, shared_gate=True)
    gate = jax.nn.sigmoid(X @ moe.shared_gate[...])
    assert_close(moe(X), dense(moe, X) + gate * moe.shared(X))


# ---- several ranks -----------------------------------------------------------------------------


def on_ranks(moe: MixtureOfExperts, ranks: int, f: Any, *, data: int = 1, check_vma: bool) -> Any:
    """Loss, gradients of weights and of X, experts over ``expert`` and rows over both axes."""
    graphdef, params, rest = nnx.split(moe, nnx.Param, ...)
    where = mesh(ranks, axis="expert", data=data)
    flat = nnx.to_flat_state(params)
    cut = [P(*(v.get_metadata("out_sharding", None) or ())) for _, v in flat]
    rows = P(("data", "expert"))

    def step(leaves: Any, x: Any) -> Any:
        def loss(leaves: Any, x: Any) -> Any:
            params = jax.tree.unflatten(jax.tree.structure(params_), leaves)
            return jnp.sum(jnp.sin(f(nnx.merge(graphdef, params, rest, copy=True), x)))

        # All weights vary over all axes, as in the kernel; their gradients are summed here.
        leaves = vary(leaves, ("data", "expert"))
        value, (grads, dx) = jax.value_and_grad(loss, argnums=(0, 1))(leaves, x)
        over = [("data",) if any(spec) else ("data", "expert") for spec in cut]
        grads = [jax.lax.psum(g, axes) for g, axes in zip(grads, over, strict=True)]
        return jax.lax.psum(value, ("data", "expert")), (grads, dx)

    params_ = params
    run = jax.shard_map(
        step, mesh=where, in_specs=(cut, rows), out_specs=(P(), (cut, rows)), check_vma=check_vma
    )
    return jax.jit(run)(jax.tree.leaves(params), X)


RANKS = [
    ("gather", 2, 2, True),
    ("capacity", 2, 2, False),
    ("biases", 4, 1, False),
    ("chunks", 2, 1, True),
    ("one expert", 4, 2, False),
    ("capacity in chunks", 4, 1, True),
    ("ragged", 2, 2, False),
    ("ragged", 4, 1, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id="-".join(map(str, c)), marks=effort(n, {0, 6}, {1, 2, 3, 4, 5, 7}))
        for n, c in enumerate(RANKS)
    ],
)
def test_experts_over_ranks_are_those_of_one_rank(case, monkeypatch):
    kind, ranks, data, check_vma = case
    options = dict(KINDS.get(kind, {"dispatch": kind}))
    if options.get("chunk"):
        options["chunk"] = 3
    moe = random_biases(made(**options))
    if kind == "ragged":
        monkeypatch.setattr(dispatch, "WITHOUT_RAGGED", ())
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", written_out)
    found = on_ranks(moe, ranks, lambda m, x: m(x), data=data, check_vma=check_vma)
    value, (grads, dx) = gradients(moe, X, dense)
    assert_close(found, (value, (jax.tree.leaves(grads), dx)))


def written_out(operand, output, starts, sizes, places, received, *, axis_name):
    """`jax.lax.ragged_all_to_all` by `all_gather`: every rank sees all and takes its rows."""
    me = jax.lax.axis_index(axis_name)
    tables = [jax.lax.all_gather(one, axis_name) for one in (starts, sizes, places)]
    everything = jax.lax.all_gather(operand, axis_name)
    at = jnp.arange(output.shape[0])
    for rank in range(everything.shape[0]):
        start, size, place = (table[rank, me] for table in tables)
        mine = (at >= place) & (at < place + size)
        source = jnp.clip(at - place + start, 0, operand.shape[0] - 1)
        output = jnp.where(mine[:, None], everything[rank][source], output)
    return output


# ---- capacity ----------------------------------------------------------------------------------


def kept_by_hand(chosen: np.ndarray, places: int) -> np.ndarray:
    """Choices that find a place, token by token."""
    taken, kept = [0] * E, np.zeros(chosen.shape, bool)
    for n, of_token in enumerate(chosen):
        for j, expert in enumerate(of_token):
            kept[n, j] = taken[expert] < places
            taken[expert] += 1
    return kept


@pytest.mark.few
@pytest.mark.parametrize("factor", [0.5, 0.01, 1.0])
def test_capacity_drops_what_a_loop_over_tokens_drops_and_says_how_many(factor):
    moe = made(dispatch="capacity", capacity_factor=factor, counts=True)
    found = route(moe.logits(X), moe.router)
    places = max(1, math.ceil(factor * ROWS * K / E))
    assert capacity_of(ROWS, K, E, factor) == places
    kept = kept_by_hand(np.asarray(found.chosen), places)
    wanted = np.zeros((ROWS, D), np.float32)
    for n in range(ROWS):
        for j, expert in enumerate(np.asarray(found.chosen[n])):
            if kept[n, j]:
                both = jnp.einsum("d,dcf->cf", X[n], moe.gate_up[...][expert])
                y = (jax.nn.silu(both[0]) * both[1]) @ moe.down[...][expert]
                wanted[n] += np.asarray(found.weights[n, j] * y)
    assert_close(moe(X), wanted)
    assert int(moe.drops[...]) == (~kept).sum() > 0
    advance_experts(moe)
    assert_close(moe.dropped[...], (~kept).mean())
    assert int(moe.drops[...]) == 0


# ---- losses and state --------------------------------------------------------------------------


@pytest.mark.slow
def test_losses_are_those_written_out():
    x = X.reshape(4, 6, D)
    moe = made(balance_weight=0.5, z_weight=0.25, balance="sequence")
    _, added = with_losses(lambda m, x: m(x))(moe, x)
    logits = moe.logits(X)
    shares = jax.nn.softmax(logits).reshape(4, 6, E)
    hot = jax.nn.one_hot(route(logits, moe.router).chosen, E).sum(1).reshape(4, 6, E)
    each = E * ((hot.sum(1) / (6 * K)) * shares.mean(1)).sum(-1)
    z = (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()
    assert_close(added, 0.5 * each.mean() + 0.25 * z)
    moe.balance = "microbatch"
    _, added = with_losses(lambda m, x: m(x))(moe, x)
    whole = E * (hot.sum((0, 1)) / (ROWS * K) * shares.mean((0, 1))).sum()
    assert_close(added, 0.5 * whole + 0.25 * z)
    moe.eval()
    assert with_losses(lambda m, x: m(x))(moe, x)[1] == 0


@pytest.mark.slow
def test_the_balance_of_experts_that_get_the_same_is_one():
    moe = made(balance_weight=1.0)
    moe.router_weight.set_value(jnp.zeros((D, E)))
    assert_close(with_losses(lambda m, x: m(x))(moe, X)[1], 1.0)


class Layer(nnx.Module):
    """A stage: a norm and a mixture of experts beside a residual stream."""

    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.moe = MixtureOfExperts(D, F, E, K, rngs, **options)

    def __call__(self, x):
        return x + self.moe(self.norm(x))


def plain(
    K: int, M: int, *, steps: int = 1, advance: bool = False, rows: Any = (X, T), **options: Any
) -> Any:
    """Losses and gradients of K layers over M microbatches, and the layers behind the steps."""
    model = nnx.List(models.build(Layer, K, **options))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def through(params, rest, x):
        layers = nnx.merge(graphdef, params, rest, copy=True)
        for layer in layers:
            x = layer(x)
        return x, nnx.split(layers, nnx.Param, ...)[2]

    @jax.jit
    def step(params, rest):
        def loss(params):
            total, now = jnp.zeros(()), rest
            for x, t in zip(*(jnp.split(of, M) for of in rows), strict=True):
                (y, now), added = with_losses(through)(params, now, x)
                total += models.squares(y, t) + added
            return total / M, now

        (value, now), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, grads, now

    values = []
    for _ in range(steps):
        value, grads, rest = step(params, rest)
        values.append(value)
        if advance:
            layers = nnx.merge(graphdef, params, rest, copy=True)
            advance_experts(layers)
            rest = nnx.split(layers, nnx.Param, ...)[2]
    return values, [grads[k] for k in range(K)], nnx.merge(graphdef, params, rest)


PIPES: list[tuple[int, int, int, dict[str, Any], dict[str, Any]]] = [
    (2, 2, 3, {"schedule": "zb_h1", "remat": None}, {}),
    (2, 2, 3, {"remat": None}, {"dispatch": "capacity", "capacity_factor": 0.5}),
    (4, 2, 2, {"schedule": "interleaved_1f1b"}, {"chunk": 4}),
    (4, 2, 4, {"schedule": "zb_v", "remat": None}, {"z_weight": 0.1, "balance_weight": 0.1}),
    (2, 1, 2, {"remat": None}, {"shared_hidden": 8, "scoring": "sigmoid"}),
    (2, 2, 4, {"schedule": "gpipe"}, {"scoring": "topk_softmax", "bias": True}),
    (4, 4, 4, {"schedule": "zb_h1"}, {"groups": (2, 1), "balance_weight": 0.2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=f"{c[0]}-{c[1]}-{c[2]}-{n}", marks=effort(n, {0}, {1, 2, 3, 4, 5, 6}))
        for n, c in enumerate(PIPES)
    ],
)
def test_experts_in_stages_are_those_of_the_plain_model(request, case):
    K, S, M, how, options = case
    if S > 1:
        request.getfixturevalue("poison")
    pipe = Pipeline(
        models.build(Layer, K, **options),
        M,
        mesh=make_mesh(stage=S, data=1),
        loss_fn=models.squares,
        **how,
    )
    loss, grads = pipe.value_and_grad(X, T)
    (want,), want_grads, _ = plain(K, M, **options)
    assert_close([loss, pipe.loss(X, T)], want)
    assert models.distance(models.by_stage(pipe, grads), want_grads) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "remat", "M"),
    [
        ("1f1b", "stage", 4),
        pytest.param("zb_h1", None, 2, marks=pytest.mark.slow),
        pytest.param("gpipe", None, 4, marks=pytest.mark.slow),
    ],
)
def test_counts_and_biases_advance_once_a_step(schedule, remat, M):
    options: dict[str, Any] = {
        "scoring": "sigmoid",
        "bias_rate": 0.05,
        "balance": "batch",
        "balance_weight": 0.3,
    }
    pipe = Pipeline(
        models.build(Layer, 2, **options),
        M,
        mesh=make_mesh(stage=2, data=2),
        loss_fn=models.squares,
        schedule=schedule,
        remat=remat,
        state=ExpertState,
        after_step=advance_experts,
    )
    values, want_grads, layers = plain(2, 1, steps=3, advance=True, **options)
    for want in values:
        loss, grads = pipe.value_and_grad(X, T)
        assert_close(loss, want)
    assert models.distance(models.by_stage(pipe, grads), want_grads) < 1e-5
    for k, stage in enumerate(pipe.stages()):
        moe, plain_moe = stage.moe, layers[k].moe
        assert_close(moe.bias[...], plain_moe.bias[...])
        assert_close(moe.load[...], plain_moe.load[...])
        assert not jnp.any(moe.counts[...])
        assert jnp.any(moe.bias[...])


@pytest.mark.slow
def test_loads_of_the_batch_itself_come_from_a_forward_pass():
    options = {"balance": "batch", "balance_weight": 0.3}
    pipe = Pipeline(
        models.build(Layer, 2, **options),
        3,
        mesh=make_mesh(stage=2),
        loss_fn=models.squares,
        state=ExpertState,
        after_step=lambda stage: None,  # the test settles experts itself
    )
    pipe(X)
    settle_experts(pipe)
    loss, _ = pipe.value_and_grad(X, T)
    # Of one microbatch, its own load is that of the batch.
    (want,), _, _ = plain(2, 1, balance_weight=0.3)
    assert_close(loss, want)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"top_k": 5},
            (
                "top_k=5 with num_experts=4: a token is given to different experts; choose top_k "
                "of 1 to 4"
            ),
        ),
        (
            {"dispatch": "magic"},
            "dispatch='magic' must be one of 'gather', 'capacity', 'ragged'",
        ),
        (
            {"dispatch": "capacity", "capacity_factor": 0},
            (
                "capacity_factor=0 must be a finite number > 0: an expert without a place takes no "
                "token; 1 gives every expert as many as there are on average"
            ),
        ),
        (
            {"chunk": 0, "balance": "world"},
            (
                "chunk=0 must be an integer >= 1, or None for all tokens at once; balance='world' "
                "must be one of 'microbatch', 'sequence', 'batch'"
            ),
        ),
        (
            {"scoring": "tanh"},
            "scoring='tanh' must be one of 'softmax', 'topk_softmax', 'sigmoid'",
        ),
        (
            {"groups": (3, 1)},
            "groups=(3, 1) with num_experts=4: groups have equal sizes; numbers that fit: 1, 2, 4",
        ),
        (
            {"groups": (4, 1)},
            "top_k=2 with groups=(4, 1): the groups of a token have 1 experts; give it more groups",
        ),
        (
            {"groups": (2, 1), "group_top": 3},
            "group_top=3 with groups=(2, 1): a group has 2 experts; choose 1 to 2",
        ),
        *(
            (
                {"groups": groups},
                (
                    f"groups={groups!r} must be (number of groups, groups of a token), with 1 <= "
                    f"second <= first"
                ),
            )
            for groups in (2, (2, 1, 1), (2, True), "21")
        ),
        ({"scale": float("inf")}, "scale=inf must be a finite number"),
        (
            {"balance_weight": "0.1", "z_weight": float("nan")},
            "balance_weight='0.1' must be a finite number; z_weight=nan must be a finite number",
        ),
        ({"bias_rate": float("inf")}, "bias_rate=inf must be a finite number"),
        (
            {"shared_hidden": -1},
            "shared_hidden=-1 must be an integer >= 0; 0 for no shared MLP",
        ),
        ({"axis": 3}, "axis=3 must be the name of a mesh axis, or None for one rank"),
        (
            {"row_axes": "data"},
            "row_axes='data' must be a tuple of names of mesh axes, such as ('data',)",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        made(**options)
    assert str(error.value) == message


def test_numbers_of_numpy_are_taken():
    moe = MixtureOfExperts(np.int64(D), F, np.int32(E), np.int32(K), nnx.Rngs(0))
    assert type(moe.router.num_experts) is type(moe.router.top_k) is int


@pytest.mark.parametrize(("sizes", "shape"), [({}, (0, D)), ({"dispatch": "capacity"}, (4, D + 1))])
def test_tokens_that_do_not_fit_are_refused(sizes, shape):
    with pytest.raises(ValueError) as error:
        made(**sizes)(jnp.ones(shape))
    assert str(error.value) == (
        f"x is float32{list(shape)}: a mixture of experts of width={D} takes tokens of shape "
        f"[..., {D}], at least one"
    )


def test_ragged_is_refused_where_the_platform_lacks_it():
    with pytest.raises(ValueError) as error:
        made(dispatch="ragged")(X)
    assert str(error.value) == (
        "dispatch='ragged' on the platform 'cpu': its compiler has no ragged_all_to_all, which "
        "TPUs and GPUs have; take dispatch='gather', with the same results, or 'capacity'"
    )


@pytest.mark.slow
def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^x is int32\[2\]: experts compute in the dtype"):
        made()(jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"^chunk=5: must divide the 24 tokens of a rank"):
        made(chunk=5)(X)
    with pytest.raises(ValueError, match=r"^balance='sequence' with an input of shape \[24, 8\]"):
        made(balance="sequence", balance_weight=1.0)(X)
    with pytest.raises(ValueError, match=r"^settle_experts was given a module without counts"):
        settle_experts(made())


def test_state_that_nobody_declared_is_refused():
    stages = models.build(Layer, 2, counts=True)
    pipe = Pipeline(stages, 2, mesh=make_mesh(stage=2), loss_fn=models.squares)
    with pytest.raises(ValueError) as error:
        pipe.value_and_grad(X, T)
    assert "writes to its ExpertState moe.counts" in str(error.value)
    assert "state=" in str(error.value)


def test_whole_weights_on_every_rank_are_refused():
    moe = made()
    run = jax.shard_map(moe, mesh=mesh(2, axis="expert"), in_specs=P("expert"), out_specs=P())
    with pytest.raises(ValueError) as error:
        jax.eval_shape(run, X)
    assert str(error.value) == (
        "a rank holds 4 of num_experts=4 experts on the axis 'expert' of size 2, and must hold 2: "
        "hand each rank its part, in_specs=PartitionSpec('expert')"
    )
    assert varying_axes(X) == frozenset()


def in_blocks_and_dense() -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, Any]]:
    """A loss by products in blocks, the same by the formula, and where to take derivatives."""
    key = jax.random.key
    x, weight = jax.random.normal(key(0), (6, 4)), jax.random.normal(key(1), (3, 4, 4))
    chosen = jnp.asarray([[0], [2], [2], [0], [1], [2]])

    def blocks(x: jax.Array, weight: jax.Array) -> jax.Array:
        run = lambda rows, product, _: jnp.tanh(product(rows, weight))  # noqa: E731
        return jnp.square(products.run_grouped(x, chosen, run, 3, all_here=True)).sum()

    def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(jnp.einsum("nd,ndf->nf", x, weight[chosen[:, 0]]))).sum()

    return blocks, dense, (x, weight)


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, at: jax.jvp(f, at, at),
    "jvp of rows alone": lambda f, at: jax.jvp(lambda x: f(x, at[1]), at[:1], at[:1]),
    "vjp": lambda f, at: jax.value_and_grad(f, argnums=(0, 1))(*at),
    "jvp of a gradient": lambda f, at: jax.jvp(jax.grad(f, argnums=(0, 1)), at, at),
    "gradient of a jvp": lambda f, at: jax.grad(lambda *x: jax.jvp(f, x, at)[1], argnums=(0, 1))(
        *at
    ),
    "hessian": lambda f, at: jax.hessian(f)(*at),
    "vmap of a jvp": lambda f, at: jax.vmap(lambda v: jax.jvp(f, at, (v, at[1]))[1])(
        jnp.stack([at[0], -at[0]])
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives_of_products_in_blocks(kind: str):
    blocks, dense, at = in_blocks_and_dense()
    assert_close(*(DERIVATIVES[kind](f, at) for f in (blocks, dense)))


def test_a_gradient_of_products_in_blocks_has_three_loops_of_products():
    """Forward, for rows, and for the weight, which is added up in place."""
    blocks, _, at = in_blocks_and_dense()
    text = str(jax.make_jaxpr(jax.grad(blocks, argnums=(0, 1)))(*at))
    assert text.count("dot_general[") == 3
    assert "linear_block_matmul" not in text


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "capacity"])
def test_forward_mode_of_the_layer_is_its_gradient(dispatch):
    graphdef, params, rest = nnx.split(made(dispatch=dispatch), nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(nnx.merge(graphdef, params, rest, copy=True)(x)).sum()

    at = params, X
    along = jax.tree.map(jnp.sin, at)
    _, found = jax.jvp(loss, at, along)
    grads = jax.grad(loss, argnums=(0, 1))(*at)
    want = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, grads, along)))
    assert_close(found, want)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_by_themselves_are_those_of_one_product(bias, monkeypatch):
    """On TPUs each is a product of its own."""
    graphdef, params, rest = nnx.split(made(bias=bias), nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(nnx.merge(graphdef, params, rest, copy=True)(x)).sum()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    want = step(params, X)
    monkeypatch.setattr(mixture, "platform", lambda: "tpu")
    assert_close(step(params, X), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "batch"), [("expert", P(("data", "expert"))), ("context", P("data", "context"))]
)
def test_an_axis_that_batch_forgets_is_told_of_batch_first(axis, batch):
    """Experts and attention make values differ over it (issue 52)."""

    class Stage(nnx.Module):
        def __init__(self, k):
            rngs = nnx.Rngs(k)
            options = {"axis": axis, "row_axes": ("data", axis), "balance_weight": 0.0}
            self.moe = MixtureOfExperts(8, 16, 4, 2, rngs, **options)

        def __call__(self, x):
            return x + self.moe(x)

    x = jnp.ones((8, 4, 8))
    options = {"mesh": make_mesh(stage=2, **{axis: 2}), "loss_fn": lambda y, t: (y - t).mean()}
    with pytest.raises(ValueError) as caught:
        Pipeline([Stage(0), Stage(1)], 2, **options).loss(x, x)
    assert str(caught.value).startswith(
        f"loss_fn returned a value that differs between the ranks of axis {axis!r}; if these ranks "
        f"hold rows or positions of their own, let Pipeline(..., batch=) split the batch over it; "
        f"or, each of them holds only its part"
    )
    Pipeline([Stage(0), Stage(1)], 2, batch=batch, **options).loss(x, x)


@pytest.mark.parametrize("in_pipeline", [False, True])
def test_settled_experts_count_drops_anew_as_choices(in_pipeline: bool) -> None:
    """Issue 67: `drops` stayed, so the part that was dropped was of two passes over one."""

    def make(rngs: nnx.Rngs) -> MixtureOfExperts:
        more = {"dispatch": "capacity", "capacity_factor": 0.25, "balance": "batch"}
        return MixtureOfExperts(8, 6, 4, 2, rngs, balance_weight=0.1, counts=True, **more)

    def dropped(passes: int) -> Any:
        layers = [make(nnx.Rngs(k)) for k in range(2)]
        model: Any = layers[0]
        if in_pipeline:
            model = Pipeline(layers, 2, loss_fn=models.squares, state=ExpertState)
        for n in range(passes):
            model.loss(x, x) if in_pipeline else model(x)
            if n + 1 < passes:
                settle_experts(model)
        advance_experts(model)
        state = nnx.to_flat_state(nnx.state(model, ExpertState))
        return [leaf[...] for path, leaf in state if path[-1] == "dropped"]

    x = normal(4, 8, 8)
    once = dropped(1)
    assert max(float(found.max()) for found in once) > 0.1
    jax.tree.map(assert_close, dropped(3), once)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dispatch", ["gather", "capacity"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_counters_keep_their_dtype_under_x64(dispatch: str, chunk: int | None) -> None:
    """Issue 67: sums of int32 are int64 there, and adding them to int32 is to become an error."""
    with jax.enable_x64(True):
        x = jnp.ones((4, 4, 8), jnp.float32)
        options = {"dispatch": dispatch, "chunk": chunk, "bias_rate": 1e-3, "balance": "batch"}
        moe = MixtureOfExperts(8, 6, 4, 2, nnx.Rngs(0), counts=True, balance_weight=0.1, **options)
        before = jax.tree.map(lambda v: v.dtype, nnx.state(moe, ExpertState))
        moe(x)
        advance_experts(moe)
        moe(x)
        assert jax.tree.map(lambda v: v.dtype, nnx.state(moe, ExpertState)) == before
        assert moe.counts[...].sum() == 4 * 4 * 2


def test_experts_of_unlike_stages_are_advanced_as_the_refusal_recommends() -> None:
    """Issue 67: a pipeline that packs the state of experts ended in a TypeError of None."""

    class Stage(nnx.Module):
        def __init__(self, k: int) -> None:
            self.moe = MixtureOfExperts(8, 6, 4, 2, nnx.Rngs(k), counts=True)
            self.more = nnx.Linear(8, 8, rngs=nnx.Rngs(k)) if k else None

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.moe(x)
            return x if self.more is None else self.more(x)

    def counts(pipe: Pipeline) -> list[float]:
        state = nnx.to_flat_state(nnx.state(pipe, ExpertState))
        return [float(jnp.abs(leaf[...]).sum()) for path, leaf in state if path[-1] == "counts"]

    stages, x = [Stage(0), Stage(1)], normal(4, 8, 8)
    pipe = Pipeline(stages, 2, loss_fn=models.squares, state=ExpertState)
    pipe.value_and_grad(x, x)
    with pytest.raises(ValueError, match="advance_experts was given a Pipeline that packs ") as e:
        advance_experts(pipe)
    assert str(e.value).endswith("give the pipeline after_step=advance_experts instead")
    assert sum(counts(pipe)) > 0
    pipe = pipe.replace(after_step=advance_experts)
    pipe.value_and_grad(x, x)
    assert sum(counts(pipe)) == 0
