"""Embedding and head split by vocabulary over the stage ranks, against the plain model.

Stages and head divide by the norm of their input, so that anything computed from a bubble's zeros
is NaN. Letters: S ranks, V chunks per rank, M microbatches, N words, d width, R rows of a
microbatch.
"""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.vocabulary import CrossEntropy, Table, VocabularyEmbedding, VocabularyHead
from tests.support import models
from tests.support.close import assert_close
from tests.support.grids import covering, pairs
from tests.support.models import WIDTH, Block, Hostile
from tests.support.poison import poison  # noqa: F401, a fixture

WORDS = 11  # no multiple of any S > 1
ROWS = 96
FAMILIES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_v", "zb_h1")


class Unit(nnx.Module):
    """A scaled norm without an epsilon."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (1, WIDTH)))

    def __call__(self, x):
        return models.unit(x) * self.scale[...]


def ends(*, tied: bool, words: int = WORDS) -> dict:
    embed = VocabularyEmbedding(words, WIDTH, rngs=nnx.Rngs(5))
    head = VocabularyHead(
        words,
        WIDTH,
        rngs=nnx.Rngs(6),
        norm=Unit(nnx.Rngs(7)),
        tied=embed if tied else None,
    )
    return {"embed": embed, "head": head}


@functools.cache
def batch(words: int = WORDS):
    """Words, targets of which some do not count, in uneven numbers."""
    targets = jax.random.randint(jax.random.key(4), (ROWS,), -words // 3, words)
    return models.words(ROWS, most=words), targets


def pipeline(
    S,
    V,
    M,
    family,
    remat,
    tied,
    *,
    mode="stage",
    kind=Hostile,
    words=WORDS,
    data=1,
    **options,
) -> Pipeline:
    return Pipeline(
        models.build(kind, S * V),
        M,
        schedule=family,
        mesh=make_mesh(stage=S, data=data),
        loss_fn=CrossEntropy(),
        remat=remat,
        vocabulary=mode,
        **ends(tied=tied, words=words),
        **options,
    )


@functools.cache
def wanted(K: int, tied: bool, words: int = WORDS):
    stages = models.build(Hostile, K)
    return models.reference(stages, *batch(words), CrossEntropy(), **ends(tied=tied, words=words))


def without_padding(grads, want):
    """The ends' gradients without rows that belong to no word, which have none."""

    def trim(found, like):
        assert not np.asarray(found)[like.shape[0] :].any()
        return found[: like.shape[0]]

    leaves, treedef = jax.tree.flatten(grads["ends"])
    likes = jax.tree.leaves(want)
    trimmed = map(trim, leaves, likes)
    return nnx.State({**grads, "ends": jax.tree.unflatten(treedef, list(trimmed))})


def check(pipe, tied, words: int = WORDS, found=None) -> None:
    want = wanted(pipe.schedule.num_stages, tied, words)
    loss, grads = found or pipe.value_and_grad(*batch(words))
    models.assert_matches(pipe, (loss, without_padding(grads, want[2])), want)


FACTORS = {
    "S": (1, 2, 4),
    "V": (1, 2),
    "family": FAMILIES,
    "remat": ("stage", None),
    "tied": (False, True),
    "mode": ("stage", "ends"),
    "engine": ("scan", "programs"),
}


def runs(S, V, family, _remat, _tied, mode, engine) -> bool:
    if engine == "programs" and (mode == "ends" or S == 1):
        return False  # other tests have these
    wanted = {"interleaved_1f1b": 2, "zb_v": 2, "zb_h1": 1}
    return wanted.get(family, V) == V


GRID = [case for case in itertools.product(*FACTORS.values()) if runs(*case)]
FAST = [
    (2, 1, "1f1b", "stage", True, "stage", "scan"),
    (4, 1, "eager_1f1b", None, False, "stage", "scan"),
    (2, 2, "zb_v", "stage", True, "stage", "scan"),
    (2, 2, "zb_v", None, True, "stage", "programs"),
    (4, 1, "1f1b", "stage", False, "stage", "programs"),
]


