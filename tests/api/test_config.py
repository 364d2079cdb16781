"""A configuration fills in what follows, refuses what does not fit, and is the same everywhere."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import ParallelConfig
from tests.support.chips import hosts
from tests.support.refusals import refusal


def make(**fields: Any) -> ParallelConfig:
    return ParallelConfig(**{"stage": 4} | fields)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"data": 1, "tensor": 1, "world_size": 4, "num_processes": None}),
        ({"world_size": 16, "tensor": 2}, {"data": 2}),
        ({"num_processes": 4, "devices_per_process": 4}, {"world_size": 16, "data": 4}),
        ({"data": 2, "num_processes": 4}, {"world_size": 8, "devices_per_process": 2}),
        ({"data": 2, "devices_per_process": 2}, {"world_size": 8, "num_processes": 4}),
        ({"world_size": 16, "axes": {"context": 2}}, {"data": 2, "axes": (("context", 2),)}),
        ({"data": 2, "num_microbatches": 8, "batch_size": 64}, {"microbatch_size": 4}),
        ({"data": 2, "num_microbatches": 8, "microbatch_size": 4}, {"batch_size": 64}),
        ({"data": 2, "microbatch_size": 4, "batch_size": 64}, {"num_microbatches": 8}),
        ({"batch_size": 64}, {"num_microbatches": None, "microbatch_size": None}),
        ({"param_dtype": jnp.bfloat16}, {"compute_dtype": "bfloat16", "grad_dtype": "bfloat16"}),
        ({"compute_dtype": "bfloat16"}, {"param_dtype": "float32", "grad_dtype": "float32"}),
    ],
)
def test_what_follows_is_filled_in(given: Any, found: Any) -> None:
    config = make(**given)
    assert {name: getattr(config, name) for name in found} == found


def test_sizes_may_be_integers_of_any_kind() -> None:
    sizes = {"stage": 4, "tensor": 2, "num_processes": 2, "process_id": 1, "num_microbatches": 8}
    config = make(axes={"expert": np.array(2)}, **{k: np.int32(v) for k, v in sizes.items()})
    plain = make(axes={"expert": 2}, **sizes)
    assert config == plain
    assert json.dumps(config.to_dict()) == json.dumps(plain.to_dict())
    assert config.checksum() == plain.checksum()


MANY = (
    "data=2 stage=4 tensor=2, data=4 stage=2 tensor=2, data=4 stage=4 tensor=1, "
    "data=1 stage=4 tensor=4, data=1 stage=8 tensor=2, data=8 stage=1 tensor=2 (the nearest of 15)"
)


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        (
            {"stage": 0, "tensor": None, "data": True, "process_id": -1, "param_dtype": "int8"},
            [
                "stage=0: must be an integer >= 1",
                "data=True: must be an integer >= 1, or None for what follows from the others",
                "tensor=None: must be an integer >= 1",
                "process_id=-1: must be an integer >= 0, or None",
                (
                    "param_dtype='int8': must be a floating dtype of 16 bits or more, such as "
                    "'bfloat16'"
                ),
            ],
        ),
        (
            {"axes": {"tensr": 2, "expert": 0, "devices": 1}, "grad_dtype": "float23"},
            [
                "axes['expert']=0: must be an integer >= 1",
                (
                    "grad_dtype='float23': must be a floating dtype of 16 bits or more, such as "
                    "'bfloat16'"
                ),
                (
                    "axis 'tensr': looks like 'tensor' misspelt; write tensor, or choose a name "
                    "that is not so close"
                ),
                "axis 'devices': there is an argument of that name already; use that",
            ],
        ),
        (
            {"stage": np.True_, "data": np.float32(2), "process_id": np.int8(-1)},
            [
                f"stage={np.True_!r}: must be an integer >= 1",
                (
                    f"data={np.float32(2)!r}: must be an integer >= 1, or None for what follows "
                    "from the others"
                ),
                f"process_id={np.int8(-1)!r}: must be an integer >= 0, or None",
            ],
        ),
        (
            {"axes": [("context", 1), ("context", 2)]},
            ["axis 'context': given 2 times"],
        ),
        (
            {"compute_dtype": "float8_e4m3fn"},
            [
                (
                    "compute_dtype='float8_e4m3fn': must be a floating dtype of 16 bits or more, "
                    "such as 'bfloat16'"
                )
            ],
        ),
        ({"axes": 3}, ["axes=3: must be a mapping from names to sizes"]),
        (
            {"param_dtype": "float64"},
            [
                (
                    "param_dtype='float64': JAX has no float64 unless jax_enable_x64 is set; set "
                    "it, or use 'float32'"
                ),
            ],
        ),
        (
            {"data": 3, "tensor": 2, "world_size": 16},
            [
                (
                    "data=3 stage=4 tensor=2: the product 24 is not world_size = 16; these give "
                    f"it: {MANY}"
                ),
            ],
        ),
        (
            {"tensor": 2, "num_processes": 3, "devices_per_process": 4},
            [
                (
                    "stage=4 tensor=2: the product 8 does not divide num_processes * "
                    "devices_per_process = 12; these give it: data=2 stage=3 tensor=2, "
                    "data=1 stage=4 tensor=3, data=1 stage=6 tensor=2, data=3 stage=2 tensor=2, "
                    "data=3 stage=4 tensor=1, data=6 stage=1 tensor=2 (the nearest of 18)"
                )
            ],
        ),
        (
            {"world_size": 16, "num_processes": 3},
            [
                (
                    "num_processes=3: must divide world_size = 16, since every process has the "
                    "same number of devices; use 2 or 4"
                ),
            ],
        ),
        (
            {"stage": 3, "tensor": 2, "data": 2, "devices_per_process": 4, "num_processes": 3},
            [
                (
                    "stage=3 tensor=2: a group of 6 devices would straddle processes unevenly, "
                    "since each of 3 gives 4; make stage * tensor a divisor or a multiple of 4"
                ),
            ],
        ),
        (
            {
                "world_size": 8,
                "num_processes": 2,
                "devices_per_process": 2,
                "process_id": 3,
                "num_microbatches": 3,
                "batch_size": 64,
            },
            [
                (
                    "num_processes=2 * devices_per_process=2 is 4, but world_size = 8; leave one "
                    "of the three out"
                ),
                "process_id=3: num_processes=2 have the indices 0..1",
                "batch_size=64: must be a multiple of num_microbatches=3 * data=2, 6; use 60 or 66",
            ],
        ),
        ({"process_id": 0}, ["process_id=0: says nothing without num_processes; give that too"]),
        (
            {"data": 2, "num_microbatches": 3, "microbatch_size": 2, "batch_size": 64},
            ["batch_size=64: must be num_microbatches=3 * data=2 * microbatch_size=2, 12; use 12"],
        ),
        (
            {"data": 2, "num_microbatches": 3, "batch_size": 4},
            ["batch_size=4: must be a multiple of num_microbatches=3 * data=2, 6; use 6"],
        ),
    ],
)
def test_all_faults_at_once(given: Any, faults: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make(**given)
    count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    assert str(caught.value) == "\n- ".join([f"ParallelConfig has {count}", *faults])


KEYS = (
    "stage, data, tensor, axes, world_size, num_processes, devices_per_process, process_id, "
    "num_microbatches, microbatch_size, batch_size, param_dtype, compute_dtype, grad_dtype"
)


def test_unknown_keys_and_other_faults_together() -> None:
    assert refusal(
        ParallelConfig.from_dict, {"stages": 2, "zero": 1, "microbatches": 3, "data": 0}
    ) == (
        "ParallelConfig has 5 faults\n"
        "- unknown key 'stages'; did you mean 'stage'?\n"
        f"- unknown key 'zero'; the keys are {KEYS}\n"
        "- unknown key 'microbatches'; did you mean 'num_microbatches'?\n"
        "- stage is missing: the number of ranks of the pipeline\n"
        "- data=0: must be an integer >= 1, or None for what follows from the others"
    )


def test_a_file_that_holds_no_mapping() -> None:
    assert refusal(ParallelConfig.from_dict, [4, 2]) == (
        "ParallelConfig has 1 fault\n- values is of type list; give a mapping of fields"
    )


def test_to_a_file_and_back() -> None:
    config = make(axes={"expert": 1, "context": 2}, compute_dtype="bfloat16", num_processes=2)
    again = ParallelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert again.checksum() == config.checksum()


def test_a_checksum_is_the_same_on_every_process_and_every_day() -> None:
    first, second = (make(num_processes=2, process_id=n, data=2) for n in range(2))
    assert first.checksum() == second.checksum() == "229e9d9e621f1abf"
    assert first.differences(second) == {}
    assert first != second


def test_a_checksum_tells_all_shared_fields_apart() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"stage": 2},
        {"data": 2},
        {"num_processes": 2},
        {"num_microbatches": 4},
        {"compute_dtype": "bfloat16"},
        {"axes": {"expert": 1, "context": 1}},
        {"axes": {"context": 1, "expert": 1}},  # another mesh
    ]
    configs = [make(**change) for change in changes]
    assert len({config.checksum() for config in configs}) == len(configs)
    pairs = [(a, b) for a in configs for b in configs if a is not b]
    assert all(a.differences(b) for a, b in pairs)


def test_differences_name_fields_and_both_values() -> None:
    here, there = make(), make(stage=2, world_size=4, compute_dtype="bfloat16")
    found = {"stage": (4, 2), "data": (1, 2), "compute_dtype": ("float32", "bfloat16")}
    assert here.differences(there) == found
    assert here.differences(there.to_dict() | {"new": 1}) == found | {"new": (None, 1)}


def test_as_text() -> None:
    config = make(
        tensor=2,
        world_size=16,
        num_processes=4,
        process_id=1,
        num_microbatches=8,
        batch_size=64,
        compute_dtype="bfloat16",
    )
    assert str(config) == (
        "mesh       data 2 x stage 4 x tensor 2 = 16 devices\n"
        "processes  4 with 4 devices each; this is 1\n"
        "batch      64 rows = 8 microbatches x 2 data shards x 4 rows\n"
        "precision  parameters float32, compute bfloat16, gradients float32\n"
        f"checksum   {config.checksum()}"
    )
    assert str(ParallelConfig(stage=1)) == (
        "mesh       data 1 x stage 1 x tensor 1 = 1 device\n"
        "processes  not given\n"
        "batch      not given\n"
        "precision  parameters float32, compute float32, gradients float32\n"
        f"checksum   {ParallelConfig(stage=1).checksum()}"
    )
    assert "batch      num_microbatches 8\n" in str(make(num_microbatches=8))


def test_its_mesh_has_data_stage_and_tensor_always() -> None:
    assert dict(make(data=2).mesh().shape) == {"data": 2, "stage": 4, "tensor": 1}
    config = make(stage=2, axes={"context": 2}, tensor=2)
    assert list(config.mesh().shape.items()) == [
        ("data", 1),
        ("stage", 2),
        ("context", 2),
        ("tensor", 2),
    ]
    assert config.sizes == dict(config.mesh().shape)


def test_a_mesh_over_other_processes_than_said() -> None:
    config = make(num_processes=4, process_id=1)
    assert refusal(config.mesh) == (
        "ParallelConfig has 2 faults\n"
        "- num_processes=4: the devices belong to 1; start as many processes, or change the field\n"
        "- process_id=1: JAX says that this is process 0; give both the same, or leave the field "
        "out"
    )
    mesh = config.mesh(hosts(1, 1, 1, 1))
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3]
