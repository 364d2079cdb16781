"""Text from a pipeline is that of the plain model, token for token.

Letters: S ranks, V chunks, D data shards, M microbatches.
"""

from __future__ import annotations

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import collectives
from pipeline import Pipeline, generate, sample
from pipeline.decoders import DecoderConfig, LatentConfig, build
from pipeline.vocabulary import VocabularyEmbedding, VocabularyHead
from tests.support import split_axes
from tests.support.grids import effort

WIDTH, WORDS, NEW = 8, 13, 6
PROMPTS = jax.random.randint(jax.random.key(1), (5, 5), 0, WORDS)
LENGTHS = np.array([5, 3, 1, 4, 5])
DRAWN = {"key": jax.random.key(5), "temperature": 0.7, "top_k": 4}


class Flax(nnx.Module):
    """flax's own attention, with its own caches."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x, mask=nnx.make_causal_mask(x[..., 0], dtype=bool))
        return x + self.dropout(jnp.tanh(self.linear(x)) * 2)


class Own(nnx.Module):
    """A running mean of what was seen, in a cache that takes any number of tokens at a time."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def start_decoding(self, rows, length):
        self.sum = nnx.Cache(jnp.zeros((rows, 1, WIDTH)))
        self.seen = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        sums, count = jnp.cumsum(x, axis=1), jnp.arange(1, x.shape[1] + 1)
        if hasattr(self, "seen"):
            sums, count = sums + self.sum[...], count + self.seen[...]
            self.sum[...], self.seen[...] = sums[:, -1:], count[-1]
        mean = sums / count[None, :, None].astype(x.dtype)
        return x + jnp.tanh(self.linear(mean)) * 2


