"""Errors of `Pipeline(slices=N)`: options, batches, and parts that mix positions (issue 41)."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import schedules
from collectives import make_mesh
from pipeline import CrossEntropy, Pipeline
from pipeline.layers import Attention, MixtureOfExperts, SequenceSlice, data_mask
from pipeline.training.batches import bucketed, masked, padded
from tests.support.close import assert_close

X = jnp.ones((4, 8, 4))
WORDS = jnp.zeros((4, 8), jnp.int32)
SEES = "with slices=2 it sees one slice of a sequence at a time"


class Pointwise(nnx.Module):
    """A stage that mixes no positions, though it folds them into rows for a while."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(4, rngs=rngs)
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.up(self.norm(x).reshape(-1, 4)).reshape(*x.shape[:-1], 8)
        return x + self.down(jax.nn.gelu(y))


class Mixing(Pointwise):
    """A stage that does something else beside."""

    def __init__(self, rngs: nnx.Rngs, mix: Callable[..., Any]) -> None:
        super().__init__(rngs)
        self.mix = mix

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.mix(x)


def mean(y: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.square(y - targets).mean()


def pipe_of(make: Callable[..., Any] = Pointwise, *given: Any, **options: Any) -> Pipeline:
    mesh = make_mesh(stage=2, devices=jax.devices()[:2])
    stages = [make(nnx.Rngs(0), *given) for _ in range(2)]
    made: dict[str, Any] = {"loss_fn": mean, "slices": 2, "mesh": mesh}
    return Pipeline(stages, 2, **(made | options))


def message(run: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        run(*args, **kwargs)
    return str(caught.value).partition("\n")[0]


def refused(run: Callable[..., Any], *args: Any) -> str:
    """A message without the numbers of a trial."""
    place = r"place \d+ of \d+ in its result differs by \S+% of the largest entry"
    text = re.sub(place, "WHERE", message(run, *args))
    return re.sub(r"[-.e\d]+ for random numbers together, [-.e\d]+ for their parts", "VALUES", text)


def test_options_that_do_not_fit():
    assert message(pipe_of, slices=0) == (
        "slices=0: must be an integer >= 1, the number of equal parts into which every sequence is "
        "cut, the lengths of slices, or None for whole sequences"
    )
    assert message(pipe_of, slices=(8,)) == (
        "slices=(8,): lengths of slices must be two or more integers >= 1, the positions of each "
        "slice; give such lengths, the number of equal slices, or None for whole sequences"
    )
    assert message(pipe_of, schedule="gpipe") == (
        "slices=2 with schedule='gpipe': this schedule runs whole sequences; leave slices out, or "
        "choose 'seq1f1b' or 'seq1f1b_zb'"
    )
    assert message(pipe_of, schedule="seq1f1b", slices=None) == (
        "schedule='seq1f1b' without slices=: it cuts every sequence into slices; give slices=2 or "
        "more, or choose one of schedules.names() for whole sequences"
    )
    given = schedules.build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=4)
    assert message(pipe_of, schedule=given) == (
        "slices=2 with schedule 'seq1f1b' of 4 slices; give slices=4, or leave it out"
    )
    assert pipe_of(schedule=given, slices=None).plan.schedule.num_slices == 4
    assert message(pipe_of, offload="stash") == (
        "slices=2 with offload='stash': carries of slices stay on the device: leave offload out, "
        "or leave slices out"
    )
    given = schedules.build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=4)
    assert message(pipe_of, schedule=given, slices=[5, 3]) == (
        "slices=2 with schedule 'seq1f1b' of 4 slices; give slices=4, or leave it out"
    )


def test_default_schedule_and_one_slice():
    plan = pipe_of(slices=4).plan
    assert (plan.schedule.name, plan.schedule.num_slices) == ("seq1f1b", 4)
    assert plan.why == "the default for slices of sequences"
    assert pipe_of(slices=1).plan.schedule.num_slices == 1
    assert pipe_of().replace(slices=None).plan.schedule.num_slices == 1


