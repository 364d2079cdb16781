"""Every model of the zoo trains through a pipeline as it trains by itself (issue 43).

An optional lane, `make zoo`, in an environment of its own: a model whose package is not installed
is skipped.
"""

from __future__ import annotations

import warnings

import pytest

from tests.zoo.check import distances
from tests.zoo.decoders import DECODERS
from tests.zoo.entry import Entry
from tests.zoo.others import OTHERS

ENTRIES = (*DECODERS, *OTHERS)

pytestmark = [
    pytest.mark.usefixtures("lenient"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.make.__name__)
def test_a_model_of_another_package(entry: Entry, tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = entry.make()
        except ImportError as error:
            pytest.skip(f"{entry.package} is not installed: {error}")
    found, allowed = distances(entry, case, tmp_path / "run")
    print(entry.name, found, allowed)  # noqa: T201
    assert max(max(of_step) for of_step in found.values()) <= allowed, found
