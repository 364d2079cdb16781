"""A pipeline refuses schedules of slices by name."""

from __future__ import annotations

import jax
import pytest

import schedules
from collectives import make_mesh
from pipeline import Pipeline
from tests.support import models


@pytest.mark.parametrize("as_object", [False, True])
def test_schedules_of_slices_are_refused(as_object):
    mesh = make_mesh(stage=2, devices=jax.devices()[:2])
    given, text = "seq1f1b", "'seq1f1b'"
    if as_object:
        given = schedules.build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=4)
        text = "'seq1f1b' of 4 slices"
    with pytest.raises(schedules.ScheduleError) as caught:
        Pipeline(models.build(models.Block, 2), 2, schedule=given, mesh=mesh)
    assert str(caught.value) == (
        f"schedule={text}: a pipeline runs whole sequences, and keeps no keys and values from one "
        f"slice of a sequence for the next; choose one of schedules.names(), or for long sequences "
        f"the context axis of pipeline.layers.Attention (schedules.simulate times slices)"
    )
