"""Row and position axes of a user's own: stages with collectives over them, against no pipeline.

Letters: K stages, M microbatches.
"""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from tests.support import split_axes
from tests.support.close import assert_close
from tests.support.grids import covering, effort
from tests.support.split_axes import CONTEXT, Attention, Experts, Shifted

KINDS = {"experts": Experts, "attention": Attention, "shifted": Shifted}
DOTS = jax.checkpoint_policies.dots_saveable
REMATS = {"stage": "stage", "none": None, "gathered": "gathered", "dots": DOTS}
CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_v": 2, "interleaved_1f1b": 2}
SHARDS = [("replicated", 1), ("replicated", 2), ("zero1", 2), ("fsdp", 2), ("fsdp", 1)]
LOSSES = {"mean": split_axes.squares, "sum": split_axes.counted}

GRID = [
    (kind, schedule, remat, *shards, loss)
    for kind in KINDS
    for schedule in CHUNKS
    for remat in REMATS
    for shards in SHARDS
    for loss in LOSSES
    if (kind, remat) != ("shifted", "gathered")  # which warns that nothing is gathered
]
FAST = {
    ("experts", "zb_h1", "none", "fsdp", 2, "mean"),
    ("attention", "1f1b", "stage", "replicated", 1, "sum"),
    ("shifted", "zb_v", "none", "replicated", 1, "mean"),
}
SLOW = {*covering(GRID, FAST)}


def cases(grid, fast, slow):
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=effort(case, fast, slow))
        for case in grid
    ]


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "schedule", "remat", "data_parallel", "data", "loss"), cases(GRID, FAST, SLOW)
)
def test_loss_and_gradients(kind, schedule, remat, data_parallel, data, loss):
    stage, K = KINDS[kind], 2 * CHUNKS[schedule]
    pipe = Pipeline(
        split_axes.build(stage, K),
        4,
        schedule=schedule,
        remat=REMATS[remat],
        mesh=split_axes.mesh_of(stage, data=data),
        batch=split_axes.spec_of(stage, data=True),
        loss_fn=LOSSES[loss],
        data_parallel=data_parallel,
    )
    found, grads = pipe.value_and_grad(*split_axes.batch())
    want, want_grads = split_axes.plain(split_axes.build(stage, K), LOSSES[loss])
    assert_close(found, want)
    assert_close(pipe.to_layers(grads)["stages"], want_grads)


@pytest.mark.parametrize("options", [{"engine": "programs", "schedule": "zb_h1", "remat": None}])
def test_ppermute_where_each_action_is_a_program(options):
    stages = split_axes.build(Shifted, 2, send=split_axes.permuted)
    spec = P("data", CONTEXT)
    mesh = make_mesh(stage=2, context=2)
    pipe = Pipeline(stages, 4, mesh=mesh, batch=spec, loss_fn=split_axes.squares, **options)
    found, grads = pipe.value_and_grad(*split_axes.batch())
    want, want_grads = split_axes.plain(split_axes.build(Shifted, 2))
    assert_close(found, want)
    assert_close(pipe.to_layers(grads)["stages"], want_grads)


def test_ppermute_where_ranks_of_other_stages_would_have_to_meet():
    stages = split_axes.build(Shifted, 2, send=split_axes.permuted)
    mesh = make_mesh(stage=2, context=2)
    pipe = Pipeline(
        stages, 4, mesh=mesh, batch=P("data", CONTEXT), loss_fn=split_axes.squares, schedule="1f1b"
    )
    text = (
        "a stage calls jax.lax.ppermute over the axis 'context'; virtual CPU devices of one "
        "process all meet in it, those of other stages too, which run other actions meanwhile; "
        "use collectives.exchange or collectives.ring_shift, in which the ranks of 'context' alone "
        'meet, or engine="programs" on CPU (GPUs and TPUs need neither)'
    )
    with pytest.raises(ValueError) as error:
        pipe.value_and_grad(*split_axes.batch())
    assert str(error.value) == text
    with pytest.raises(ValueError, match=r"a stage calls jax\.lax\.ppermute"):
        pipe(split_axes.batch()[0])