class Embed(nnx.Module):
    """Words and positions, the next of which it remembers."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Param(rngs.params.normal((WORDS, WIDTH)))
        self.places = nnx.Param(rngs.params.normal((32, WIDTH)))

    def start_decoding(self, rows, length):
        self.next = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, tokens):
        place = jnp.arange(tokens.shape[1])
        if hasattr(self, "next"):
            place = place + self.next[...]
            self.next[...] += tokens.shape[1]
        return self.words[...][tokens] + self.places[...][place][None]


class Tied(nnx.Module):
    """A head that shares the words of an embed."""

    def __init__(self, embed):
        self.words = embed.words

    def __call__(self, x):
        return x @ self.words[...].T


def make(kind, *, S=2, V=1, D=1, vocabulary="ends", tied=True, **options):
    stages = [kind(nnx.Rngs(k)) for k in range(S * V)]
    rngs = nnx.Rngs(100)
    if vocabulary == "stage":
        embed = VocabularyEmbedding(WORDS, WIDTH, rngs=rngs)
        norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        shared = embed if tied else None
        head = VocabularyHead(WORDS, WIDTH, rngs=rngs, norm=norm, tied=shared, scale=1.0)
    else:
        embed = Embed(rngs)
        head = Tied(embed) if tied else nnx.Linear(WIDTH, WORDS, rngs=rngs)
    mesh = collectives.make_mesh(stage=S, data=D)
    options = {"embed": embed, "head": head, "mesh": mesh, "vocabulary": vocabulary} | options
    for module in (*stages, embed, head):
        module.eval()
    return Pipeline(stages, 4, **options), [*stages], embed, head


def plain(model, new=NEW, *, key=None, temperature=1.0, top_k=0, top_p=None, keys=None):
    """Tokens of the model without caches, and without a pipeline."""
    stages, embed, head = model

    @jax.jit
    def logits(tokens):
        return head(functools.reduce(lambda x, stage: stage(x), stages, embed(tokens)))

    found = np.zeros((len(PROMPTS), new), int)
    length = PROMPTS.shape[1] + new
    for n, (prompt, size) in enumerate(zip(np.asarray(PROMPTS), LENGTHS, strict=True)):
        row = [*prompt[:size]]
        own = None if key is None else jax.random.fold_in(key, n)
        own = own if keys is None else keys[n]
        for i in range(new):
            whole = jnp.asarray([row + [0] * (length - len(row))])
            drawn = None if own is None else jax.random.fold_in(own, i)
            token = sample(logits(whole)[0, len(row) - 1], drawn, temperature, top_k, top_p)
            row.append(int(token))
            found[n, i] = row[-1]
    return found


GRID = [
    (kind, S, V, D, vocabulary, drawn)
    for kind, (S, V, D), vocabulary, drawn in itertools.product(
        (Flax, Own),
        [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1), (2, 1, 2)],
        ("ends", "stage"),
        (False, True),
    )
]
FAST = [(Flax, 2, 2, 1, "ends", True)]
SLOW = [
    (Own, 1, 2, 1, "ends", False),
    (Flax, 4, 1, 1, "stage", True),
    (Own, 2, 1, 2, "ends", True),
    (Own, 2, 2, 1, "stage", False),
]


def cases():
    for case in GRID:
        name = f"{case[0].__name__}-{'-'.join(map(str, case[1:]))}"
        yield pytest.param(case, marks=effort(case, FAST, SLOW), id=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases()))
def test_what_the_plain_model_says(case):
    kind, S, V, D, vocabulary, drawn = case
    pipe, *model = make(kind, S=S, V=V, D=D, vocabulary=vocabulary)
    options = DRAWN if drawn else {}
    wanted = plain(model, **options)
    if drawn:
        stop = int(np.bincount(wanted[:, :-1].ravel()).argmax())
        options = options | {"stop": stop, "pad": WORDS}
        ended = np.cumsum(wanted == stop, axis=1) - (wanted == stop) > 0
        wanted = np.where(ended, WORDS, wanted)
        assert ended.any()
    found = generate(pipe, PROMPTS, NEW, lengths=LENGTHS, **options)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("M", [1, 5])
@pytest.mark.slow
def test_any_number_of_microbatches_and_prompts_fed_at_once(M):
    pipe, *model = make(Own, S=2, tied=False)
    keys = jax.random.split(jax.random.key(3), len(PROMPTS))
    wanted = plain(model, keys=keys)
    given = {"lengths": LENGTHS, "key": keys, "num_microbatches": M}
    np.testing.assert_array_equal(generate(pipe, PROMPTS, NEW, **given), wanted)
    with pytest.raises(ValueError) as caught:
        generate(pipe, PROMPTS, NEW, lengths=LENGTHS, prefill=2)
    assert str(caught.value) == (
        "prefill=2 with a prompt of 1 tokens: the first 2 tokens of every prompt are fed in one "
        "call; use prefill=1 or less"
    )
    long = {"lengths": np.maximum(LENGTHS, 3), "num_microbatches": M}
    np.testing.assert_array_equal(
        generate(pipe, PROMPTS, NEW, prefill=3, **long), generate(pipe, PROMPTS, NEW, **long)
    )


@pytest.mark.slow
@pytest.mark.parametrize("V", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stages_that_are_not_alike(V):
    """Caches of other names and sizes share storage, and each rank runs its own stage."""
    stages: list[nnx.Module] = [Flax(nnx.Rngs(0)), Own(nnx.Rngs(1))]
    stages += [Own(nnx.Rngs(2)), nnx.Sequential(Own(nnx.Rngs(3)), Own(nnx.Rngs(4)))] * (V - 1)
    embed = Embed(nnx.Rngs(5))
    head = Tied(embed)
    for module in (*stages, embed):
        module.eval()
    mesh = collectives.make_mesh(stage=2)
    pipe = Pipeline(stages, 2, embed=embed, head=head, mesh=mesh)
    found = generate(pipe, PROMPTS, NEW, lengths=LENGTHS, **DRAWN)
    np.testing.assert_array_equal(found, plain((stages, embed, head), **DRAWN))


@pytest.mark.slow
def test_weights_of_another_placement_and_caches_that_leave_no_trace():
    pipe, *model = make(Flax, S=2, V=2, schedule="zb_v")
    before = jax.tree.structure(nnx.state(pipe))
    found = generate(pipe, PROMPTS, 3, lengths=LENGTHS)
    np.testing.assert_array_equal(found, plain(model, 3))
    assert jax.tree.structure(nnx.state(pipe)) == before
    assert not model[0][0].attention.decode


@pytest.mark.slow
def test_it_ends_when_all_rows_have():
    """Else this would be two million positions of caches and of calls."""
    pipe, *model = make(Own, S=2)
    wanted = plain(model, 8)
    stop = int(np.bincount(wanted[:, 1:].ravel(), minlength=WORDS).argmax())
    rows = [n for n in range(len(PROMPTS)) if stop in wanted[n]]
    given = np.asarray(PROMPTS)[rows], 100_000
    found = np.asarray(generate(pipe, *given, lengths=LENGTHS[rows], stop=stop))
    for row, n in zip(found, rows, strict=True):
        end = [*wanted[n]].index(stop) + 1
        np.testing.assert_array_equal(row[:end], wanted[n][:end])
        assert not row[end:].any()


class Scaled(nnx.Module):
    """A loss with a weight of its own, which asks for words."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, logits, targets):
        return -jnp.take_along_axis(logits, targets[..., None], -1).mean() * self.scale[...]


