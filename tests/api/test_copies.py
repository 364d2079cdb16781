"""Copies of a pipeline, releases of jax and flax beside each other."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline
from pipeline.base.imports import check_releases
from tests.support import models
from tests.support.close import assert_close


def test_copies_are_of_their_own_and_pickling_says_what_to_pickle() -> None:
    def build(stages, embed, head):
        return Pipeline(stages, 2, loss_fn=models.cross_entropy, embed=embed, head=head)

    ends = models.Words(nnx.Rngs(0)), models.Readout(nnx.Rngs(1))
    pipe = build(models.build(models.Block, 2), *ends)
    given = models.words(4), models.words(4, most=models.CLASSES)
    wanted = pipe.loss(*given)
    with pytest.raises(TypeError) as caught:
        pickle.dumps(pipe)
    assert str(caught.value) == (
        "a Pipeline cannot be pickled: its arrays are on devices of this process; pickle its "
        "parts, (pipe.stages(), pipe.embed, pipe.head), and give the loaded parts to Pipeline(...) "
        "with the same options; nnx.clone and copy.deepcopy copy a pipeline within a process"
    )
    loaded = build(*pickle.loads(pickle.dumps((pipe.stages(), pipe.embed, pipe.head))))
    copies = copy.deepcopy(pipe), nnx.clone(pipe)
    nnx.update(pipe, jax.tree.map(lambda w: w * 0.0, nnx.state(pipe, nnx.Param)))
    for other in (loaded, *copies):
        assert_close(other.loss(*given), wanted, tolerance=1e-6)
    assert not np.isclose(pipe.loss(*given), wanted)


class Stage(nnx.Module):
    def __init__(self, k):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(k))])
        self.named = nnx.Dict(last=nnx.Linear(4, 4, rngs=nnx.Rngs(k + 9)))

    def __call__(self, x):
        return self.named["last"](self.layers[0](x))


X = np.ones((8, 4), np.float32)


def pipeline(stages, ranks=4):
    return Pipeline(stages, 2, mesh=make_mesh(stage=ranks), head=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def write_to_what_was_given(pipe, stages):
    stages[2].layers[0].kernel[...] = jnp.zeros((4, 4))
    return "stages[2].layers.0.kernel"


def load_into_what_was_given(pipe, stages):
    nnx.update(stages[3], jax.tree.map(lambda x: x + 1, nnx.state(stages[3])))
    return "stages[3].layers.0.bias"


def write_to_a_copy_that_nobody_holds(pipe, stages):
    pipe.stages()[1].named["last"].bias[...] = jnp.ones(4)
    return "pipe.stages()[1].named.last.bias"


def write_to_a_number_of_a_copy(pipe, stages):
    pipe.stages()[0].layers[0].kernel[0, 1] = 3.0
    return "pipe.stages()[0].layers.0.kernel"


WRITES = (
    write_to_what_was_given,
    load_into_what_was_given,
    write_to_a_copy_that_nobody_holds,
    write_to_a_number_of_a_copy,
)


@pytest.mark.few
@pytest.mark.parametrize(("write", "ranks"), [*zip(WRITES, (4, 2, 2, 4), strict=True)])
def test_a_write_to_a_module_that_was_copied_is_said_once(write, ranks) -> None:
    """Issue 38: writes to what a pipeline has copies of were lost without a word."""
    stages = [Stage(k) for k in range(4)]
    pipe = pipeline(stages, ranks)
    before = pipe(X)
    name = write(pipe, stages)
    with pytest.warns(UserWarning, match="was written after the pipeline was made") as caught:
        after = pipe(X)
    assert str(caught[0].message).startswith(f"{name} was written")
    assert caught[0].filename == __file__
    assert np.array_equal(before, after)
    write(pipe, stages)
    pipe(X)  # a second warning would be an error


def test_a_write_to_the_head_or_to_a_stack_that_was_given_is_said() -> None:
    """Issue 38: embed, head and one module of stacked arrays are copied too."""
    head = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    stack = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 4)
    )
    for module, name in ((head, "head.bias"), (stack, "stages.bias")):
        pipe = Pipeline(stack, 2, mesh=make_mesh(stage=4), head=head)
        module.bias[...] = module.bias[...] + 1
        with pytest.warns(UserWarning, match=f"^{name} was written"):
            pipe(X)


def test_a_model_beside_a_pipeline_may_be_trained_and_run() -> None:
    """Issue 38: no warning where nothing is written, or where the pipeline learns too."""
    stages = [Stage(k) for k in range(4)]
    pipe = pipeline(stages)
    copies = pipe.stages()
    for stage in (*stages, *copies):
        nnx.jit(lambda stage: stage(X))(stage)  # hands back arrays of equal values
    pipe(X)
    nnx.update(pipe, jax.tree.map(lambda x: x * 2, nnx.state(pipe, nnx.Param)))
    for stage, own in zip(stages, pipe.stages(), strict=True):
        nnx.update(stage, nnx.state(own))
    for stage in (*stages, *copies):
        stage.layers[0].bias[...] = jnp.ones(4)
    pipe(X)


@pytest.mark.parametrize(
    ("jax_version", "flax_version"),
    [
        ("0.10.2", "0.12.8"),
        ("0.11.1", "0.12.9"),
        ("0.12.0.1", "0.12.12"),
        ("0.12.0", "0.13.0.dev1"),
    ],
)
def test_releases_that_work_together(jax_version: str, flax_version: str) -> None:
    check_releases(jax_version, flax_version)


def test_a_flax_that_does_not_know_the_jax_beside_it() -> None:
    with pytest.raises(ImportError) as caught:
        check_releases("0.12.0.1", "0.12.8")
    assert str(caught.value) == (
        "flax 0.12.8 with jax 0.12.0.1: from jax 0.11 on, flax 0.12.9 or newer is needed; "
        "pip install 'flax>=0.12.9', or 'jax<0.11'"
    )
