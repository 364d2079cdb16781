"""The lint of prose: it finds each kind of fault, and the house has none."""

from __future__ import annotations

import pytest

from tests.docs import prose

GOOD = '''"""The clocks of a schedule."""
def f():
    """Tell whether a rank waits."""
class A:
    """A rank's actions.

    What it says further down is free.
    """
'''


def rules(source: str) -> list[str]:
    return [f"{one.line}: {one.rule}" for one in prose.docstring_faults(source, "a.py")]


def page_rules(page: str) -> list[str]:
    return [f"{one.line}: {one.rule}" for one in prose.page_faults(page, "a.md")]


def test_noun_phrases_and_imperatives_pass():
    assert rules(GOOD) == []


@pytest.mark.parametrize("word", prose.OPENINGS)
def test_an_opening_of_a_docstring_is_found(word):
    source = f'x = 1\ndef f():\n    """{word} a rank does."""\n'
    assert rules(source) == [f'3: a docstring begins with "{word}"']


def test_a_word_that_only_begins_like_one_passes():
    assert rules('"""Offsets of rows."""') == rules('"""Whatever follows."""') == []


def test_long_sentences_of_a_page_are_found():
    long = " ".join(["word"] * (prose.LONGEST + 1)) + "."
    edge = " ".join(["word"] * prose.LONGEST) + "."
    assert page_rules(f"# Title\n\n{edge}\n\n* {edge}\n* A {long}") == [
        f"6: a sentence of {prose.LONGEST + 2} words"
    ]
    assert page_rules(f"```python\n{long}\n```\n\n| {long} | {long} |\n") == []


def test_a_sentence_over_several_lines_is_one():
    half = " ".join(["word"] * 20)
    assert page_rules(f"The {half}\n{half}.\nEnd.") == ["1: a sentence of 41 words"]
    assert page_rules(f"The {half}.\nAnd {half}: `x = 1` is {half[:40]}.") == []


def test_openings_of_pages_are_found():
    page = "First. What a rank sends is small. What does it send? Of eight, two are slow."
    assert page_rules(page) == [
        '1: a sentence begins with "What"',
        '1: a sentence begins with "Of"',
    ]


def test_likewise_on_a_page_is_found():
    assert page_rules("Weights are float32, the head likewise.") == [
        '1: a sentence says "likewise"'
    ]


def test_the_house_has_no_faults():
    assert [str(one) for one in prose.faults()] == []


def test_the_users_pages_are_short_enough():
    counted = prose.count_words()
    assert len(counted) > 30
    assert sum(counted.values()) <= prose.MOST_WORDS


def test_files_left_for_later_exist():
    assert [one for one in prose.LATER if not (prose.ROOT / one).exists()] == []
