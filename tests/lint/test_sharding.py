"""Parts of a model on each device, as text, and warnings of weights that all devices hold."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from collectives import make_mesh
from pipeline import Pipeline, check_sharding, describe_sharding


class Block(nnx.Module):
    """Two weights and a key."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def place(variable: Any, mesh: Any, *spec: Any) -> None:
    where = NamedSharding(mesh, PartitionSpec(*spec))
    variable.set_value(jax.device_put(variable[...], where))


def test_a_module_on_no_mesh() -> None:
    assert describe_sharding(Block()) == (
        "array            type            divided by  on a device  bytes    replicated over\n"
        "drop.rngs.count  uint32[]        on no mesh  []           4 B      -\n"
        "drop.rngs.key    key<fry>[]      on no mesh  []           8 B      -\n"
        "up.bias          float32[64]     on no mesh  [64]         256 B    -\n"
        "up.kernel        float32[16,64]  on no mesh  [16,64]      4.0 KiB  -\n"
        "4 arrays of 4.3 KiB; 4.3 KiB on each device"
    )


def test_a_divided_weight_beside_others_that_are_not() -> None:
    mesh, block = make_mesh(stage=2, tensor=2, data=2), Block()
    place(block.up.kernel, mesh, None, ("tensor", "stage"))
    assert describe_sharding(nnx.state(block, nnx.Param), mesh) == (
        "array      type            divided by      on a device  bytes    replicated over\n"
        "up.bias    float32[64]     -               [64]         256 B    "
        "data 2, stage 2, tensor 2\n"
        "up.kernel  float32[16,64]  - tensor*stage  [16,16]      1.0 KiB  data 2\n"
        "2 arrays of 4.2 KiB; 1.2 KiB on each device\n"
        "largest that an axis could divide and does not:\n"
        "  up.bias: 256 B; dimension 0 by stage leaves 128 B"
    )


def test_a_pipeline() -> None:
    pipe = Pipeline(
        [Block(0), Block(1)],
        2,
        mesh=make_mesh(stage=2, data=2),
        embed=nnx.Linear(3, 16, use_bias=False, rngs=nnx.Rngs(0)),
    )
    assert describe_sharding(nnx.state(pipe, nnx.Param)) == (
        "array               type              divided by  on a device  bytes    replicated over\n"
        "chunks.0.up.bias    float32[2,64]     stage -     [1,64]       256 B    data 2\n"
        "chunks.0.up.kernel  float32[2,16,64]  stage - -   [1,16,64]    4.0 KiB  data 2\n"
        "ends.embed.kernel   float32[3,16]     - -         [3,16]       192 B    data 2, stage 2\n"
        "3 arrays of 8.7 KiB; 4.4 KiB on each device\n"
        "largest that an axis could divide and does not:\n"
        "  ends.embed.kernel: 192 B; dimension 1 by stage leaves 96 B"
    )


def test_types_that_say_where_they_will_lie() -> None:
    mesh = make_mesh(stage=2, tensor=2)

    def build() -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "tensor"))
        return nnx.Linear(4, 6, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh):
        model = nnx.eval_shape(build)
    assert describe_sharding(model, mesh) == (
        "array   type          divided by  on a device  bytes  replicated over\n"
        "kernel  float32[4,6]  - tensor    [4,3]        48 B   stage 2\n"
        "1 arrays of 96 B; 48 B on each device\n"
        "largest that an axis could divide and does not:\n"
        "  kernel: 48 B; dimension 0 by stage leaves 24 B"
    )


