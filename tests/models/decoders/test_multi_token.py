"""Multi-token prediction in a pipeline, against the formulas of DeepSeek-V3's report in plain jnp.

The oracle takes one document at a time and cuts sequences where the report does, h^k_{1:T-k}; it
has no mask, no module of ours and no pipeline.

Letters: S ranks, D modules, data shards by name, n tokens of a document.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, generate
from pipeline.decoders import DecoderConfig, MultiTokenLoss, build, next_token_loss
from pipeline.layers import Context
from pipeline.models.decoders.multi_token import shifted, within
from pipeline.splitting.layouts import place_modules
from pipeline.training.batches import packed
from pipeline.weights import parse_layout
from tests.support.close import assert_close

SIZES: dict[str, Any] = {
    "vocabulary": 30,
    "width": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "hidden": 24,
}
WEIGHTS = (0.3, 0.2)  # of module 1 and 2
RNG = np.random.default_rng(0)
# Rows of 9 positions: whole ones, and packed ones with padding.
WHOLE = [RNG.integers(0, 30, 10) for _ in range(8)]
SHORT = [RNG.integers(0, 30, size) for size in (6, 4) * 8]


# ---- the oracle --------------------------------------------------------------------------------


def rms(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None]


def turned(x):
    """Rotary positions of [n, heads, c], pairs (i, i + c / 2)."""
    n, _, c = x.shape
    angles = np.arange(n)[:, None, None] * 10000.0 ** (-np.arange(0, c, 2) / c)
    angles = jnp.asarray(angles, jnp.float32)
    a, b = x[..., : c // 2], x[..., c // 2 :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(w, x):
    """A decoder layer on one sequence [n, d]."""
    n = x.shape[0]
    fused = rms(x, w["attention_norm"]["scale"]) @ w["attention"]["qkv"]["linear"]["weight"]
    fused = fused.reshape(n, 2, 4, 4)  # heads of keys, (2 of queries, key, value), numbers
    q, k, v = fused[:, :, :2].reshape(n, 4, 4), fused[:, :, 2], fused[:, :, 3]
    q, k, v = turned(q), jnp.repeat(turned(k), 2, axis=1), jnp.repeat(v, 2, axis=1)
    scores = jnp.einsum("ihc,jhc->hij", q, k) / 2.0
    scores = jnp.where(jnp.tril(jnp.ones((n, n), bool))[None], scores, -jnp.inf)
    y = jnp.einsum("hij,jhc->ihc", jax.nn.softmax(scores), v).reshape(n, 16)
    x = x + y @ w["attention"]["out"]["weight"]
    gate, up = jnp.einsum("nd,dsf->snf", rms(x, w["mlp_norm"]["scale"]), w["mlp"]["gate_up"])
    return x + (jax.nn.silu(gate) * up) @ w["mlp"]["down"]["weight"]


def entropy(logits, words):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, None], 1).sum()


def oracle(params, documents, weights):
    """The loss of all documents, and L_0, L_1, ..., by equations 21 to 25 of the report."""
    blocks, modules = params["blocks"], params["modules"]
    table, out = params["embed"], params["head"]
    sums = [0.0] * (1 + len(modules))
    T = sum(len(tokens) - 1 for tokens in documents)

    def of_one(tokens):
        embedded = table[tokens[:-1]]
        h = embedded
        for w in blocks:
            h = layer(w, h)
        h = rms(h, params["norm"])
        found = [entropy(h @ out.T, tokens[1:])]
        for k, w in enumerate(modules, start=1):
            n = len(tokens) - 1 - k  # the positions that have a label
            e = rms(embedded[k:], w["embed_norm"]["scale"])
            joined = jnp.concatenate([e, rms(h[:n], w["hidden_norm"]["scale"])], -1) @ w["join"]
            h = rms(layer(w, joined), w["norm"]["scale"])
            found.append(entropy(h @ out.T, tokens[k + 1 :]))
        return found

    for size in {len(tokens) for tokens in documents}:
        same = jnp.stack([tokens for tokens in documents if len(tokens) == size])
        sums = [a + b.sum() for a, b in zip(sums, jax.vmap(of_one)(same), strict=True)]
    losses = [one / T for one in sums]
    return losses[0] + sum(w * one for w, one in zip(weights, losses[1:], strict=True)), losses


def as_oracle(layers, *, modules: int, tied: bool):
    """Weights, or gradients, of `Pipeline.to_layers` under the oracle's names."""
    tree = jax.tree.map(jnp.asarray, layers)
    blocks = [
        stage["blocks"][n] for stage in tree["stages"] for n in sorted(stage.get("blocks", {}))
    ]
    first = len(blocks) - modules
    ahead = [dict(one) for one in blocks[first:]]
    norm = ahead[0].pop("main_norm")["scale"]
    table = tree["embed"]["table"]
    head = {} if tied else {"head": tree["head"]["table"]}
    return {"blocks": blocks[:first], "modules": ahead, "norm": norm, "embed": table, **head}