@pytest.mark.slow
def test_a_loss_that_is_a_module_is_not_called():
    """It was traced with lengths in the place of targets, where embed or head have caches."""
    pipe, *model = make(Own, S=2, loss_fn=Scaled())
    np.testing.assert_array_equal(generate(pipe, PROMPTS, NEW, lengths=LENGTHS), plain(model))


# --- without caches, and what may be drawn ---


class Causal(nnx.Module):
    """Attention of another library's kind: causal, and nothing to remember by."""

    def __init__(self, rngs: nnx.Rngs, *, causal: bool = True):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.drop, self.causal = nnx.Dropout(0.5, rngs=rngs), causal

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        scores = q @ k.swapaxes(1, 2)
        if self.causal:
            seen = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None]
            scores = jnp.where(seen, scores, -jnp.inf)
        return x + 3 * self.drop(jax.nn.softmax(scores) @ v)


UNCACHED = [(1, 1, 1, {}), (2, 2, 1, {"schedule": "zb_v"}), (2, 1, 2, {})]


@pytest.mark.slow
@pytest.mark.parametrize(("S", "V", "D", "options"), UNCACHED)
def test_a_causal_model_without_caches_is_run_again(S, V, D, options):
    pipe, *model = make(Causal, S=S, V=V, D=D, **options)
    drawn = DRAWN | {"top_p": 0.8}
    found = generate(pipe, PROMPTS, NEW, lengths=LENGTHS, **drawn)
    np.testing.assert_array_equal(found, plain(model, **drawn))


@pytest.mark.slow
def test_meshes_of_ranks_read_the_whole_text_again():
    meshes = [collectives.make_mesh(stage=1, devices=[device]) for device in jax.devices()[:2]]
    given = {"mesh": None, "stage_meshes": meshes, "engine": "programs"}
    pipe, *model = make(Flax, S=2, tied=False, **given)
    found = generate(pipe, PROMPTS, NEW, lengths=LENGTHS, **DRAWN)
    np.testing.assert_array_equal(found, plain(model, **DRAWN))
    assert refusal(pipe, PROMPTS, 2, start=lambda *_: None) == (
        "generate(start=) fills caches in one program on one mesh, and stage_meshes= gives each "
        "rank its own: leave start out, so that each token reads the whole text, or call it on "
        "pipe.replace(engine='scan', stage_meshes=None, mesh=mesh)"
    )


@pytest.mark.slow
def test_a_model_that_trains_is_evaluated_and_stays_as_it_is():
    pipe, *model = make(Causal, S=2)
    wanted = plain(model)
    pipe.train()
    np.testing.assert_array_equal(generate(pipe, PROMPTS, NEW, lengths=LENGTHS), wanted)
    assert not pipe.stages()[0].drop.deterministic


def test_without_caches_it_ends_when_all_rows_have():
    pipe, *model = make(Causal, S=2)
    wanted = plain(model)
    stop = [int(row[1]) for row in wanted]
    found = np.asarray(generate(pipe, PROMPTS, NEW, lengths=LENGTHS, stop=stop, pad=77))
    for row, want in zip(found, wanted, strict=True):
        end = min(n for n, token in enumerate(want) if token in stop) + 1
        np.testing.assert_array_equal(row, [*want[:end], *[77] * (NEW - end)])


def test_a_model_that_is_not_causal():
    pipe, *_ = make(functools.partial(Causal, causal=False), S=2)
    message = refusal(pipe, PROMPTS, 2, lengths=LENGTHS)
    assert message.startswith(
        "generate() reads all of a text again for every token where no part of the model has a "
        "cache, and this model is not causal: tokens behind a position change its logits by "
    )
    assert message.endswith("give it a causal mask, or caches (start_decoding(rows, length))")