def cases() -> list:
    chosen = [*FAST, *covering((c for c in GRID if c[-2] == "stage"), FAST)]
    chosen += [c for c in covering(GRID, chosen) if c not in chosen]
    slow, rest = pytest.mark.slow, set(GRID) - set(chosen)
    everything = [pytest.param(*case, marks=[slow, pytest.mark.exhaustive]) for case in rest]
    marked = [pytest.param(*c, marks=[] if c in FAST else [slow]) for c in chosen]
    return marked + sorted(everything, key=lambda p: str(p.values))


def test_cases_hold_every_pair_of_values():
    chosen = [p.values for p in cases() if pytest.mark.exhaustive not in p.marks]
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, GRID))
    assert len(GRID) == 288


@pytest.mark.few
@pytest.mark.parametrize(tuple(FACTORS), cases())
def test_parity(S, V, family, remat, tied, mode, engine):
    pipe = pipeline(S, V, 4, family, remat, tied, mode=mode, engine=engine)
    assert (pipe.schedule.name, pipe.schedule.num_ranks) == (family, S)
    check(pipe, tied)


@pytest.mark.parametrize(
    ("words", "engine"), [(12, "scan"), pytest.param(3, "programs", marks=pytest.mark.slow)]
)
def test_parts_that_are_whole_and_ranks_without_a_word(words, engine):
    check(pipeline(4, 1, 3, "1f1b", "stage", False, words=words, engine=engine), False, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, {}),
        (True, {"data_parallel": "zero1"}),
        (True, {"data_parallel": "fsdp"}),
        (False, {"data_parallel": "fsdp", "gather": "action"}),
        (True, {"data_parallel": "fsdp", "gather": "repeat"}),
        (True, {"delayed": True}),
        (True, {"data_parallel": "zero1", "engine": "programs"}),
        (False, {"data_parallel": "fsdp", "gather": "repeat", "engine": "programs"}),
        (True, {"offload": 0.5, "engine": "programs"}),
    ],
)
def test_data_shards_and_delayed_sends(tied, options):
    check(pipeline(2, 1, 3, "eager_1f1b", None, tied, data=2, **options), tied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "remat", "engine"),
    [("1f1b", None, "programs"), ("zb_h1", "stage", "scan"), ("eager_1f1b", "stage", "scan")],
)
def test_uneven_stages(family, remat, engine):
    class Several(nnx.Module):
        def __init__(self, count, seed):
            self.blocks = nnx.List(models.build(Hostile, count, seed=seed))

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    stages = [Several(1, 0), Several(2, 7)]
    pipe = Pipeline(
        stages,
        4,
        schedule=family,
        mesh=make_mesh(stage=2),
        loss_fn=CrossEntropy(),
        remat=remat,
        vocabulary="stage",
        engine=engine,
        **ends(tied=True),
    )
    want = models.reference(stages, *batch(), CrossEntropy(), **ends(tied=True))
    loss, grads = pipe.value_and_grad(*batch())
    models.assert_matches(pipe, (loss, without_padding(grads, want[2])), want)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["stage", None])
def test_nothing_of_a_bubble_leaks(poison, remat):  # noqa: F811
    check(pipeline(4, 1, 3, "1f1b", remat, False), False)


@pytest.mark.parametrize("engine", [pytest.param("scan", marks=pytest.mark.slow), "programs"])
def test_one_end_alone(engine):
    """An embedding of the user's own, on the first rank, beside a head of all ranks."""
    stages, embed = models.build(Hostile, 2), models.Words(nnx.Rngs(501))
    head = ends(tied=False)["head"]
    options = {"schedule": "1f1b", "mesh": make_mesh(stage=2), "loss_fn": CrossEntropy()}
    options["engine"] = engine
    pipe = Pipeline(stages, 3, embed=embed, head=head, vocabulary="stage", **options)
    assert pipe.plan.training.shared == ("head",)
    want = models.reference(stages, *batch(), CrossEntropy(), embed=embed, head=head)
    loss, grads = pipe.value_and_grad(*batch())
    models.assert_matches(pipe, (loss, without_padding(grads, want[2])), want)