def test_batches_that_cannot_be_cut():
    pipe = pipe_of(slices=4)
    assert message(pipe.loss, X[:, :6], X[:, :6]) == (
        "inputs has 6 positions, which slices=4 cannot share equally; pad sequences to 8, or use "
        "slices=3 or 2"
    )
    assert message(pipe_of(slices=(4, 3)).loss, X, X) == (
        "inputs has 8 positions, and slices=(4, 3) has 7 together; give lengths whose sum is 8"
    )
    assert message(pipe.loss, X, X[:, 0, 0]) == (
        "targets is float32[4]: slices=4 cuts dim 1 of every leaf, which has 8 positions in inputs "
        "and no positions here; give one entry for each position, or [rows, 1, ...] for what is "
        "the same in all, or leave slices out"
    )
    assert message(pipe.loss, X, X, extras={"table": X[:, :3]}) == (
        "extras['table'] is float32[4,3,4]: slices=4 cuts dim 1 of every leaf, which has 8 "
        "positions in inputs and 3 in dim 1 here; give one entry for each position, or [rows, 1, "
        "...] for what is the same in all, or leave slices out"
    )
    assert message(pipe.loss, X[:, 0, 0], X[:, 0, 0]) == (
        "slices=4, and no leaf of the batch has positions, a dim of more than 1 after its rows; "
        "leave slices out"
    )


def running_sum(x: jax.Array) -> jax.Array:
    start = jnp.zeros((x.shape[0], x.shape[2]))
    _, sums = jax.lax.scan(lambda s, a: (s + a, s), start, jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(sums, 0, 1)


MIXING = {
    "a mean": lambda x: x.mean(1, keepdims=True),
    "a product": lambda x: (x @ x.swapaxes(1, 2)) @ x,
    "a roll": lambda x: jnp.roll(x, 1, axis=1),
    "a running sum": lambda x: jnp.cumsum(x, axis=1),
    "a loop": running_sum,
    "a convolution": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((3, 4, 4)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "places": lambda x: x + jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None],
}


@pytest.mark.parametrize(
    ("options", "extras"),
    [
        ({}, None),
        ({"embed": nnx.Linear(8, 8, rngs=nnx.Rngs(0))}, None),
        ({"slices": (2, 6)}, {"weight": jnp.ones((4, 8))}),
    ],
)
def test_features_of_rows_without_positions_are_not_cut(options, extras) -> None:
    """As if they were positions (issue 52)."""
    pipe = pipe_of(**options)
    with pytest.raises(ValueError) as caught:
        pipe.loss(jnp.ones((4, 8)), jnp.ones((4, 8)), extras=extras)
    assert str(caught.value) == (
        f"inputs is float32[4,8]: slices={pipe.plan.options.slices} cuts dim 1 of every leaf, and "
        f"in arrays of floats [rows, features] that are the features; give positions a dim of "
        f"their own, [rows, positions, features], or leave slices out"
    )


@pytest.mark.parametrize("how", MIXING)
def test_stages_that_mix_positions_without_a_method_for_it(how):
    assert refused(pipe_of(Mixing, MIXING[how]).loss, X, X) == (
        f"stages[0] mixes positions (WHERE), and {SEES}: give it a method call_slice(x, earlier, "
        f"part, **extras) that returns (y, own), as pipeline.layers.Attention has, or leave slices "
        f"out"
    )


def test_dropout_belongs_to_a_slice():
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs.fork()))

    found = nnx.eval_shape(lambda pipe: pipe.loss(X, X), pipe_of(make))
    assert found.shape == ()


def test_embed_head_and_loss_that_mix_positions():
    places = jnp.arange(32.0).reshape(8, 4)
    embed: Any = lambda words: jax.nn.one_hot(words, 4) + places[None, : words.shape[1]]  # noqa: E731
    assert refused(pipe_of(embed=embed).loss, WORDS, X) == (
        f"embed mixes positions (WHERE), and {SEES}: give it a method call_slice(inputs, earlier, "
        f"part) that returns (x, ()) and takes places from part.places(t), or give it positions as "
        f"a part of inputs, or leave slices out"
    )
    head: Any = lambda y: y - y.max(1, keepdims=True)  # noqa: E731
    assert refused(pipe_of(head=head).loss, X, X) == (
        f"head mixes positions (WHERE), and {SEES}: let the last stage do "
        f"what mixes positions, or leave slices out"
    )

    def shifts(logits: jax.Array, words: jax.Array) -> jax.Array:
        xent = optax.softmax_cross_entropy_with_integer_labels
        return xent(logits[:, :-1], words[:, 1:]).mean()

    assert refused(pipe_of(loss_fn=shifts).loss, X, WORDS) == (
        f"loss_fn mixes positions (VALUES), and {SEES}: shift targets before they "
        f"are cut, as pipeline.training.batches.next_tokens does, and return (sum, weight), or "
        f"leave slices out"
    )