@pytest.mark.few
@pytest.mark.parametrize("vocabulary", ["ends", "stage"])
def test_several_tokens_end_a_row(vocabulary):
    """Llama 3 ends with any of three."""
    pipe, *model = make(Own, S=2, vocabulary=vocabulary)
    wanted = plain(model)
    stop = np.unique(wanted[:, 2])
    found = np.asarray(generate(pipe, PROMPTS, NEW, lengths=LENGTHS, stop=stop))
    for row, want in zip(found, wanted, strict=True):
        end = min(n for n, token in enumerate(want) if token in stop) + 1
        np.testing.assert_array_equal(row, [*want[:end], *[0] * (NEW - end)])


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["ends", "stage"])
def test_the_share_that_may_be_drawn(vocabulary):
    pipe, *model = make(Own, S=2, vocabulary=vocabulary)
    for options in ({"top_p": 0.5}, {"top_p": 0.7, "top_k": 5, "temperature": 2.0}):
        drawn = {"key": jax.random.key(3)} | options
        found = generate(pipe, PROMPTS, NEW, lengths=LENGTHS, **drawn)
        np.testing.assert_array_equal(found, plain(model, **drawn))
    least = generate(pipe, PROMPTS, NEW, lengths=LENGTHS, key=jax.random.key(3), top_p=1e-6)
    np.testing.assert_array_equal(least, plain(model))


@pytest.mark.slow
def test_words_that_may_be_drawn():
    """Probabilities .5, .3, .15, .05: the fewest tokens that reach the share are kept."""
    logits = jnp.log(jnp.array([0.15, 0.5, 0.05, 0.3]))
    keys = jax.random.split(jax.random.key(0), 200)
    for top_p, temperature, words in (
        (0.4, 1.0, {1}),
        (0.6, 1.0, {1, 3}),
        (0.81, 1.0, {0, 1, 3}),
        (1.0, 1.0, {0, 1, 2, 3}),
        (0.6, 1000.0, {0, 1, 3}),  # all alike: three of four
        (None, 1.0, {0, 1, 2, 3}),
    ):
        draw = functools.partial(sample, logits, temperature=temperature, top_p=top_p)
        found = jax.vmap(lambda key, draw=draw: draw(key))(keys)
        assert set(np.asarray(found).tolist()) == words


@pytest.mark.slow
def test_another_temperature_compiles_nothing():
    """Issue 38: with a V placement every call compiled 12 programs."""
    counts = []

    def count(name: str, *_: object, **__: object) -> None:
        counts.append(name)

    for kind, options in ((Flax, {"schedule": "zb_v", "V": 2}), (Causal, {"V": 2}), (Own, {})):
        pipe, *_ = make(kind, S=2, **options)
        generate(pipe, PROMPTS, 2, key=jax.random.key(0), top_p=0.5)
        pipe.embed.words[...] = 2 * pipe.embed.words[...]
        generate(pipe, PROMPTS, 2, key=jax.random.key(0), top_p=0.5)
        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            generate(pipe, PROMPTS, 2, key=jax.random.key(1), top_p=0.9, temperature=0.5)
        finally:
            jax.monitoring.unregister_event_duration_listener(count)
        assert not [name for name in counts if "backend_compile" in name]


# --- what is refused ---


class Blind(nnx.Module):
    def __call__(self, x):
        return x


class Growing(nnx.Module):
    def start_decoding(self, rows, length):
        self.more = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        return x


def refusal(*given, **options):
    with pytest.raises(ValueError) as caught:
        generate(*given, **options)
    return str(caught.value)


def test_models_that_cannot_decode():
    mesh = collectives.make_mesh(stage=2)
    pipe = Pipeline([Blind(), Blind()], 2, embed=lambda x: x, mesh=mesh)
    assert refusal(pipe, PROMPTS, 2, start=lambda *_: None) == (
        "no part of the model has a cache (<class 'flax.nnx.variablelib.Cache'>) when it starts to "
        "decode, and without one a stage sees a token and nothing before it; use "
        "nnx.MultiHeadAttention, give the modules that need one a method start_decoding(rows, "
        "length) that makes nnx.Cache variables, or pass start="
    )
    pipe = Pipeline([Growing(), Growing()], 2, mesh=mesh)
    assert refusal(pipe, PROMPTS, 2) == (
        "a stage has other parameters when it starts to decode (more); make caches, which are no "
        "nnx.Param"
    )
    stages = [Own(nnx.Rngs(0)), nnx.Linear(WIDTH, 2 * WIDTH, rngs=nnx.Rngs(1))]
    unlike = Pipeline(stages, 2, embed=Embed(nnx.Rngs(2)), mesh=mesh)
    assert refusal(unlike, PROMPTS, 2) == (
        "generate() needs stages that are alike in the activations that they take and return, and "
        "these are not; make them so (what only the first or the last has belongs to embed= or "
        "head=)"
    )