@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_sentences_and_weights(engine):
    """Rows of several positions, weights beside the targets, and no norm."""
    ids = models.words(24).reshape(8, 3)
    targets = models.words(24, seed=9).reshape(8, 3)
    weights = jnp.where(jnp.arange(24) % 5 == 0, 0.0, jnp.arange(24.0) / 3).reshape(8, 3)
    embed = VocabularyEmbedding(WORDS, WIDTH, rngs=nnx.Rngs(5))
    given = {"embed": embed, "head": VocabularyHead(WORDS, WIDTH, tied=embed)}
    stages = models.build(Block, 2)
    options = {"mesh": make_mesh(stage=2), "loss_fn": CrossEntropy(), "vocabulary": "stage"}
    pipe = Pipeline(stages, 4, schedule="1f1b", engine=engine, **given, **options)
    assert "vocabulary of embed and head on all ranks, 1/2 of it on each" in pipe.describe()
    loss, grads = pipe.value_and_grad(ids, (targets, weights))
    want = models.reference(stages, ids, (targets, weights), CrossEntropy(), **given)
    models.assert_matches(pipe, (loss, without_padding(grads, want[2])), want)
    plain = models.compose(stages, embed, given["head"], ids)
    log = jax.nn.log_softmax(plain)
    lost = -jnp.take_along_axis(log, targets[..., None], axis=-1)[..., 0]
    assert_close(loss, (lost * weights).sum() / weights.sum())
    assert_close(pipe.loss(ids, (targets, weights)), loss, tolerance=1e-6)
    outputs = pipe(ids)
    assert outputs.shape == (8, 3, WORDS)
    assert_close(outputs, plain)
    of_targets = jnp.take_along_axis(log, targets[..., None], axis=-1)[..., 0]
    assert_close(pipe.logprobs(ids, targets), of_targets)


@pytest.mark.slow
def test_any_trainer_may_differentiate_it():
    pipe = pipeline(2, 1, 3, "1f1b", "stage", True)
    loss, grads = pipe.value_and_grad(*batch())
    found = nnx.value_and_grad(lambda model: model.loss(*batch()))(pipe)
    assert jax.tree.leaves(found[1])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((loss, grads)), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="differentiate pipe") as caught:
        nnx.grad(lambda model: model(batch()[0]).sum())(pipe)
    assert str(caught.value) == (
        "outputs of a pipeline with vocabulary='stage' cannot be differentiated, since no rank has "
        "a whole row; differentiate pipe.loss, or use vocabulary='ends'"
    )


@pytest.mark.parametrize("mode", ["stage", pytest.param("ends", marks=pytest.mark.slow)])
def test_what_is_tied_is_one_parameter(mode):
    """One parameter, one gradient, and one slot of the optimiser for each of its moments."""
    pipe = pipeline(2, 1, 4, "1f1b", "stage", True, mode=mode)
    assert pipe.embed.table is pipe.head.table
    params = nnx.state(pipe, nnx.Param)
    tables = [v for _, v in nnx.to_flat_state(params) if isinstance(v, Table)]
    assert len(tables) == 1
    optimizer = nnx.Optimizer(pipe, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param)
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == tables[0].shape]
    assert len(moments) == 1
    before = pipe.embed.table[...]
    _, grads = pipe.value_and_grad(*batch())
    optimizer.update(pipe, grads)
    (gradient,) = [v for _, v in nnx.to_flat_state(grads) if isinstance(v, Table)]
    assert_close(pipe.head.table[...], before - 0.5 * gradient[...], tolerance=1e-6)
    assert pipe.embed.table is pipe.head.table


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_bit_identical_between_schedules(tied):
    found = [
        pipeline(2, 1, 4, family, "stage", tied).value_and_grad(*batch())[0]
        for family in ("gpipe", "1f1b", "eager_1f1b")
    ]
    assert len({np.asarray(loss).tobytes() for loss in found}) == 1, found


