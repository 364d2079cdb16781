"""Two towers, in-batch negatives: the loss of all rows and its gradients are the plain loop's."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from tests.support.close import assert_close

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "contrastive.py"


@pytest.mark.few
@pytest.mark.parametrize("engine", ["scan", "programs"])
def test_clip_is_that_of_the_plain_loop(engine: str) -> None:
    """Issue 71: negatives of other microbatches and data shards count."""
    recipe = runpy.run_path(str(RECIPE), run_name="recipe")
    options = {"num_microbatches": 2, "mesh": make_mesh(data=2, stage=2), "engine": engine}
    pipes = [Pipeline(**tower, **options) for tower in recipe["towers"]()]
    clip = recipe["Clip"](*pipes)
    plain = recipe["Clip"](*(recipe["Plain"](**tower) for tower in recipe["towers"]()))
    batch = recipe["batch"](0)
    assert batch[0].shape[0] == 32

    differentiate = nnx.value_and_grad(lambda model, *batch: model.loss(*batch))
    jitted = nnx.jit(differentiate)
    value, ours = (jitted if engine == "scan" else differentiate)(clip, *batch)
    wanted_value, theirs = jitted(plain, *batch)
    layers = [
        pipe.to_layers(ours[name]) for name, pipe in zip(("image", "text"), pipes, strict=True)
    ]
    wanted = [theirs[name] for name in ("image", "text")]
    assert_close(
        [value, ours["log_factor"], [[part["embed"], *part["stages"]] for part in layers]],
        [
            wanted_value,
            theirs["log_factor"],
            [[part["embed"], *(part["stages"][k] for k in range(4))] for part in wanted],
        ],
    )
