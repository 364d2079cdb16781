"""Long sentences of pages are found, and there are none."""

from __future__ import annotations

from tests.docs import prose


def page_rules(page: str) -> list[str]:
    return [f"{one.line}: {one.rule}" for one in prose.page_faults(page, "a.md")]


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


def test_no_page_has_a_long_sentence():
    assert [str(one) for one in prose.faults()] == []


def test_words_of_the_users_pages_are_counted():
    assert len(prose.count_words()) > 20