@pytest.mark.parametrize(
    ("mode", "engine"),
    [
        ("stage", "scan"),
        ("stage", "programs"),
        pytest.param("ends", "scan", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_word_shows(mode, engine):
    pipe = pipeline(2, 1, 3, "1f1b", "stage", False, mode=mode, engine=engine)
    ids, targets = batch()
    assert np.isfinite(pipe.loss(ids, targets))
    assert np.isnan(pipe.loss(ids.at[3].set(WORDS), targets))
    assert np.isnan(pipe.loss(ids.at[3].set(-1), targets))
    assert np.isnan(pipe.loss(ids, targets.at[5].set(WORDS)))
    weights = jnp.ones(ROWS).at[5].set(0.0)
    assert np.isfinite(pipe.loss(ids, (targets.at[5].set(WORDS), weights)))


# --- what a rank holds, computes and sends ---

S, M, N, R = 4, 8, 1000, 28  # sizes that nothing else has


@functools.cache
def compiled(mode: str):
    pipe = pipeline(S, 1, M, "eager_1f1b", "stage", False, mode=mode, words=N, kind=Block)
    ids = jax.ShapeDtypeStruct((M * R,), jnp.int32)
    return pipe, pipe.lower(ids, ids).compile()


def shapes(mode: str) -> set[str]:
    return set(re.findall(r"\w+\[[\d,]*\]", compiled(mode)[1].as_text()))


def test_no_rank_has_all_logits_nor_all_words():
    assert {f"f32[{R},{N}]", f"f32[{N},{WIDTH}]"} <= shapes("ends")
    own = shapes("stage")
    assert {f"f32[{R},{N // S}]", f"f32[{N // S},{WIDTH}]"} <= own
    assert not [shape for shape in own if re.search(rf"[\[,]{N}[\],]", shape)]


@pytest.mark.parametrize("words", [N, 1001, 1003])
def test_the_rows_of_a_rank(words):
    pipe = pipeline(S, 1, M, "1f1b", "stage", False, words=words, kind=Block)
    for end in (pipe.embed, pipe.head):
        held = end.table[...].addressable_shards
        assert len(held) == S
        assert max(shard.data.shape[0] for shard in held) <= 1.1 * words / S
        kept = np.asarray(end.table[...])
        assert not kept[words:].any()
    np.testing.assert_array_equal(
        np.asarray(pipe.embed.table[...])[:words],
        ends(tied=False, words=words)["embed"].table[...],
    )


def test_what_is_sent_for_a_microbatch():
    """bench/notes/meshes.md: four times [R, d], and three numbers a row to all."""
    text = compiled("stage")[1].as_text()
    ticks = "\n".join(line for line in text.splitlines() if "while/" in line)
    sums = re.findall(r"= (\w+\[[\d,]*\])\S* all-reduce\(", ticks)
    assert sorted(sums) == [f"f32[{R},{WIDTH}]"] * 4
    assert re.findall(r"= (\w+\[[\d,]*\])\S* all-gather\(", text) == [f"f32[{S},3,{R}]"]
    ring = 2 * 4 * R * WIDTH * len(sums) / S + 4 * 3 * R  # of a microbatch, one step of a ring
    assert M * (S - 1) * ring == M * ((S - 1) / S) * (8 * R * WIDTH * 4 + 12 * S * R)
    # In a tick there are beside it the exchanges of all pipelines, and no reduction.
    assert len(re.findall(r" all-reduce\(", ticks)) == 4
    assert len(re.findall(r" collective-permute\(", text)) == 2


def test_no_table_is_copied_in_a_tick():
    """Gradients are added in place: the one copy of each is its buffer before the first tick."""
    for mode, rows in (("stage", N // S), ("ends", N)):
        copies = re.findall(rf"= f32\[{rows},{WIDTH}\]\S* copy\(.*", compiled(mode)[1].as_text())
        assert not [line for line in copies if "while/body" in line]
        assert len(copies) <= 2


def test_a_microbatch_writes_the_rows_of_its_words_alone():
    """Sums of an embedding's gradient are a scatter of rows, or a loop over them, in place."""
    text = compiled("stage")[1].as_text()
    rows = rf"= f32\[{N // S},{WIDTH}\]\S* ([\w-]+)\(.*op_name=\"[^\"]*"
    assert "add" in re.findall(rows + "/head/", text) + re.findall(
        rows + "/head/while/body/add", text
    )
    found = set(re.findall(rows + "/scatter/", text)) - {"get-tuple-element", "parameter"}
    assert found
    assert found <= {"dynamic-update-slice", "fusion", "scatter"}


@pytest.mark.slow
def test_other_tables_in_the_ends_are_no_matter():
    """A head whose norm looks something up, and an embedding that holds another."""

    class Shifted(nnx.Module):
        def __init__(self, rngs):
            self.unit, self.zone = Unit(rngs), VocabularyEmbedding(3, WIDTH, rngs=rngs)

        def __call__(self, y):
            return self.unit(y) + self.zone(jnp.zeros((1,), jnp.int32))

    class Both(VocabularyEmbedding):
        def __init__(self, *args, **kwargs):
            self.also = VocabularyEmbedding(7, WIDTH, rngs=nnx.Rngs(1))
            super().__init__(*args, **kwargs)
            self.zeta = VocabularyEmbedding(7, WIDTH, rngs=nnx.Rngs(2))

    def take(mode):
        embed = Both(WORDS, WIDTH, rngs=nnx.Rngs(5))
        head = VocabularyHead(WORDS, WIDTH, norm=Shifted(nnx.Rngs(7)), tied=embed)
        options = {"vocabulary": mode, "loss_fn": CrossEntropy(), "embed": embed, "head": head}
        pipe = Pipeline(models.build(Block, 2), 2, mesh=make_mesh(stage=2), **options)
        with pytest.warns(UserWarning, match=r"embed\.also"):  # nobody reads it
            return pipe.value_and_grad(*batch())

    (loss, grads), (wanted, want) = take("stage"), take("ends")
    assert_close(loss, wanted, tolerance=1e-6)
    for a, b in zip(
        *map(jax.tree.leaves, (without_padding(grads, want["ends"]), want)), strict=True
    ):
        assert_close(a, b)


# --- errors ---


def refusal(**options) -> str:
    given = {"vocabulary": "stage", "loss_fn": CrossEntropy(), **ends(tied=False), **options}
    with pytest.raises(ValueError, match=r"\w") as caught:
        Pipeline(models.build(Block, 2), 2, mesh=make_mesh(stage=2), **given)
    return str(caught.value)


def test_bad_options():
    assert refusal(vocabulary="both") == (
        "vocabulary='both': must be 'ends', embed on the first rank and head on the last, or "
        "'stage', both split by vocabulary over all ranks"
    )
    assert refusal(embed=models.Words(nnx.Rngs(0)), head=None) == (
        "vocabulary='stage' with embed of type Words and head of type NoneType: ranks can share a "
        "pipeline.vocabulary.VocabularyEmbedding and a VocabularyHead; give at least one of them, "
        "or vocabulary='ends'"
    )
    assert refusal(loss_fn=models.cross_entropy) == (
        f"vocabulary='stage' with loss_fn={models.cross_entropy!r}: no rank has all logits of a "
        f"row, so the loss is one that can be summed over ranks; give "
        f"loss_fn=pipeline.vocabulary.CrossEntropy(), with weights in the targets for what does "
        f"not count, or vocabulary='ends'"
    )

    class Mine(nnx.Module):
        def __init__(self, embed):
            self.inner = embed

        def __call__(self, ids):
            return self.inner(ids)

    tied = ends(tied=True)
    assert refusal(embed=Mine(tied["embed"]), head=tied["head"]) == (
        "vocabulary='stage': embed of type Mine uses the table that all ranks share; make it a "
        "pipeline.vocabulary.VocabularyEmbedding too, or give vocabulary='ends'"
    )


def test_what_does_more_than_ranks_can_share():
    """It was left out without a word."""

    class Scaled(VocabularyEmbedding):
        def __call__(self, ids):
            return super().__call__(ids) * WIDTH**0.5

    class Capped(VocabularyHead):
        def __call__(self, y):
            return 30 * jnp.tanh(super().__call__(y) / 30)

    class Smooth(CrossEntropy):
        def __call__(self, scores, targets):
            return super().__call__(0.9 * scores, targets)

    own, rest = (
        "has a __call__ of its own, and ranks that share the words compute what",
        "or use vocabulary='ends'",
    )
    assert refusal(embed=Scaled(WORDS, WIDTH, rngs=nnx.Rngs(0))) == (
        f"vocabulary='stage': embed of type Scaled {own} VocabularyEmbedding does; let the first "
        f"stage do the rest, {rest}"
    )
    assert refusal(head=Capped(WORDS, WIDTH, rngs=nnx.Rngs(0))) == (
        f"vocabulary='stage': head of type Capped {own} VocabularyHead does; do the rest in its "
        f"norm= or its features(), {rest}"
    )
    assert refusal(loss_fn=Smooth()) == (
        f"vocabulary='stage': loss_fn of type Smooth {own} CrossEntropy does; give CrossEntropy() "
        f"itself, with weights in the targets, {rest}"
    )


def test_tables_of_their_own_or_shared():
    embed = VocabularyEmbedding(5, WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="tied") as caught:
        VocabularyHead(6, WIDTH, tied=embed)
    assert str(caught.value) == (
        "tied is an embedding of 5 words in 8 dimensions, the head is of 6 in 8; what they share "
        "has one size: give both the same"
    )
    with pytest.raises(ValueError, match="tied") as caught:
        VocabularyHead(5, WIDTH, tied=embed, sequence_parallel=True)
    assert str(caught.value) == (
        "tied is an embedding with sequence_parallel=False, the head has sequence_parallel=True; "
        "their one table has one gradient: give both the same"
    )
    with pytest.raises(ValueError, match="rngs") as caught:
        VocabularyHead(6, WIDTH)
    assert str(caught.value) == (
        "VocabularyHead has neither rngs nor tied; give rngs=nnx.Rngs(...) for a table of its own, "
        "or tied=embedding to share one"
    )


def test_bad_batches():
    pipe = pipeline(2, 1, 3, "1f1b", "stage", False)
    ids, targets = batch()
    with pytest.raises(ValueError, match="inputs") as caught:
        pipe.loss(ids.astype(jnp.float32), targets)
    assert str(caught.value) == (
        "inputs have leaves of float32: with vocabulary='stage' they are one array of integers, "
        "the words to embed; pass the rest as extras"
    )
    for wrong, given in (
        (targets.astype(jnp.float32), "float32[32]"),
        ((targets, jnp.ones((ROWS, 1))), "('int32[32]', 'float32[32,1]')"),
        ({"ids": targets}, "{'ids': 'int32[32]'}"),
    ):
        with pytest.raises(ValueError, match="targets of CrossEntropy") as caught:
            pipe.loss(ids, wrong)
        assert str(caught.value) == (
            f"targets of CrossEntropy are {given}; give an array of integers, words or below 0 for "
            f"what does not count, or a pair (words, weights) of equal shapes"
        )


def test_activations_that_are_no_message():
    class Widen(nnx.Module):
        def __init__(self):
            self.w = models.normal(nnx.Rngs(0), WIDTH, WIDTH)

        def __call__(self, x):
            return jnp.concatenate([x @ self.w[...]] * 2, axis=-1)

    class Pair(nnx.Module):
        def __init__(self):
            self.w = models.normal(nnx.Rngs(0), WIDTH, WIDTH)

        def __call__(self, x):
            return (x, x)

    options = {"mesh": make_mesh(stage=2), "loss_fn": CrossEntropy(), "vocabulary": "stage"}
    pipe = Pipeline([*models.build(Block, 1), Widen()], 3, **options, **ends(tied=False))
    with pytest.raises(ValueError, match="vocabulary") as caught:
        pipe.loss(*batch())
    assert str(caught.value) == (
        "vocabulary='stage': stages[0] takes float32[32,8], stages[1] returns float32[32,16] (per "
        "microbatch and data shard); with it all activations have one type: change the stages, or "
        "use vocabulary='ends'"
    )


@pytest.mark.few
@pytest.mark.parametrize("option", ["zero1", "fsdp"])
def test_rows_over_ranks_and_data_shards(option):
    """Three shards cannot share a width of 8, so they share each rank's rows, once."""
    pipe = pipeline(2, 1, 2, "1f1b", "stage", True, data=3, data_parallel=option)
    (table,) = (g for g in jax.tree.leaves(pipe.value_and_grad(*batch())[1]["ends"]) if len(g) > 8)
    assert table.sharding.spec == jax.sharding.PartitionSpec(("stage", "data"))
    check(pipe, True)