class Forgetful(nnx.Module):
    """Words and positions, of which it remembers none."""

    def __init__(self, rngs: nnx.Rngs, scale: float = 1.0):
        self.words = nnx.Param(jnp.ones((WORDS, WIDTH)))
        self.places = nnx.Param(scale * jnp.arange(8.0)[:, None] * jnp.ones((1, WIDTH)))

    def __call__(self, tokens):
        return self.words[...][tokens] + self.places[...][: tokens.shape[1]][None]


@pytest.mark.slow
@pytest.mark.parametrize("width", [5, 1])
def test_positions_that_nobody_remembers(width):
    """Every token after the first would get position 0."""
    mesh = collectives.make_mesh(stage=2)
    stages = [Own(nnx.Rngs(k)) for k in range(2)]
    pipe = Pipeline(stages, 2, embed=Forgetful(nnx.Rngs(2)), mesh=mesh)
    at, by = (4, 0.8) if width == 5 else (1, 0.5)
    assert refusal(pipe, PROMPTS[:, :width], 2) == (
        f"generate() of a model with caches gives embed one token at a time, and embed= of type "
        f"Forgetful makes something else of a token alone than of the same token at position {at} "
        f"(they differ by {by} of the largest): it adds positions and remembers none; give it a "
        f"method start_decoding(rows, length) that makes an nnx.Cache of the position it is at, or "
        f"pass start="
    )


@pytest.mark.slow
def test_an_embed_without_positions_needs_no_cache():
    for embed in (Forgetful(nnx.Rngs(2), 0.0), lambda tokens: jax.nn.one_hot(tokens, WIDTH)):
        stages = [Own(nnx.Rngs(k)) for k in range(2)]
        pipe = Pipeline(stages, 2, embed=embed, mesh=collectives.make_mesh(stage=2, data=2))
        text = np.asarray(PROMPTS)
        for _ in range(2):
            following = np.asarray(pipe(np.pad(text, ((0, 3), (0, 0)))))[:5, -1].argmax(-1)
            text = np.concatenate([text, following[:, None]], axis=1)
        np.testing.assert_array_equal(generate(pipe, PROMPTS, 2), text[:, 5:])


def test_prompts_that_are_none():
    pipe, *_ = make(Own)
    assert refusal(pipe, PROMPTS.astype(jnp.float32), 2) == (
        "prompts is float32[5, 5]; give integers [N, P], at least one token of at least one "
        "sequence"
    )
    assert refusal(pipe, PROMPTS, 2, lengths=[1, 2]) == (
        "lengths is int32[2]; give one integer for each of 5 prompts"
    )
    assert refusal(pipe, PROMPTS, 2, lengths=[0, 1, 2, 3, 9]) == (
        "lengths has 0 to 9; a prompt has 1 to 5 tokens here"
    )
    for stop in (-1, 1.5, "a", [1, None]):
        assert refusal(pipe, PROMPTS, 2, stop=stop) == (
            f"stop={stop!r}: must be a token, an integer >= 0, or a list of tokens, any of which "
            f"ends a row"
        )
    for share in (0, 1.1, -1.0):
        assert refusal(pipe, PROMPTS, 2, key=jax.random.key(0), top_p=share) == (
            f"top_p={share!r}: must be the share of all that may be drawn, > 0 and <= 1, or None "
            f"for all words"
        )
    assert refusal(pipe, PROMPTS, 0) == "max_new_tokens=0: must be an integer >= 1"
    assert refusal(pipe, PROMPTS, 2, key=jax.random.split(jax.random.key(0), 2)) == (
        "key is [2] keys; give one, or one for each of 5 rows"
    )


OUT_OF_RANGE = {
    "temperature": (-1.0, math.nan, math.inf, True, "1", [1.0], jnp.float32(-1), jnp.ones(2)),
    "top_k": (-1, 1.5, True, "3", jnp.ones(())),
    "top_p": (0, 0.0, 1.5, math.nan, True, np.float32(0), jnp.float32(2)),
    "pad": (1.5, True, None, 2**31),
}
RULES = {
    "temperature": "one finite number >= 0, the divisor of logits; 0 takes the likeliest token",
    "top_k": "an integer >= 0, the number of likeliest words that may be drawn; 0 for all",
    "top_p": "the share of all that may be drawn, > 0 and <= 1, or None for all words",
    "pad": "a token, an integer of int32",
}


