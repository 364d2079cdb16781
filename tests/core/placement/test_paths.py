"""Paths: sharding=, wrt= and state= are asked of a variable in one form."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from collectives import make_mesh
from pipeline import Pipeline
from tests.support.close import assert_close

X = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)


class Stage(nnx.Module):
    """A pair of products, summed over ``tensor`` by hand, as Megatron cuts them."""

    def __init__(self, k, *, axis="tensor", extra=False):
        rngs = nnx.Rngs(k)
        self.up = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(8, 4, use_bias=False, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(4))
        self.extra = nnx.Linear(4, 4, rngs=rngs) if extra else None
        self.axis = axis

    def __call__(self, x):
        self.mean[...] = x.mean(0)
        y = jnp.tanh(x @ self.up.kernel[...]) @ self.down.kernel[...]
        y = y if self.axis is None else jax.lax.psum(y, self.axis)
        return y if self.extra is None else self.extra(y)


def loss_fn(y, t):
    return ((y - t) ** 2).mean()


def pipeline(sharding, *, unlike=False, **options):
    return Pipeline(
        [Stage(k, extra=unlike and k == 1) for k in range(2)],
        2,
        mesh=make_mesh(stage=2, tensor=2),
        loss_fn=loss_fn,
        sharding=sharding,
        **({"state": nnx.BatchStat} | options),
    )


def by_tuple(path, _):
    """As filters are written: ``wrt=`` gives such a path."""
    if path[0] == "stages" and path[-1] == "kernel" and "extra" not in path:
        return (None, "tensor") if path[-2] == "up" else ("tensor", None)
    return None


def by_text(path, _):
    if path.endswith("up.kernel"):
        return None, "tensor"
    return ("tensor", None) if path == "down.kernel" else None


def by_parts(path, _):
    first, *_ = path.split(".")
    return {"up": (None, "tensor"), "down": ("tensor", None)}.get(first)


def by_name(path, _):
    return {"up.kernel": (None, "tensor"), "down.kernel": ("tensor", None)}.get(path)


def by_pattern(path, _):
    found = re.fullmatch(r"(up|down)\.kernel", path)
    return found and ((None, "tensor") if found[1] == "up" else ("tensor", None))


def by_filter(path, variable):
    """A flax filter, which may be given to ``wrt=`` as it is."""
    if nnx.PathContains("up")(path, variable):
        return None, "tensor"
    return ("tensor", None) if nnx.PathContains("down")(path, variable) else None


@pytest.mark.parametrize("sharding", [by_tuple, by_text, by_parts, by_name, by_pattern, by_filter])
def test_functions_of_tuples_and_of_text_shard_alike(sharding):
    """Issue 38: a filter that was moved from wrt= found nothing, and a psum doubled the result."""
    pipe = pipeline(sharding)
    assert pipe.chunks[0].up.kernel[...].sharding.spec == P("stage", None, "tensor")
    assert pipe.chunks[0].down.kernel[...].sharding.spec == P("stage", "tensor")
    if sharding is by_tuple:
        plain = X[0]
        for k in range(2):
            plain = Stage(k, axis=None)(plain)
        assert_close(pipe.loss(*X), loss_fn(plain, X[1]), tolerance=1e-5)


def test_stages_that_are_not_alike_have_paths_of_the_same_form():
    """Issue 38: the other storage asks with paths of the plain model too."""
    seen = []
    pipe = pipeline(lambda path, v: (seen.append(tuple(path)), by_tuple(path, v))[1], unlike=True)
    assert pipe.chunks[0].named.up.kernel[...].sharding.spec == P("stage", None, "tensor")
    assert ("stages", 1, "extra", "kernel") in seen


def test_one_form_of_paths_for_all_functions():
    """Issue 38: sharding= was given text, wrt= and state= a tuple."""
    seen = {"sharding": {}, "wrt": {}, "state": {}}

    def asked(name, function):
        def ask(path, variable):
            seen[name][tuple(path)] = type(path)
            return function(path, variable)

        return ask

    wrt = asked("wrt", lambda path, v: isinstance(v, nnx.Param) and path.endswith("up.kernel"))
    state = asked("state", lambda path, v: isinstance(v, nnx.BatchStat))
    head = nnx.Linear(4, 4, rngs=nnx.Rngs(7))
    pipe = pipeline(asked("sharding", by_tuple), wrt=wrt, state=state, head=head)
    assert [sum(mask) for mask in pipe.trained.stages] == [1, 1]
    assert seen["wrt"] == seen["state"]
    assert seen["wrt"] == seen["sharding"]  # paths, and their types
    assert ("stages", 1, "up", "kernel") in seen["wrt"]
    assert ("head", "bias") in seen["wrt"]


def test_a_function_that_names_no_axes_is_said():
    """Issue 38: what matches nothing was silent."""
    with pytest.warns(UserWarning, match="^sharding= returns None for all 6 variables") as caught:
        pipe = pipeline(lambda path, _: ("tensor",) if path[-1] == "weight" else None)
    assert "here of ('stages', 0, 'down', 'kernel') and ('stages', 1, 'up', 'kernel')" in str(
        caught[0].message
    )
    assert caught[0].filename == __file__
    pipe.replace(num_microbatches=4)  # a second warning would be an error
    pipeline(lambda *_: ())  # an answer: no dim is divided


def test_stages_that_share_an_array_are_sharded_alike():
    """Issue 38: a path with the number of a stage may ask for what cannot be."""
    with pytest.raises(ValueError) as caught:
        pipeline(lambda path, v: by_tuple(path, v) if path[1] == 0 else None)
    assert str(caught.value) == (
        "sharding returns ('tensor', None) for ('stages', 0, 'down', 'kernel') and None for "
        "('stages', 1, 'down', 'kernel'): stages that are alike share one array, so let it return "
        "the same names for all of them"
    )


def test_errors_of_such_a_function_are_its_own():
    """Issue 38: an error of the user's function is not lost behind the second question."""
    with pytest.raises(KeyError, match="stages"):
        pipeline(lambda path, _: {"up": ()}[path[0]])
