"""The mesh that a pipeline chooses: devices that stay idle, and ranks that a schedule needs."""

import warnings

import jax
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support.close import assert_close


def loss_fn(y, t):
    return ((y - t) ** 2).mean()


def stages(count, width=2):
    return [nnx.Linear(width, width, rngs=nnx.Rngs(k)) for k in range(count)]


@pytest.mark.few
@pytest.mark.parametrize(
    ("count", "ranks", "counts"),
    [(11, 1, "8 or 16"), (9, 3, "8 or 16"), (13, 1, "8 or 16"), (17, 1, "16 or 24")],
)
def test_most_devices_idle_is_said_once_with_the_counts_that_use_them(count, ranks, counts):
    """Issue 38: eleven stages ran on one of eight devices without a word."""
    text = f"{count} stages are shared equally by {ranks} of the 8 devices, and the other "
    with pytest.warns(UserWarning, match=f"^{text}{8 - ranks} stay idle") as caught:
        pipe = Pipeline(stages(count), 2)
    assert pipe.mesh.shape["stage"] == ranks
    assert [w.filename for w in caught] == [__file__]
    said = str(caught[0].message)
    assert f"{counts} stages would use all 8" in said
    assert f"mesh=make_mesh(stage={ranks}, data={8 // ranks})" in said
    pipe.replace(num_microbatches=4)  # a warning would be an error


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 10, 12, 20])
def test_fewer_stages_than_devices_and_half_of_the_devices_are_no_reason(count):
    """Issue 38: no warning where each stage has a device, or most devices work."""
    Pipeline(stages(count), 2)


def test_a_mesh_that_was_given_is_meant():
    """Issue 38: no warning about devices where the user has said which to use."""
    Pipeline(stages(11), 2, mesh=make_mesh(stage=1))
    with jax.set_mesh(make_mesh(stage=1)):
        Pipeline(stages(11), 2)


@pytest.mark.parametrize(("schedule", "count", "ranks"), [("zb_v", 10, 5), ("v_half", 16, 8)])
def test_the_default_mesh_has_the_ranks_that_a_schedule_needs(schedule, count, ranks):
    """Issue 38: zb_v on the default mesh was refused, though fewer ranks can run it."""
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    pipe = Pipeline(stages(count), 8, schedule=schedule, loss_fn=loss_fn)
    assert pipe.mesh.shape["stage"] == ranks
    if schedule == "zb_v":
        plain = x
        for stage in stages(count):
            plain = stage(plain)
        assert_close(pipe.loss(x, x), loss_fn(plain, x), tolerance=1e-5)


def test_idle_devices_of_such_a_schedule_are_said_too():
    """Issue 38: two stages per rank, so four stages use two devices of eight."""
    with pytest.warns(UserWarning, match="by 2 of the 8 devices.* 2 stages. 16 stages would use"):
        pipe = Pipeline(stages(4), 4, schedule="zb_v")
    assert pipe.mesh.shape["stage"] == 2


def refused(*given, **options):
    with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
        Pipeline(*given, **options)
    return str(caught.value)


def test_other_numbers_of_ranks_are_refused_in_words_of_the_mesh():
    """Issue 38: the message spoke of num_ranks, which nobody had given."""
    text = "; num_ranks is the size of the mesh's axis 'stage'"
    found = refused(stages(4), 4, schedule="zb_v", mesh=make_mesh(stage=4))
    assert found.endswith(f"{text}: with mesh=make_mesh(stage=2) these 4 stages fit")
    found = refused(stages(4), 4, schedule="zb_h1", mesh=make_mesh(stage=2))
    assert found.endswith(f"{text}: with mesh=make_mesh(stage=4) these 4 stages fit")
    found = refused(stages(7), 4, schedule="v_min")
    assert found.endswith(f"{text}, and 7 stages are no multiple of 2")
    found = refused(stages(16), 4, schedule="zb_h2")
    assert found.endswith(f"{text}, and there are 8 devices")