@functools.cache
def wanted(D: int, tied: bool, kind: str):
    """Loss, losses of each head and gradients of the plain model."""
    _, params = made("Ett" + "m" * D + "L", D, tied)
    documents = WHOLE if kind == "whole" else SHORT

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        return oracle({"head": params["embed"], **params}, documents, WEIGHTS[:D])

    (value, losses), grads = jax.jit(loss)(params)
    return value, losses, grads


# ---- the pipeline ------------------------------------------------------------------------------


def made(layout: str, D: int, tied: bool, **changes: Any):
    """Parts of a decoder with large random weights, and these under the oracle's names."""
    config = DecoderConfig(**SIZES, tied=tied, mtp_layers=D, **changes)
    counts, modules = parse_layout(layout, 2, D), place_modules(layout)
    stages, embed, head = build(config, counts, nnx.Rngs(0), mtp=modules)
    blocks = [block for stage in stages for block in stage.blocks]
    for n, part in enumerate([*blocks, embed, *([] if tied else [head])]):
        for m, (_, leaf) in enumerate(nnx.to_flat_state(nnx.state(part, nnx.Param))):
            noise = jax.random.normal(jax.random.key(100 * n + m), leaf.shape)
            leaf.set_value(0.3 * noise + float(leaf.ndim == 1))
    tree = {
        "stages": [{"blocks": dict(enumerate(map(plain, blocks)))}],
        "embed": plain(embed),
        "head": plain(head),
    }
    return (stages, embed, head), as_oracle(tree, modules=D, tied=tied)


def plain(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def batch(kind: str):
    """Inputs, targets and extras of 8 rows of 9 positions."""
    if kind == "whole":
        rows = np.stack(WHOLE)
        return rows[:, :-1], rows[:, 1:], {}
    (found,) = packed(SHORT, rows=8, length=9)
    return found.inputs, found.targets, found.extras


CASES = [
    # schedule, S, data, layout, D, tied, kind, options
    ("1f1b", 2, 2, "Et|tmL", 1, True, "packed", {}),
    ("gpipe", 2, 2, "Et|tmmL", 2, False, "whole", {}),
    ("1f1b", 2, 1, "Et|tmmL", 2, True, "whole", {"remat": None}),
    ("interleaved_1f1b", 2, 2, "Et|t|m|L", 1, True, "packed", {}),
    ("zb_h1", 2, 1, "Ett|mmL", 2, False, "packed", {"remat": None}),
    ("zb_v", 2, 2, "Et|t|m|mL", 2, True, "packed", {"remat": None}),
    ("gpipe", 4, 2, "Et|t|m|mL", 2, True, "packed", {}),
    ("1f1b", 4, 2, "E|t|t|mmL", 2, False, "packed", {"remat": None}),
    ("interleaved_1f1b", 4, 1, "E|t|t|||m|m|L", 2, True, "whole", {}),
    ("zb_h1", 4, 2, "E|tt|m|L", 1, True, "packed", {}),
    ("zb_v", 4, 1, "E|t|t|||m||L", 1, True, "packed", {"remat": None}),
    ("zb_v", 4, 2, "E|t|t|||m|m|L", 2, False, "packed", {}),
]


@pytest.mark.slow
def test_the_plain_model_has_the_losses_of_the_report():
    (stages, embed, head), params = made("Et|tmL", 1, tied=True)
    inputs, targets, extras = batch("packed")

    @jax.jit
    def both(params):
        x = embed(inputs)
        for stage in stages:
            x = stage(x, **extras)
        _, metrics = MultiTokenLoss(has_metrics=True)(head(x), targets)
        found = [total / weight for total, weight in metrics.values()]
        return found, oracle({"head": params["embed"], **params}, SHORT, WEIGHTS[:1])[1]

    assert_close(*both(params))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}-{case[3]}")
