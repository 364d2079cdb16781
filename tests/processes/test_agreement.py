"""Comparison of processes at their start, and the messages for differences."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import importlib.metadata
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import schedules
from pipeline.processes.agreement import agree, differences, fields_of
from pipeline.processes.names import numbers
from tests.support.store import Store


@dataclasses.dataclass
class Model:
    width: int
    names: frozenset[str]


def test_versions_code_and_settings_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker of pytest-xdist runs no script.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    assert fields_of()["code of the script"] == "absent"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>")
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


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's, beside the script."""
    path = tmp_path / "stages_of_mine.py"
    path.write_text("WIDTH = 8\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    importlib.import_module(path.stem)
    yield path
    del sys.modules[path.stem]


def test_the_source_of_a_stage_is_compared(module: Path) -> None:
    first = fields_of()
    module.write_text("WIDTH = 9\n", encoding="utf-8")
    second = fields_of()
    (text,) = differences([first, first, second])
    name = "code of module stages_of_mine"
    assert text == f"{name} is {first[name]} (processes 0-1), {second[name]} (process 2)"
    assert first[name] != second[name]
    # A module that one process alone has loaded, such as for drawing, is no difference.
    assert differences([first, {k: v for k, v in first.items() if k != name}]) == []


def test_what_is_installed_is_compared_by_version_alone() -> None:
    names = [name for name in fields_of() if name.startswith("code of module ")]
    assert "code of module tests.processes.test_agreement" in names
    roots = {name.split()[-1].split(".")[0] for name in names}
    assert not roots & {"pipeline", "schedules", "collectives", "jax", "numpy", "pytest", "json"}


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    first, version = fields_of(), importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "0.0.1" if name == "optax" else version(name),
    )
    assert differences([first, fields_of()]) == [
        f"optax is {first['optax']} (process 0), 0.0.1 (process 1)"
    ]


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("jax_enable_x64", True, "jax_enable_x64 is False (process 0), True (process 1)"),
        ("jax_debug_nans", True, "jax_debug_nans is False (process 0), True (process 1)"),
        (
            "jax_default_matmul_precision",
            "float32",
            "jax_default_matmul_precision is None (process 0), 'float32' (process 1)",
        ),
        (
            "jax_numpy_dtype_promotion",
            "standard",
            (
                "jax_numpy_dtype_promotion is <NumpyDtypePromotion.STRICT: 'strict'> (process 0), "
                "<NumpyDtypePromotion.STANDARD: 'standard'> (process 1)"
            ),
        ),
    ],
)
def test_another_setting_of_jax(name: str, value: object, text: str) -> None:
    first, before = fields_of(), getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        assert differences([first, fields_of()]) == [text]
    finally:
        jax.config.update(name, before)


def test_another_flag_of_the_tpu_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fields_of()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=true")
    assert differences([first, fields_of()]) == [
        "LIBTPU_INIT_ARGS is empty (process 0), --xla_tpu_a=true (process 1)"
    ]


def test_what_a_timetable_says_is_compared(tmp_path: Path) -> None:
    paths = []
    for name in ("gpipe", "1f1b"):
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "mine.csv")
        schedules.build(name, num_ranks=2, num_microbatches=4).to_csv(paths[-1])
    found = [fields_of({"schedule": "mine.csv"}) | only_timetable(path) for path in paths]
    first, second = (own["timetable in config.schedule"] for own in found)
    assert differences([found[0], *found]) == [
        f"timetable in config.schedule is {first} (processes 0-1), {second} (process 2)"
    ]


def only_timetable(path: Path) -> dict[str, str]:
    name = "timetable in config.schedule"
    return {name: fields_of({"schedule": str(path)})[name]}


def test_files_that_are_no_timetables_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"
    path.write_text("step,loss\n1,2.0\n", encoding="utf-8")
    assert set(fields_of({"log": path})) - set(fields_of()) == {"config.log"}


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
        ({"tags": [{"b", "a"}, ("c",)]}, {"config.tags": "[{'a', 'b'}, ('c')]"}),
        (
            {"models": [Model(8, frozenset("ba"))]},
            {"config.models": "[Model(width=8, names={'a', 'b'})]"},
        ),
        (
            {"mask": np.arange(5000)},
            {"config.mask": "int64[5000] a3d44437f284"},
        ),
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


SAME = {"jax": "0.12.0", "code of module mine": "abc"}


@pytest.mark.parametrize("last", [SAME, {"jax": "0.12.0"}])
def test_processes_that_agree_go_on(last: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch)
    told = [partial(agree, fields, i, 3, 600) for i, fields in enumerate([SAME, SAME, last])]
    assert store.each(*told) == [None] * 3
    # The fields are read only where a digest of them differs.
    assert ("shardpipe/start/fields/" in store.read) == (last != SAME)


def test_a_difference_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [{"jax": "1"}, {"jax": "2"}, {"jax": "1", "config.lr": "0.1"}]
    found = Store(monkeypatch).each(
        *(partial(agree, own, i, 3, 600) for i, own in enumerate(fields))
    )
    assert {type(error) for error in found} == {ValueError}
    (text,) = {str(error) for error in found}
    assert text == (
        "the processes do not run the same program: jax is 1 (processes 0, 2), 2 (process 1); "
        "config.lr is absent (processes 0-1), 0.1 (process 2); give all of them the same code, "
        "versions and options"
    )


def test_who_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Store(monkeypatch)
    with pytest.raises(TimeoutError) as error:
        agree(SAME, 0, 3, 0.1)
    assert str(error.value) == (
        "process 0 of 3 heard nothing of processes 1-2 within 0.1 s, though connected; see that "
        "all run the same program, which calls pipeline.initialize()"
    )
