"""Imports: jax is imported when it is first needed (issue 38)."""

from __future__ import annotations

import pytest

import pipeline
from pipeline import processes
from tests.support.elsewhere import python

IMPORTED = """
import sys
try:
    {statement}
except SystemExit:
    pass
print("jax" in sys.modules, file=sys.stderr)
"""


@pytest.mark.few
@pytest.mark.parametrize(
    ("statement", "imports_jax"),
    [
        ("import pipeline, pipeline.processes, pipeline.planner, schedules", False),
        *(
            (f"from pipeline.cli.main import main; main({arguments!r})", False)
            for arguments in (["--help"], ["plan", "--help"], ["launch", "--help"], ["bogus"])
        ),
        ("from pipeline import Pipeline", True),
        ("import pipeline; pipeline.layers", False),
        ("import pipeline; pipeline.layers.Attention", True),
    ],
)
def test_jax_is_imported_when_it_is_needed(statement, imports_jax):
    done = python("-c", IMPORTED.format(statement=statement))
    assert done.stderr.split()[-1] == str(imports_jax)


@pytest.mark.parametrize("package", [pipeline, processes])
def test_every_public_name_is_there(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        package.x  # noqa: B018