def test_loss_and_every_gradient_of_the_report(case):
    schedule, S, data, layout, D, tied, kind, options = case
    (stages, embed, head), _ = made(layout, D, tied)
    inputs, targets, extras = batch(kind)
    loss_fn = MultiTokenLoss(WEIGHTS[:D], has_metrics=True)
    mesh = make_mesh(stage=S, data=data)
    pipe = Pipeline(
        stages, 4, embed=embed, head=head, loss_fn=loss_fn, mesh=mesh, schedule=schedule, **options
    )
    (loss, metrics), grads = pipe.value_and_grad(inputs, targets, extras=extras, has_aux=True)
    value, losses, want = wanted(D, tied, kind)
    assert_close(loss, value)
    assert_close([metrics[name] for name in ["main", "mtp_1", "mtp_2"][: 1 + D]], losses)
    assert_close(as_oracle(pipe.to_layers(grads), modules=D, tied=tied), want)


@pytest.mark.slow
def test_a_model_over_tensor_has_the_gradients_of_the_report():
    (stages, embed, head), _ = made("Ett|mL", 1, tied=True)
    inputs, targets, extras = batch("packed")
    ends = {"embed": embed, "head": head, "loss_fn": MultiTokenLoss()}
    pipe = Pipeline(stages, 2, **ends, mesh=make_mesh(stage=2, tensor=2))
    loss, grads = pipe.value_and_grad(inputs, targets, extras=extras)
    value, _, want = wanted(1, tied=True, kind="packed")
    assert_close(loss, value)
    assert_close(as_oracle(pipe.to_layers(grads), modules=1, tied=True), want)


@pytest.mark.slow
def test_embedding_only_and_head_only_stages():
    """Without modules too: E and L alone give the loss and the gradients of one stage."""
    config = DecoderConfig(**SIZES, tied=True)
    rows, found = np.stack(WHOLE), []
    for S, layout in ((1, "EttL"), (4, "E|t|t|L")):
        stages, embed, head = build(config, parse_layout(layout, 2), nnx.Rngs(0))
        ends = {"embed": embed, "head": head, "loss_fn": next_token_loss}
        pipe = Pipeline(stages, 4, **ends, mesh=make_mesh(stage=S), schedule="1f1b")
        loss, grads = pipe.value_and_grad(rows[:, :-1], rows[:, 1:])
        tree = pipe.to_layers(grads)
        blocks = [one for stage in tree["stages"] for one in stage.get("blocks", {}).values()]
        found.append((loss, blocks, tree["embed"], tree["head"]))
    assert_close(found[1], found[0])


@pytest.mark.slow
def test_text_is_made_by_the_main_model():
    """The words are those of greedy decoding by ``logits`` alone; modules change none of them."""
    (stages, embed, head), _ = made("Et|t|m|L", 1, tied=True)
    pipe = Pipeline(stages, 2, embed=embed, head=head, mesh=make_mesh(stage=2))
    tokens = np.stack(WHOLE)[:, :4]
    text = tokens
    for _ in range(5):
        following = np.asarray(pipe(text)["logits"])[:, -1].argmax(-1)
        text = np.concatenate([text, following[:, None]], axis=1)
    assert np.array_equal(generate(pipe, tokens, 5), text[:, 4:])


