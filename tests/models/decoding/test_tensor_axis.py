"""Text on meshes with an axis ``tensor`` is that of the plain model, token for token.

Letters: S ranks, R ranks of ``tensor``, D data shards, V chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import collectives
from pipeline import Pipeline, generate, sample
from pipeline.decoders import DecoderConfig, build
from tests.models.decoding.test_generate import Flax, Own, make

WORDS, NEW = 30, 5
LENGTHS = np.array([4, 3, 1, 4, 2])
PROMPTS = jax.random.randint(jax.random.key(1), (5, 4), 0, WORDS)
SIZES: dict[str, Any] = {
    "vocabulary": WORDS,
    "width": 16,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "hidden": 24,
}
GPT2 = {"rope": None, "positions": 16, "norm": "layer", "gated": False, "kv_heads": 4}


def plain(model, **drawn):
    """The words of the model without caches, a mesh or a pipeline."""
    stages, embed, head = model
    logits = jax.jit(lambda t: head(functools.reduce(lambda x, s: s(x), stages, embed(t))))
    found = np.zeros((len(PROMPTS), NEW), int)
    for n, size in enumerate(LENGTHS):
        row = [*np.asarray(PROMPTS)[n, :size]]
        for i in range(NEW):
            whole = jnp.asarray([row + [0] * (PROMPTS.shape[1] + NEW - len(row))])
            key = drawn.get("key")
            if key is not None:
                key = jax.random.fold_in(jax.random.fold_in(key, n), i)
            rest = drawn | {"key": key}
            row.append(int(sample(logits(whole)[0, len(row) - 1], **rest)))
            found[n, i] = row[-1]
    return found


def decoder(counts, vocabulary="ends", **changes):
    found = build(DecoderConfig(**SIZES | changes), counts, nnx.Rngs(0), vocabulary=vocabulary)
    for module in (*found[0], *found[1:]):
        module.eval()
    return found


DRAWN = {"key": jax.random.key(5), "temperature": 0.7, "top_k": 7, "top_p": 0.9}
CASES = [
    ({"stage": 2, "tensor": 2}, [2, 2], {}, {}),
    ({"stage": 2, "tensor": 2, "data": 2}, [2, 2], {"tied": True}, {}),
    ({"stage": 1, "tensor": 2}, [2, 2], GPT2, {}),
    ({"stage": 2, "tensor": 2}, [1, 3], GPT2, {}),
    ({"stage": 2, "tensor": 2}, [1, 1, 1, 1], {"windows": (2, None) * 2}, {}),
    ({"stage": 2, "tensor": 2, "data": 2}, [1, 1, 1, 1], {}, {"schedule": "zb_v"}),
    ({"stage": 2, "tensor": 2}, [2, 2], {}, {"vocabulary": "stage"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [DRAWN, {}], ids=["drawn", "likeliest"])
@pytest.mark.parametrize(("axes", "counts", "changes", "options"), CASES)
def test_what_the_plain_model_says(axes, counts, changes, options, drawn):
    """A rank keeps keys and values of its own heads, and has logits of its own words."""
    shared = {name: options[name] for name in ("vocabulary",) if name in options}
    model = decoder(counts, **shared, **changes)
    np.testing.assert_array_equal(run(model, axes, options, drawn), plain(model, **drawn))


def run(model, axes, options, drawn):
    stages, embed, head = model
    mesh = collectives.make_mesh(**axes)
    pipe = Pipeline(stages, 2, embed=embed, head=head, mesh=mesh, **options)
    return generate(pipe, PROMPTS, NEW, lengths=LENGTHS, **drawn)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Flax, Own])
def test_weights_that_all_ranks_have(kind):
    """Stages that know nothing of the axis, and caches that are equal along it."""
    pipe, *_ = make(kind, S=2)
    wide = pipe.replace(mesh=collectives.make_mesh(stage=2, tensor=2))
    given = {"lengths": LENGTHS, "key": jax.random.key(5)}
    prompts = PROMPTS % 13
    wanted = generate(pipe, prompts, NEW, **given)
    np.testing.assert_array_equal(generate(wide, prompts, NEW, **given), wanted)


class Words(nnx.Module):
    """A head that says, rightly or not, how many words it has; each rank has some or all."""

    def __init__(self, head, words=None, *, gathers=False):
        self.head, self.gathers = head, gathers
        if words is not None:
            self.words = words

    def __call__(self, x):
        z = self.head(x)
        if self.gathers and jax.sharding.get_abstract_mesh().manual_axes:
            z = jax.lax.all_gather(z, "tensor", axis=-1, tiled=True)
        return z


@pytest.mark.slow
@pytest.mark.parametrize(("words", "gathers", "told"), [(None, False, 15), (WORDS, True, 30)])
def test_logits_that_may_be_those_of_all_words(words, gathers, told):
    stages, embed, head = decoder([2, 2])
    with pytest.raises(ValueError) as caught:
        run((stages, embed, Words(head, words, gathers=gathers)), {"stage": 2, "tensor": 2}, {}, {})
    said = "head has no attribute words" if words is None else "head.words is 30"
    assert str(caught.value).startswith(
        f"head returned {told} logits that differ between the ranks of axis 'tensor', which have "
        f"{2 * told} together, and {said}: gather all logits (jax.lax.all_gather(..., "
        f"to='invarying')), or, if each rank has those of its own words, in order, let head.words "
        f"be the number of all words, as VocabularyHead of pipeline.layers does"
    )


def test_an_axis_that_is_left_to_the_compiler():
    stages, embed, head = decoder([2, 2])
    with pytest.raises(ValueError) as caught:
        run((stages, embed, head), {"stage": 1, "tensor": 2}, {"auto_axes": ("tensor",)}, {})
    assert str(caught.value) == (
        "generate() of a model with caches runs where the kernel has every mesh axis in its own "
        "hands, and auto_axes=('tensor',) leaves 'tensor' to the compiler; use "
        "pipe.replace(auto_axes=(), mesh=...) with a mesh of the other axes"
    )


@pytest.mark.slow
def test_another_axis_that_splits_rows():
    model, rows = decoder([2, 2]), {"batch": P(("data", "expert"))}
    found = run(model, {"stage": 2, "expert": 2}, rows, DRAWN)
    np.testing.assert_array_equal(found, plain(model, **DRAWN))


def test_an_axis_that_splits_positions():
    model, cut = decoder([2, 2]), {"batch": P("data", "context")}
    with pytest.raises(ValueError) as caught:
        run(model, {"stage": 2, "context": 2}, cut, {})
    assert str(caught.value) == (
        "generate() of a model with caches feeds one position at a time, and this mesh splits "
        "positions over 'context'; use pipe.replace(mesh=..., batch=...) without that axis"
    )
