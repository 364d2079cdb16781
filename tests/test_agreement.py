"""What processes compare at their start, and how they say what differs."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import sys

import pytest

from pipeline.processes.agreement import differences, fields_of, numbers


@dataclasses.dataclass
class Model:
    width: int
    names: frozenset[str]


def test_versions_code_and_settings_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker of pytest-xdist runs no script.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    assert fields_of()["code of the script"] == "absent"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__)
    fields = fields_of()
    assert fields["jax"] == importlib.metadata.version("jax")
    assert fields["flax"] == importlib.metadata.version("flax")
    assert fields["jax_enable_x64"] == "False"
    for package in ("pipeline", "schedules", "collectives"):
        assert len(fields[f"code of {package}"]) == 12
    assert len(fields["code of the script"]) == 12
    assert fields == fields_of()


def test_flags_that_change_no_result_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--xla_force_host_platform_device_count=8 --xla_a=1 --xla_dump_to=/tmp/3"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert fields_of()["XLA_FLAGS"] == "--xla_a=1"


@pytest.mark.parametrize(
    ("config", "flat"),
    [
        (None, {"config": "None"}),
        ({"lr": 0.1, "opt": {"b": [1, 2]}}, {"config.lr": "0.1", "config.opt.b": "[1, 2]"}),
        (
            argparse.Namespace(model=Model(8, frozenset("ba"))),
            {"config.model.width": "8", "config.model.names": "{'a', 'b'}"},
        ),
        ({"process_id": 3, "seed": 0}, {"config.seed": "0"}),
        ({"f": test_versions_code_and_settings_are_compared}, None),
    ],
)
def test_options_are_compared_one_by_one(config: object, flat: dict[str, str] | None) -> None:
    found = {k: v for k, v in fields_of(config).items() if k.startswith("config")}
    if flat is None:  # where an object lies in memory is no option
        assert found == {"config.f": "<function test_versions_code_and_settings_are_compared>"}
    else:
        assert found == flat


def test_a_difference_names_the_field_its_values_and_who_has_them() -> None:
    same = {"jax": "0.12.0", "config.lr": "0.1"}
    other = {"jax": "0.12.0", "config.lr": "0.2"}
    more = {**same, "config.seed": "1"}
    assert differences([same] * 5) == []
    assert differences([same, other, same, same, more]) == [
        "config.lr is 0.1 (processes 0, 2-4), 0.2 (process 1)",
        "config.seed is absent (processes 0-3), 1 (process 4)",
    ]


def test_long_values_are_cut_and_still_told_apart() -> None:
    values = [repr([*range(300), end]) for end in (1, 2)]
    digests = [hashlib.sha256(value.encode()).hexdigest()[:12] for value in values]
    (text,) = differences([{"config.table": value} for value in values])
    assert text == (
        f"config.table is {values[0][:160]}... ({digests[0]}) (process 0), "
        f"{values[0][:160]}... ({digests[1]}) (process 1)"
    )


@pytest.mark.parametrize(
    ("given", "text"), [([0], "0"), ([0, 1], "0-1"), ([1, 3, 4, 5, 7], "1, 3-5, 7")]
)
def test_numbers(given: list[int], text: str) -> None:
    assert numbers(given) == text