def message(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_modules_that_cannot_be_placed():
    config = DecoderConfig(**SIZES, mtp_layers=1)
    for given in (1, "01", [0, "1"], [0, True], [-1, 2]):
        assert message(lambda given=given: build(config, [1, 1], mtp=given)) == (
            f"mtp={given!r}: must be a list of integers >= 0, the number of multi-token modules of "
            f"each of 2 stages; leave mtp= out to put all on the last stage"
        )

    def place(mtp):
        return message(lambda: build(config, [1, 1], mtp=mtp))

    assert place([0, 2]) == (
        "mtp=[0, 2]: must be the number of multi-token modules of each of 2 stages, and the model "
        "has 1 together; leave mtp= out to put all on the last stage"
    )
    assert place([1, 0]) == (
        "mtp=[1, 0]: stage 0 has a multi-token module and stage 1 a later block; modules read the "
        "output of the last block, so put them into its stage or later ones"
    )
    assert message(lambda: build(config, [1, 1], vocabulary="stage")) == (
        "vocabulary='stage' with multi-token prediction (mtp_layers=1): ranks share the table of a "
        "plain embedding and head; use vocabulary='ends'"
    )
    cut = Context("context", "allgather")
    assert message(lambda: build(config, [1, 1], context=cut)) == (
        f"multi-token prediction with sequences that are cut over a mesh axis (context={cut!r}): "
        f"no way of exchanging keys and values has them; leave context= out"
    )
    assert message(lambda: DecoderConfig(**SIZES, mtp_layers=-1)) == (
        "DecoderConfig: mtp_layers=-1 must be an integer >= 0"
    )
    assert message(lambda: DecoderConfig(**SIZES, mtp_layers=1, rope=None, positions=8)) == (
        "DecoderConfig: mtp_layers=1 with learned positions: a module joins embeddings of other "
        "positions, which have none of their own; give rope=, or mtp_layers=0"
    )


def test_what_lies_further_on():
    """In sequences shorter than a module sees there is nothing, and no document reaches another."""
    x = jnp.arange(1.0, 6.0)[None, :, None]
    assert shifted(x, 2)[0, :, 0].tolist() == [3, 4, 5, 0, 0]
    assert shifted(x, 7)[0, :, 0].tolist() == [0] * 5
    assert not within(x, None, 7).any()
    assert within(x, None, 2)[0].tolist() == [True, True, True, False, False]
    segments = jnp.asarray([[1, 1, 1, 2, 2]])
    assert within(x, segments, 1)[0].tolist() == [True, True, False, True, False]
    assert within(x, segments, 2)[0].tolist() == [True, False, False, False, False]


@pytest.mark.slow
def test_losses_that_do_not_fit():
    z, words = jnp.zeros((1, 4, 30)), jnp.zeros((1, 4), jnp.int32)
    outputs = {"logits": z, "ahead": (z,), "inside": (jnp.ones((1, 4), bool),)}
    assert message(lambda: MultiTokenLoss(-1.0)) == (
        "MultiTokenLoss(weight=-1.0): must be a finite number >= 0, which all modules share, or a "
        "tuple with one for each module"
    )
    assert message(lambda: MultiTokenLoss((0.1, 0.2))(outputs, words)) == (
        "MultiTokenLoss(weight=(0.1, 0.2)) has 2 weights, and the model has 1 modules: give one "
        "for each, or one number for all"
    )
    assert message(lambda: MultiTokenLoss()(z, words)) == (
        "MultiTokenLoss was given the outputs of a model that predicts one token: build it with "
        "DecoderConfig(mtp_layers=...), or give loss_fn=next_token_loss"
    )
    assert message(lambda: next_token_loss(outputs, words)) == (
        "next_token_loss was given the outputs of a model with multi-token prediction, a dict: "
        "give loss_fn=MultiTokenLoss(), or load the checkpoint with mtp=0; or let modules be "
        "untrained: lambda outputs, targets: next_token_loss(outputs['logits'], targets)"
    )
    assert message(lambda: MultiTokenLoss(has_metrics="no")) == (
        "MultiTokenLoss(has_metrics='no'): must be True (it returns the loss and metrics, for "
        "has_aux=True) or False"
    )
    for loss, given in ((MultiTokenLoss(), outputs), (next_token_loss, z)):
        assert message(lambda f=loss, x=given: f(x, words[:, :1])) == (
            "targets of a microbatch are of [1, 1], and its logits are of [1, 4] positions: give "
            "one word for each position, or a pair (words, weights)"
        )
        assert "are of [1, 4], [1, 4], [1, 4], and its" in message(
            lambda f=loss, x=given: f(x, (words, words, words))
        )
    total, weight = MultiTokenLoss(0.3)(outputs, words)
    assert_close(total / weight, np.log(30) * (1 + 0.3 * 3 / 4))  # the last position has no label
    assert MultiTokenLoss([0.1, 0.2]) == MultiTokenLoss((0.1, 0.2))  # as a file gives it