NO_SUMS: dict[str, Callable[..., Any]] = {
    "a quotient of sums": lambda y, t: (y * t).sum() / t.sum(),
    "a variance": lambda y, _: jnp.square(y - y.mean(1, keepdims=True)).mean(),
    "a function of a mean": lambda y, t: jnp.exp(-mean(y, t)),
    "a maximum": lambda y, _: y.max(1).mean(),
}


@pytest.mark.parametrize("how", NO_SUMS)
def test_losses_that_are_no_sums_over_positions(how):
    assert refused(pipe_of(loss_fn=NO_SUMS[how]).loss, X, X).startswith(
        f"loss_fn mixes positions (VALUES), and {SEES}: shift targets"
    )


@pytest.mark.parametrize(
    ("loss_fn", "value"),
    [
        (lambda y, t: jnp.square(y - t).sum((1, 2)).mean(), "0.5"),
        (lambda y, t: (jnp.square(y - t).sum(), y.shape[0]), "0.5"),
        (lambda y, t: (mean(y, t), y.shape[1]), "2"),
    ],
)
def test_losses_that_divide_by_what_does_not_grow_with_positions(loss_fn, value):
    assert message(pipe_of(loss_fn=loss_fn).loss, X, X) == (
        f"loss_fn sums over positions and divides by what does not grow as they do, and with "
        f"slices=2 its value would be {value} of that of whole sequences: return (sum, weight) "
        f"that are both sums over positions, or a mean over them, or leave slices out"
    )


def test_pairs_of_means_in_slices_of_several_lengths():
    pairs: list[Any] = [
        lambda y, t: (mean(y, t), 1),
        lambda y, t: (mean(y, t), (t > 0).mean()),
        lambda y, t: ((jnp.square(y - t) / y.shape[1]).sum(), y.shape[0]),
    ]
    for loss_fn in pairs:
        assert message(pipe_of(loss_fn=loss_fn, slices=(5, 3)).loss, X, X) == (
            "loss_fn returns (sum, weight) that do not grow with positions, and slices=(5, 3) "
            "would count equally though their lengths differ: return (sum, weight) that are both "
            "sums over positions, or a mean over them, or leave slices out"
        )


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, (5, 3)])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, t: (jnp.square(y - t) / y.shape[1]).sum((1, 2)).mean(),
        lambda y, t: (jnp.square(y - t).sum(), jnp.ones(t.shape).sum()),
        lambda y, t: mean(y, t) + 0.1 * jnp.abs(y).mean() + 0.5,
        lambda y, t: -jnp.take_along_axis(jax.nn.log_softmax(y), t[..., :1].astype(int), 2).mean(),
    ],
)
def test_losses_that_are_means_over_positions(loss_fn, slices):
    make = jax.random.normal
    given = make(jax.random.key(0), X.shape), make(jax.random.key(1), X.shape)
    pipe = pipe_of(loss_fn=loss_fn, slices=slices)
    assert_close(pipe.loss(*given), pipe.replace(slices=None).loss(*given))


@pytest.mark.slow
def test_pairs_of_means_in_equal_slices():
    pipe = pipe_of(loss_fn=lambda y, t: (mean(y, t), 1))
    assert_close(pipe.loss(X, 2 * X), pipe.replace(slices=None).loss(X, 2 * X))


class Sliced(Pointwise):
    """A stage that knows of slices."""

    def call_slice(self, x: Any, _: Any, __: Any) -> Any:
        return Pointwise.__call__(self, x), ()


class Doubled(Sliced):
    """A stage whose call is its own, and what it runs on slices inherited."""

    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


def test_call_slice_that_is_older_than_call():
    assert message(pipe_of(Doubled).loss, X, X) == (
        "Doubled has a __call__ of its own, and the call_slice of Sliced, which slices=N would run "
        "in its place: give it a call_slice of its own that does the same, or leave slices out"
    )


def test_positions_that_lie_elsewhere_are_warned_of():
    def turn(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 0, 1)

    with pytest.warns(UserWarning, match="cannot be told") as caught:
        pipe_of(embed=turn, head=turn).loss(X, X)
    assert [str(one.message).partition(", and")[0] for one in caught] == [
        f"whether {part} mixes positions cannot be told (no array that it is given is [rows, 4, "
        f"...])"
        for part in ("stages[0]", "head")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, (5, 3)])