@pytest.mark.parametrize("function", ["sample", "generate"])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_of_a_draw_that_are_out_of_range_are_refused(name, function):
    """Issue 67: `sample` took any number, and tokens were then 0 whatever the logits."""
    if function == "sample" and name == "pad":
        return
    pipe = make(Own)[0] if function == "generate" else None
    for value in OUT_OF_RANGE[name]:
        options = {"key": jax.random.key(0), name: value}
        with pytest.raises(ValueError) as error:
            generate(pipe, PROMPTS, 2, **options) if pipe else sample(jnp.zeros(4), **options)
        assert str(error.value) == f"{name}={value!r}: must be {RULES[name]}"


@pytest.mark.parametrize("key", [0, 1.5, "a", np.int32(3), jnp.zeros((), jnp.uint32)])
def test_a_seed_is_no_key(key):
    said = f"key={key!r}: must be a key, such as jax.random.key(seed), or None for the likeliest"
    assert refusal(make(Own)[0], PROMPTS, 2, key=key) == f"{said} token"
    with pytest.raises(ValueError, match=re.escape(said)):
        sample(jnp.zeros(4), key)
    raw = jax.random.key_data(jax.random.key(3))
    logits = jnp.arange(4.0)
    assert (
        sample(logits, raw) == sample(logits, np.asarray(raw)) == sample(logits, jax.random.key(3))
    )


def test_a_stop_beyond_int32_is_refused():
    assert refusal(make(Own)[0], PROMPTS, 2, stop=[1, 2**31]).startswith("stop=[1, 2147483648]: ")


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-50, 1e-36, np.float32(0), jnp.float32(0)])
@pytest.mark.parametrize("traced", [False, True])
def test_at_temperature_zero_the_likeliest_is_drawn(temperature, traced):
    """Issue 67: logits / 0 are infinite or NaN, and 0 or an unlikely token was returned."""
    logits = jnp.array([0.0, 1.0, 9.0, 8.99])
    for options in {}, {"top_k": 3}, {"top_p": 0.3}, {"top_k": np.int64(2), "top_p": 1}:
        for n in range(4):
            draw = functools.partial(sample, logits, jax.random.key(n), **options)
            assert (jax.jit(draw) if traced else draw)(temperature=temperature) == 2


def test_text_at_temperature_zero_is_the_likeliest_in_the_program_of_other_temperatures():
    pipe, *_ = make(Own)
    cold = generate(pipe, PROMPTS, NEW, key=jax.random.key(0), temperature=0, top_p=0.9)
    np.testing.assert_array_equal(cold, generate(pipe, PROMPTS, NEW))


class Mixed(Own):
    """A stage with a cache, and experts that are shared out over a row axis."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.experts = split_axes.Experts(rngs)

    def __call__(self, x):
        return self.experts(super().__call__(x))


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_over_an_axis_that_stages_have_collectives_over(drawn):
    """All ranks of the axis stop together, so every collective of the last call is met."""
    mesh = collectives.make_mesh(stage=2, expert=2, data=2)
    pipe, *model = make(Mixed, mesh=mesh, batch=P(("data", "expert")))
    options = DRAWN if drawn else {}
    found = generate(pipe, PROMPTS, NEW, lengths=LENGTHS, **options)
    np.testing.assert_array_equal(found, plain(model, **options))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("latent", [False, True])
def test_caches_are_written_under_x64(latent: bool) -> None:
    """Issue 67: places of a cache were int64 and int32, which jax refuses."""
    more = {"latent": LatentConfig(None, 4, 4, 2, 4)} if latent else {}
    sizes = {"vocabulary": WORDS, "width": 8, "layers": 2, "heads": 2, "kv_heads": 2}
    config = DecoderConfig(**sizes, head_dim=4, hidden=8, **more)
    stages, embed, head = build(config, [1, 1], nnx.Rngs(0))
    pipe = Pipeline(stages, 2, embed=embed, head=head)
    wanted = generate(pipe, PROMPTS, 3)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(generate(pipe, PROMPTS, 3), wanted)
