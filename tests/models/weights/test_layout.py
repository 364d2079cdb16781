"""Layout strings: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.splitting.layouts import _WANTED as WANTED
from pipeline.splitting.layouts import place_modules
from pipeline.weights import parse_layout, read_layout, write_layout


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("E|(t|)*10m|L", ["E", *["t"] * 10, "m", "L"]),
        ("Et*3|(tt|)*2,m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("Et | (t*2 | (t|)*2)*2 tL", ["Et", "tt", "t", "t", "tt", "t", "t", "tL"]),
        ("EttL", ["EttL"]),
        ("Et||tL", ["Et", "", "tL"]),
        ("Ett|mmLLL", ["Ett", "mmLLL"]),
        ("Ett|mL|L", ["Ett", "mL", "L"]),
        ([["embedding", "decoder"], [], ["decoder", "loss"]], ["Et", "", "tL"]),
        ((("embedding",), ("decoder",), ("mtp", "loss")), ["E", "t", "mL"]),
    ],
)
def test_what_a_layout_means(text: Any, stages: list[str]):
    assert read_layout(text) == stages


def test_layers_of_each_stage():
    assert parse_layout("Et*7|(t*8|)*2t*7L", 30) == [7, 8, 8, 7]
    for counts in ([7, 8, 8, 7], [0, 1, 2], [3], [0, 3, 0]):
        assert parse_layout(write_layout(counts), sum(counts)) == counts


def test_multi_token_layers_of_each_stage():
    text = "Et|t|(m|)*2L"
    assert parse_layout(text, 2, 2) == [1, 1, 0, 0, 0]
    assert place_modules(text) == [0, 0, 1, 1, 0]
    assert write_layout([1, 1, 0, 0, 0], [0, 0, 1, 1, 0]) == "Et|t|m|m|L"
    assert write_layout([0, 2], [0, 3]) == "E|t*2m*3L"
    with pytest.raises(ValueError) as caught:
        parse_layout("EttL", 2, 1)
    assert str(caught.value) == (
        "layout='EttL' has 0 m, and the model has 1 modules for multi-token prediction: write an m "
        "for each after the last t, as in 'Et|tmL'"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"layout='': {WANTED}"),
        ([], f"layout=[]: {WANTED}"),
        (3, f"layout=3: {WANTED}"),
        (
            [["embedding", "decoder"], ["encoder", "loss"]],
            (
                "layout[1]=['encoder', 'loss']: must be a list of names, each of them one of "
                "'embedding', 'decoder', 'mtp', 'loss'"
            ),
        ),
        (
            ["Et", "tL"],
            (
                "layout[0]='Et': must be a list of names, each of them one of 'embedding', "
                "'decoder', 'mtp', 'loss'"
            ),
        ),
        ("EtL|tL", "layout='EtL|tL' is 'EtL|tL' written out, with 2 L: there is one, the last"),
        (
            "Et|mLLL",
            (
                "layout='Et|mLLL' is 'Et|mLLL' written out, with 3 L: there is one, the last, or "
                "1 and one for each of 1 m"
            ),
        ),
        ("E|(t|*2L", "layout='E|»(«t|*2L': '(' is never closed"),
        ("Et)L", "layout='Et»)«L': ')' closes nothing"),
        ("Et*L", "layout='Et»*«L': '*' is not followed by a number from 1 to 999999"),
        ("Et*0L", "layout='Et»*«0L': '*' is not followed by a number from 1 to 999999"),
        ("*2EtL", "layout='»*«2EtL': '*' repeats nothing: it follows a letter or a )"),
        (
            "Etx|L",
            (
                "layout='Et»x«|L': 'x' is none of E embedding, t layer, m multi-token layer, L "
                "head, | ( ) * ,"
            ),
        ),
        (
            "tE|L",
            "layout='tE|L' is 'tE|L' written out, with 1 E: there is one, the first letter",
        ),
        ("Et|t", "layout='Et|t' is 'Et|t' written out, with 0 L: there is one, the last"),
        ("Emt|L", "layout='Emt|L': an m comes before a t; multi-token layers come last"),
        ("E(t*999)*999L", "layout='E(t*999)*999L' has more than 100,000 letters"),
        (
            "Et|tL",
            "layout='Et|tL' has 2 t, in stages of 1, 1, and the model has 3 layers",
        ),
        (
            "Ettt|mL",
            (
                "layout='Ettt|mL' has 1 m, layers for multi-token prediction, and this model has "
                "none; leave them out"
            ),
        ),
    ],
)
def test_what_is_no_layout(text: str, message: str):
    with pytest.raises(ValueError) as caught:
        parse_layout(text, 3)
    assert str(caught.value) == message
