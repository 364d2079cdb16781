"""Transfers between meshes: the numbers stay, bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.everywhere import gather_spread, spread, spread_sharding
from collectives.transfer import Exchange, typed
from tests.support.stage_meshes import meshes_of

AXES = "stage", "data", "tensor"
SIZES = [((2, 1), (2, 3)), ((2, 3), (2, 1)), ((1, 2), (1, 4)), ((1, 4), (1, 2)), ((2, 2), (2, 2))]


def same_bits(a: jax.Array, b: jax.Array) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("sent", "received"), SIZES)
@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 7), (jnp.int8, 7), (jnp.int8, 0)])
def test_a_message_between_unlike_meshes(sent, received, dtype, size):
    """Seven numbers divide among no devices, so the last piece is padded."""
    ends = meshes_of(*(dict(zip(AXES, (1, *sizes), strict=True)) for sizes in (sent, received)))
    value = jnp.arange(sent[0] * size).reshape(sent[0], size).astype(dtype)
    types = [[typed(mesh, value.shape, dtype, P("data"))] for mesh in ends]
    (arrived,) = Exchange(*types).compile()([jax.device_put(value, types[0][0].sharding)])
    assert arrived.sharding == types[1][0].sharding
    assert all(same_bits(part.data, value[part.index]) for part in arrived.addressable_shards)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (np.array([0.0, -0.0, np.nan, np.inf] * 3, np.float32), P("data")),
        (np.arange(24).reshape(3, 8), P(None, "data")),
        (np.arange(7, dtype=np.float16), P()),
        (np.array([True, False, False, True]), P("data")),
        (np.array(-0.0, np.float32), P()),
    ],
)
def test_an_array_is_divided_among_all_devices_and_comes_back(value, spec):
    first, last = meshes_of({"data": 2, "tensor": 2}, {"data": 4})
    devices = *first.devices.flat, *last.devices.flat
    x = jax.device_put(value, NamedSharding(first, spec))
    divided = spread(x, devices)
    assert divided.sharding == spread_sharding(x.shape, devices)
    assert same_bits(divided, x)
    back = gather_spread(divided, NamedSharding(last, spec))
    assert back.sharding == NamedSharding(last, spec)
    assert same_bits(back, x)


def test_as_many_devices_as_possible_divide_an_array():
    devices = jax.devices()[:6]
    shapes = (4, 3), (5, 12), (7,), ()
    parts = [spread_sharding(shape, devices).shard_shape(shape) for shape in shapes]
    assert parts == [(4, 1), (5, 2), (7,), ()]
