"""Compiler options of a step: they reach the compiler, defaults, and names that no platform knows.

Regression tests of issue 42.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

from pipeline.training import compiling
from pipeline.training.compiling import default_compiler_options, resolve_compiler_options
from pipeline.training.config.config import Config
from pipeline.training.step import Step
from tests.support import models
from tests.support.models import Block, Readout
from tests.support.refusals import refusal
from tests.training.plain import Chain

FAST_MATH = {"xla_cpu_enable_fast_math": False}


def step(**options: Any) -> Step:
    model = Chain(models.build(Block, 2), Readout(nnx.Rngs(5)), models.cross_entropy)
    return Step(model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param), **options)


def test_options_reach_the_compiler(tmp_path: Path) -> None:
    batch = models.rows(4, seed=0), models.words(4, most=models.CLASSES, seed=0)
    metrics = step(compiler_options={"xla_dump_to": str(tmp_path), **FAST_MATH})(*batch)
    assert metrics is not None
    assert bool(metrics.finite)
    assert any("jit__train" in path.name for path in tmp_path.iterdir())


def test_none_and_the_defaults_of_a_cpu_are_no_options() -> None:
    device = jax.devices()[0]
    assert resolve_compiler_options(None, device) is None
    assert resolve_compiler_options("default", device) is None
    assert resolve_compiler_options({}, device) is None
    assert resolve_compiler_options(FAST_MATH, device) == FAST_MATH


def test_defaults_are_by_kind_of_device_and_only_what_its_compiler_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = jax.devices()[0]
    given = {device.device_kind: {**FAST_MATH, "xla_no_such_option": True}}
    monkeypatch.setattr(compiling, "DEFAULTS", given)
    assert default_compiler_options(device) == FAST_MATH


REFUSED = [
    (
        {"xla_cpu_enable_fast_mth": True},
        (
            "compiler_options={'xla_cpu_enable_fast_mth': True}: the compiler of platform 'cpu' "
            "knows no such option; the nearest name is 'xla_cpu_enable_fast_math'; correct the "
            "name or take it out"
        ),
    ),
    (
        {"xla_cpu_enable_fast_math": "perhaps"},
        (
            "compiler_options={'xla_cpu_enable_fast_math': 'perhaps'}: the compiler of platform "
            "'cpu' refuses this value: INVALID_ARGUMENT: While setting option "
            "xla_cpu_enable_fast_math, 'perhaps' is not a valid bool value; correct the value "
            "or take it out"
        ),
    ),
    (
        {"xla_cpu_enable_fast_math": None},
        (
            "compiler_options={'xla_cpu_enable_fast_math': None}: a name must be a string such as "
            "'xla_tpu_scoped_vmem_limit_kib', and a value a bool, a number or a string"
        ),
    ),
    (
        "fast",
        (
            "compiler_options='fast': must be a mapping from names of XLA's options to their "
            "values, 'default' for those of the platform, or None"
        ),
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_options_are_refused_before_a_step_is_traced(given: Any, said: str) -> None:
    assert refusal(step, compiler_options=given) == said


def test_a_configuration_names_them() -> None:
    tables = {
        "model": {"function": "m:f"},
        "data": {"function": "m:f"},
        "run": {"steps": 1, "compiler_options": FAST_MATH},
    }
    assert Config.from_dict(tables).run.compiler_options == FAST_MATH
    tables["run"] = {"steps": 1}
    assert Config.from_dict(tables).run.compiler_options == "default"
