"""The main job's data: a split that no machine moves, and baselines counted by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import baselines
import corpus

FILES = {
    "a.py": b"aaa",
    "b.py": b"bbb",
    "package/c.py": b"ccc",
    "package/test/d.py": b"tests are left out",
    "site-packages/e.py": b"so are installed packages",
    "f.txt": b"and what is not Python",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_only_the_librarys_own_files_are_read(library: Path) -> None:
    assert corpus.names(library) == ["a.py", "b.py", "package/c.py"]


def test_a_folder_called_test_above_the_library_hides_nothing(tmp_path: Path) -> None:
    root = tmp_path / "test"
    root.mkdir()
    (root / "a.py").write_bytes(b"a")
    assert corpus.names(root) == ["a.py"]


def test_the_split_goes_by_name_and_is_the_same_everywhere() -> None:
    names = ["ast.py", "doctest.py", "http/client.py", "http/server.py", "os.py", "warnings.py"]
    held_out = [name for name in names if corpus.is_held_out(name, 10)]
    assert held_out == ["doctest.py", "http/server.py", "warnings.py"]
    share = np.mean([corpus.is_held_out(f"{i}.py", 10) for i in range(5000)])
    assert 0.09 < share < 0.11


def test_the_parts_are_disjoint_and_complete(library: Path) -> None:
    percent = next(
        p for p in range(101) if 0 < sum(corpus.is_held_out(n, p) for n in ("a.py", "b.py")) < 2
    )
    text = corpus.read(library, held_out_percent=percent)
    both = text.train.tobytes() + text.held_out.tobytes()
    assert text.files == 3
    assert sorted(both) == sorted(b"aaabbbccc")
    assert not set(text.train.tobytes()) & set(text.held_out.tobytes())


@pytest.mark.slow
def test_this_pythons_library_is_large_enough_to_train_on() -> None:
    text = corpus.read()
    assert len(text.train) > 3_000_000
    assert len(text.held_out) > 200_000


def test_an_empty_part_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        corpus.read(tmp_path)
    assert str(error.value) == (
        f"corpus: the train part of {tmp_path} is empty; it needs *.py files that fall on either "
        f"side of the split, as in the standard library of a full Python install"
    )


def test_a_batch_follows_from_its_arguments() -> None:
    text = np.arange(200, dtype=np.uint8)
    tokens, targets = corpus.batch(text, step=3, seed=0, size=5, context=7)
    again, _ = corpus.batch(text, step=3, seed=0, size=5, context=7)
    other, _ = corpus.batch(text, step=4, seed=0, size=5, context=7)
    assert tokens.shape == targets.shape == (5, 7)
    assert tokens.dtype == targets.dtype == np.int32
    np.testing.assert_array_equal(targets, tokens + 1)
    np.testing.assert_array_equal(tokens, again)
    assert (tokens != other).any()


def test_even_windows_reach_from_the_first_byte_to_the_last() -> None:
    tokens, targets = corpus.even_windows(np.arange(10, dtype=np.uint8), count=3, context=2)
    np.testing.assert_array_equal(tokens, [[0, 1], [3, 4], [7, 8]])
    np.testing.assert_array_equal(targets, [[1, 2], [4, 5], [8, 9]])


def test_unigram_by_hand() -> None:
    train = np.frombuffer(b"aab", np.uint8)
    targets = np.array([[97, 98, 99]])
    # a, b, c occur 2, 1, 0 times in 3; add-one over 256 values makes that 3, 2, 1 in 259.
    expected = -math.log(3 * 2 * 1 / 259**3) / 3
    assert baselines.unigram(train, targets) == pytest.approx(expected, rel=1e-12)


def test_bigram_by_hand() -> None:
    train = np.frombuffer(b"aabab", np.uint8)
    inputs, targets = np.array([[97, 97], [98, 99]]), np.array([[98, 97], [97, 97]])
    # After a: one a, two b. After b: one a. After c: nothing, so uniform.
    expected = -math.log(3 / 259 * 2 / 259 * 2 / 257 * 1 / 256) / 4
    assert baselines.bigram(train, inputs, targets) == pytest.approx(expected, rel=1e-12)