def test_inputs_of_one_entry_for_all_positions_have_a_gradient(slices):
    class Scaled(Pointwise):
        def __call__(self, x: Any) -> Any:
            y, scale = x
            return super().__call__(y) * scale, scale

    pipe = pipe_of(Scaled, loss_fn=lambda y, t: mean(y[0], t), slices=slices)
    scale = 1 + jnp.arange(4.0).reshape(4, 1, 1)
    found, wanted = (
        jax.grad(lambda scale, one=one: one.loss((X, scale), X))(scale)
        for one in (pipe, pipe.replace(slices=None))
    )
    assert_close(found, wanted)


def called_back(x: jax.Array) -> jax.Array:
    """A function on the host, which no trial may call."""
    x = jax.lax.stop_gradient(x)
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_what_is_not_known_is_warned_of_once():
    pipe = pipe_of(Mixing, called_back)
    with pytest.warns(UserWarning, match="mixes positions") as caught:
        pipe.loss(X, X)
    (one,) = caught
    assert str(one.message) == (
        f"whether stages[0] mixes positions cannot be told (it has the primitive 'pure_callback'), "
        f"and {SEES}: if it does, give it a method call_slice(x, earlier, part, **extras) that "
        f"returns (y, own), as pipeline.layers.Attention has, or leave slices out; if it does not, "
        f"let it say so, mixes_positions = False"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.loss(X[:2], X[:2], num_microbatches=1)


class Declared(Mixing):
    mixes_positions = False


def test_a_declared_part_is_tried_by_check_alone():
    pipe = pipe_of(Declared, called_back)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.loss(X, X)
        assert pipe.check(X, X) == []
        pipe = pipe_of(Declared, MIXING["a roll"])
        pipe.loss(X, X)
    (text,) = pipe.check(X, X)
    assert text.startswith("stages[0] says mixes_positions = False and mixes positions (place 0 ")


class Wrong(Pointwise):
    """A stage whose method returns no pair."""

    def call_slice(self, x: Any, _: Any, __: Any) -> Any:
        return self(x)


def test_call_slice_that_returns_no_pair():
    assert message(pipe_of(Wrong).loss, X, X) == (
        "call_slice of Wrong returned a DynamicJaxprTracer: return a pair (y, own), the output of "
        "this slice and a pytree of arrays that later slices of the sequence read as earlier"
    )


class Normed(nnx.Module):
    """A head whose norm has dims of size 1."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.out = nnx.RMSNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.norm(x))


@pytest.mark.slow
@pytest.mark.parametrize("slices", [4, 8])
def test_slices_of_one_position_are_those_of_a_whole_sequence(slices):
    """A dim of size 1 is not taken for that of positions (issue 52)."""
    losses = []
    for count in None, slices:
        head = Normed(nnx.Rngs(3))
        x = jax.random.normal(jax.random.key(0), X.shape)
        losses.append(pipe_of(slices=count, head=head).value_and_grad(x, X)[0])
    assert_close(*losses)
    assert "head mixes positions (WHERE)" in refused(
        pipe_of(slices=8, head=lambda y: jnp.cumsum(y, 1)).value_and_grad, X, X
    )


class Routed(nnx.Module):
    """A stage with a mixture of experts, and with slices or without."""

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.experts = MixtureOfExperts(4, 6, 4, 2, rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.experts(x)


class SlicedRouted(Routed):
    def call_slice(self, x: jax.Array, earlier: Any, part: SequenceSlice) -> Any:
        y, own = self.experts.call_slice(x, earlier, part)
        return x + y, own

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x)


BALANCES: Any = [
    {"balance_weight": 0.3},
    {"balance_weight": 0.3, "balance": "sequence"},
    {"balance_weight": 0.3, "z_weight": 0.1, "scoring": "sigmoid"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slices", "how"),
    [
        (4, {}),
        (2, {"remat": None, "schedule": "seq1f1b_zb"}),
        ((5, 3), {}),
        (2, {"mesh": {"stage": 2, "data": 2, "context": 2}, "batch": P("data", "context")}),
    ],
)
@pytest.mark.parametrize("options", BALANCES)
def test_balance_losses_are_those_of_whole_sequences(options, slices, how):
    x = jax.random.normal(jax.random.key(0), X.shape)
    sizes, found = how.get("mesh", {"stage": 2}), []
    how = {**how, "mesh": make_mesh(**sizes)}
    whole = {"slices": None, "mesh": make_mesh(stage=2, data=sizes.get("data", 1))}
    for more in whole, {"slices": slices, **how}:
        pipe = pipe_of(functools.partial(SlicedRouted, **options), **more)
        loss, grads = pipe.value_and_grad(x, X)
        found.append((loss, pipe.to_layers(grads)["stages"]))
    jax.tree.map(assert_close, *found[::-1])


def test_a_balance_loss_without_a_carry_is_refused_in_slices():
    class Hidden(Routed):
        def call_slice(self, x: jax.Array, _: Any, __: SequenceSlice) -> Any:
            return self(x), ()

    pipe = pipe_of(functools.partial(Hidden, balance_weight=0.3))
    assert message(pipe.value_and_grad, X, X) == (
        "balance='microbatch' in a stage that runs on slices of sequences (slices=): this loss "
        "needs the counts of all slices: in the stage's call_slice(x, earlier, part), call "
        "experts.call_slice(x, earlier, part) and return its carry; or take balance='batch', or "
        "leave slices out"
    )


# --- padding (issue 67) ---


class Ends(nnx.Module):
    """An embed or a head that sets positions of padding to 0."""

    def __init__(self, part: nnx.Module) -> None:
        self.part = part

    def __call__(self, x: jax.Array) -> jax.Array:
        y, mask = self.part(x), data_mask()
        return y if mask is None else jnp.where(mask[..., None], y, 0)


class MaskedPointwise(Pointwise):
    """A stage without a method for slices that does so."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y, mask = super().__call__(x), data_mask()
        return y if mask is None else jnp.where(mask[..., None], y, 0)


@pytest.mark.parametrize("where", ["embed", "head", "stages"])
def test_a_part_that_reads_the_mask_entry_by_entry_is_not_refused(where: str) -> None:
    rows = [np.arange(n) + 1 for n in (5, 9, 7, 3)]
    (batch,) = bucketed(rows, rows=4, lengths=(8,))
    losses = []
    for slices in None, 2:
        embed: Any = nnx.Embed(16, 4, rngs=nnx.Rngs(1))
        head: Any = nnx.Linear(4, 16, rngs=nnx.Rngs(2))
        embed = Ends(embed) if where == "embed" else embed
        head = Ends(head) if where == "head" else head
        pipe = pipe_of(
            MaskedPointwise if where == "stages" else Pointwise,
            embed=embed,
            head=head,
            loss_fn=CrossEntropy(),
            slices=slices,
        )
        losses.append(pipe.loss(batch.inputs, batch.targets))
    assert_close(losses[1], losses[0], tolerance=1e-5)


@pytest.mark.parametrize("loss_fn", [mean, lambda y, t: (((y - t) ** 2).sum(), 1.0 * t.size)])
def test_rows_that_padded_has_added_count_in_no_slice(loss_fn: Callable[..., Any]) -> None:
    x, t = np.random.default_rng(0).normal(size=(2, 3, 8, 4)).astype(np.float32)
    (batch,) = padded([(x, t)], 4)
    whole, cut = (
        pipe_of(loss_fn=masked(loss_fn), slices=slices).value_and_grad(batch.inputs, batch.targets)
        for slices in (None, 2)
    )
    assert_close(cut, whole, tolerance=1e-5)
    stages = pipe_of().stages()
    assert_close(cut[0], mean(stages[1](stages[0](x)), t), tolerance=1e-5)


def test_rows_that_padded_has_added_are_refused_in_slices_of_several_lengths() -> None:
    (batch,) = padded([(X[:3], X[:3])], 4)
    with pytest.raises(ValueError, match="padded") as caught:
        pipe_of(loss_fn=masked(mean), slices=(2, 6)).loss(batch.inputs, batch.targets)
    assert str(caught.value) == (
        "padded() has added rows, and slices=(2, 6) have several lengths: a masked loss counts "
        "each slice of a row equally; give slices=2, or whole batches"
    )


def test_modules_that_are_called_by_call_slice_alone() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attention = Attention(4, 2, 2, rngs)

        def call_slice(self, x: jax.Array, earlier: Any, part: Any) -> Any:
            if part is None:
                return x + self.attention(x), ()
            y, own = self.attention.call_slice(x, earlier, part)
            return x + y, own

    class Stage(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.block = Block(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.block.call_slice(x, None, None)[0]

        def call_slice(self, x: jax.Array, earlier: Any, part: Any) -> Any:
            return self.block.call_slice(x, earlier, part)

    x = jax.random.normal(jax.random.key(0), X.shape)
    whole, cut = (pipe_of(Stage, slices=slices).value_and_grad(x, X) for slices in (None, 2))
    assert_close(cut, whole, tolerance=1e-5)