def test_an_optimizer_and_plain_trees() -> None:
    optimizer = nnx.Optimizer(Block(), optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    paths = [line.split()[0] for line in describe_sharding(optimizer).splitlines()[1:-1]]
    assert paths == ["opt_state.0.trace.up.bias", "opt_state.0.trace.up.kernel", "step"]
    tree = {"a": jnp.zeros(3), "b": 3, "c": [jax.ShapeDtypeStruct((4,), jnp.int8)]}
    assert describe_sharding(tree).splitlines()[1:] == [
        "a      float32[3]  on no mesh  [3]          12 B   -",
        "c.0    int8[4]     on no mesh  [4]          4 B    -",
        "2 arrays of 16 B; 16 B on each device",
    ]
    assert describe_sharding(jnp.zeros(3)).splitlines()[1].split()[:2] == ["the", "array"]
    assert describe_sharding({}) == "no arrays"


def test_lines_stay_within_their_width() -> None:
    mesh = make_mesh(stage=2, tensor=2, data=2)
    tree = {"a_rather_long_name": {"of_a_weight_in_a_deep_model": jnp.zeros((8, 64))}}
    for width in (60, 80, 100):
        text = describe_sharding(tree, mesh, width=width)
        assert max(map(len, text.splitlines())) <= width
    assert "\na_rat…_model  float32[8,64]  " in describe_sharding(tree, mesh, width=88)


LARGE = (
    "parameters of more than 200 B that several devices hold alike\n"
    "- up.kernel float32[16,64]: 2.0 KiB alike along tensor 2; dividing dimension 1 by tensor, "
    "PartitionSpec('stage', 'tensor'), leaves 1.0 KiB\n"
    "- up.bias float32[64]: 256 B alike along stage 4, tensor 2; dividing dimension 0 by stage, "
    "PartitionSpec('stage'), leaves 64 B, or dimension 0 by tensor, PartitionSpec('tensor'), "
    "leaves 128 B\n"
    "place them with jax.device_put and a NamedSharding of that spec, or raise the limit"
)


def large() -> tuple[Block, Any]:
    mesh, block = make_mesh(stage=4, tensor=2), Block()
    place(block.up.kernel, mesh, "stage")
    return block, mesh


def test_a_warning_names_weight_axis_and_dimension() -> None:
    block, mesh = large()
    place(block.up.kernel, make_mesh(stage=2, tensor=2), "stage")
    with pytest.warns(UserWarning, match="hold alike") as caught:
        check_sharding(block, mesh, limit=200)
    assert [str(one.message) for one in caught] == [LARGE]
    assert caught[0].filename == __file__


def test_an_error_instead() -> None:
    block, mesh = large()
    with pytest.raises(ValueError) as raised:
        check_sharding(block, mesh, limit=1000, action="raise")
    assert str(raised.value) == (
        "parameters of more than 1000 B that several devices hold alike\n"
        "- up.kernel float32[16,64]: 1.0 KiB alike along tensor 2; dividing dimension 1 by tensor, "
        "PartitionSpec('stage', 'tensor'), leaves 512 B\n"
        "place them with jax.device_put and a NamedSharding of that spec, or raise the limit"
    )


def test_data_replicates_on_purpose_unless_named() -> None:
    block, mesh = Block(), make_mesh(stage=1, data=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_sharding(block, mesh, limit=0)
    with pytest.raises(ValueError) as raised:
        check_sharding(block, mesh, limit=256, action="raise", axes=["data"])
    assert str(raised.value) == (
        "parameters of more than 256 B that several devices hold alike\n"
        "- up.kernel float32[16,64]: 4.0 KiB alike along data 8; dividing dimension 1 by data, "
        "PartitionSpec(None, 'data'), leaves 512 B\n"
        "place them with jax.device_put and a NamedSharding of that spec, or raise the limit"
    )


def test_weights_that_no_axis_divides_and_more_of_them_than_are_shown() -> None:
    tree = {f"w{n}": jnp.zeros((7, 9)) for n in range(7)}
    with pytest.raises(ValueError) as raised:
        check_sharding(tree, make_mesh(stage=4), limit=8, action="raise")
    lines = [
        f"- w{n} float32[7,9]: 252 B alike along stage 4; no dimension of [7, 9] is a multiple of "
        f"any: pad one"
        for n in range(5)
    ]
    assert str(raised.value).splitlines()[1:-1] == [*lines, "- and 2 more"]


def test_small_or_divided_weights_pass() -> None:
    mesh, block = make_mesh(stage=8), Block()
    check_sharding(block, mesh)
    place(block.up.kernel, mesh, None, "stage")
    check_sharding(block, mesh, limit=256)


def test_an_unknown_action() -> None:
    with pytest.raises(ValueError) as raised:
        check_sharding(Block(), action="ignore")  # type: ignore[arg-type]
    assert str(raised.value) == "action='ignore': must be 'warn' or 'raise'"
