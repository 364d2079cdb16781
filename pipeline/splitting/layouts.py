"""Layout strings, which say what layers each stage has: ``E|(t|)*10m|L``.

Megatron-LM's ``--pipeline-model-parallel-layout`` has this grammar: E is the embedding, t a layer,
m a layer for multi-token prediction, L head and loss, and ``|`` ends a stage. ``x*3`` is ``xxx``,
for a letter or a sequence in parentheses; commas and spaces mean nothing. Megatron-LM's other form,
a list of names for each stage, is read too.

Letters of this module: K stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Layout = str | Sequence[Sequence[str]]
KINDS = "EtmL"
NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_WANTED = (
    "must be a string such as 'E|(t|)*10m|L', or a list for each stage such as [['embedding', "
    "'decoder'], ['decoder', 'loss']]"
)
LARGEST = 100_000  # the most letters of a layout with its repetitions written out


@dataclass(frozen=True)
class _LayoutReader:
    text: str

    def sequence(self, at: int, *, inside: bool) -> tuple[str, int]:
        """Read a sequence at ``at``; return its letters, repetitions written out, and its end."""
        found, start = "", at
        while at < len(self.text):
            letter = self.text[at]
            if letter == ")":
                if not inside:
                    raise self.wrong(at, "closes nothing")
                return found, at
            if letter in ", ":
                at += 1
                continue
            if letter == "(":
                item, close = self.sequence(at + 1, inside=True)
                at = close + 1
            elif letter in KINDS or letter == "|":
                item, at = letter, at + 1
            elif letter == "*":
                raise self.wrong(at, "repeats nothing: it follows a letter or a )")
            else:
                raise self.wrong(
                    at, "is none of E embedding, t layer, m multi-token layer, L head, | ( ) * ,"
                )
            times, at = self.times(at)
            found += item * times
            if len(found) > LARGEST:
                raise ValueError(f"layout={self.text!r} has more than {LARGEST:,} letters")
        if inside:
            raise self.wrong(start - 1, "is never closed")
        return found, at

    def times(self, at: int) -> tuple[int, int]:
        """Return the count of a repetition (1 if there is none), and the place after it."""
        if self.text[at : at + 1] != "*":
            return 1, at
        stop = at + 1
        while stop < len(self.text) and self.text[stop] in "0123456789":
            stop += 1
        number = self.text[at + 1 : stop]
        if not number or int(number[:9]) < 1 or len(number) > 6:
            raise self.wrong(at, "is not followed by a number from 1 to 999999")
        return int(number), stop

    def wrong(self, at: int, why: str) -> ValueError:
        """Make an error that marks a letter of the layout."""
        marked = f"{self.text[:at]}»{self.text[at]}«{self.text[at + 1 :]}"
        return ValueError(f"layout={marked!r}: {self.text[at]!r} {why}")


def read_layout(text: Layout) -> list[str]:
    """Return [K] the letters of each stage.

    Args:
      text: the layout, or a list of names for each stage.

    Raises:
      ValueError: the text is no layout (the error marks the letter); the embedding is not the first
        letter; the head is not the last; or the number of heads is neither one nor one more than
        the number of multi-token layers.
    """
    if isinstance(text, str):
        if not text.strip(", "):
            raise ValueError(f"layout={text!r}: {_WANTED}")
        whole, _ = _LayoutReader(text).sequence(0, inside=False)
    else:
        whole = _of_lists(text)
    stages = whole.split("|")
    found = f"layout={text!r} is {whole!r} written out, with"
    if whole.count("E") != 1 or not whole.startswith("E"):
        raise ValueError(f"{found} {whole.count('E')} E: there is one, the first letter")
    # Each multi-token layer may have its own loss.
    if not whole.endswith("L") or whole.count("L") not in (1, 1 + whole.count("m")):
        also = f", or 1 and one for each of {whole.count('m')} m" if "m" in whole else ""
        raise ValueError(f"{found} {whole.count('L')} L: there is one, the last{also}")
    if (late := whole.find("m")) >= 0 and "t" in whole[late:]:
        raise ValueError(f"layout={text!r}: an m comes before a t; multi-token layers come last")
    return stages


def _of_lists(stages: Any) -> str:
    """Convert a layout of lists of names, as Megatron-LM's, to its string."""
    if not isinstance(stages, list | tuple) or not stages:
        raise ValueError(f"layout={stages!r}: {_WANTED}")
    for k, names in enumerate(stages):
        is_list = isinstance(names, list | tuple)
        if not is_list or not all(isinstance(n, str) and n in NAMES for n in names):
            raise ValueError(
                f"layout[{k}]={names!r}: must be a list of names, each of them one of "
                f"{', '.join(map(repr, NAMES))}"
            )
    return "|".join("".join(NAMES[name] for name in names) for names in stages)


def parse_layout(text: Layout, layers: int, mtp_layers: int = 0) -> list[int]:
    """Return [K] the number of layers of each stage.

    Args:
      text: the layout, as `read_layout` takes it.
      mtp_layers: number of the model's modules for multi-token prediction; `place_modules` says
        which stages have them.

    Raises:
      ValueError: the errors of `read_layout`, or the layout has another number of layers or of
        multi-token layers than the model.
    """
    stages = read_layout(text)
    counts = [stage.count("t") for stage in stages]
    extra = sum(stage.count("m") for stage in stages)
    if extra and not mtp_layers:
        raise ValueError(
            f"layout={text!r} has {extra} m, layers for multi-token prediction, and this model has "
            f"none; leave them out"
        )
    if extra != mtp_layers:
        raise ValueError(
            f"layout={text!r} has {extra} m, and the model has {mtp_layers} modules for "
            f"multi-token prediction: write an m for each after the last t, as in 'Et|tmL'"
        )
    if sum(counts) != layers:
        raise ValueError(
            f"layout={text!r} has {sum(counts)} t, in stages of {', '.join(map(str, counts))}, and "
            f"the model has {layers} layers"
        )
    return counts


def place_modules(text: Layout) -> list[int]:
    """Return [K] the number of modules for multi-token prediction of each stage of a layout."""
    return [stage.count("m") for stage in read_layout(text)]


def write_layout(counts: Sequence[int], modules: Sequence[int] = ()) -> str:
    """Write the layout of stages with [K] counts of layers and of multi-token modules (or none)."""

    def times(letter: str, count: int) -> str:
        return letter * count if count < 2 else f"{letter}*{count}"

    pairs = zip(counts, modules or [0] * len(counts), strict=True)
    return f"E{'|'.join(times('t', layers) + times('m', extra) for layers, extra in pairs)}L"
