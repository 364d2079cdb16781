"""Layout strings, in which people say which layers each stage has: ``E|(t|)*10m|L``.

The grammar is that of Megatron-LM's ``--pipeline-model-parallel-layout``: E is the embedding, t a
layer, m a layer for multi-token prediction, L head and loss, and ``|`` ends a stage. ``x*3`` is
``xxx``, of a letter or of what stands in parentheses; commas and spaces mean nothing.

Letters of this module: K stages.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = "EtmL"
LARGEST = 100_000  # letters that a repetition may make


@dataclass(frozen=True)
class _Reader:
    text: str

    def sequence(self, at: int, *, inside: bool) -> tuple[str, int]:
        """What stands from a place on, repetitions written out, and where it ends."""
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
        """The number of a repetition, 1 if there is none, and where it ends."""
        if self.text[at : at + 1] != "*":
            return 1, at
        stop = at + 1
        while stop < len(self.text) and self.text[stop] in "0123456789":
            stop += 1
        number = self.text[at + 1 : stop]
        if not number or int(number[:9]) < 1 or len(number) > 6:
            raise self.wrong(at, "has no number from 1 to 999999 behind it")
        return int(number), stop

    def wrong(self, at: int, why: str) -> ValueError:
        """An error that points at a place."""
        marked = f"{self.text[:at]}»{self.text[at]}«{self.text[at + 1 :]}"
        return ValueError(f"layout={marked!r}: {self.text[at]!r} {why}")


def read_layout(text: str) -> list[str]:
    """[K] the letters of each stage.

    Raises:
      ValueError: what is no layout, with the place; an embedding that is not the first letter, or
        a head that is not the last.
    """
    if not isinstance(text, str) or not text.strip(", "):
        raise ValueError(f"layout={text!r}: must be a string such as 'E|(t|)*10m|L'")
    whole, _ = _Reader(text).sequence(0, inside=False)
    stages = whole.split("|")
    for letter, where, first in (("E", "the first letter", True), ("L", "the last", False)):
        ends = whole.startswith(letter) if first else whole.endswith(letter)
        if whole.count(letter) != 1 or not ends:
            raise ValueError(
                f"layout={text!r} is {whole!r} written out, with {whole.count(letter)} {letter}: "
                f"there is one, {where}"
            )
    if (late := whole.find("m")) >= 0 and "t" in whole[late:]:
        raise ValueError(f"layout={text!r}: m stands before t; multi-token layers come last")
    return stages


def parse_layout(text: str, layers: int) -> list[int]:
    """[K] how many layers each stage has.

    Args:
      text: the layout.
      layers: of the model.

    Raises:
      ValueError: as `read_layout`; another number of layers, or multi-token layers, which these
        models have not.
    """
    stages = read_layout(text)
    counts = [stage.count("t") for stage in stages]
    if extra := sum(stage.count("m") for stage in stages):
        raise ValueError(
            f"layout={text!r} has {extra} m, layers for multi-token prediction, and this model has "
            f"none; leave them out"
        )
    if sum(counts) != layers:
        raise ValueError(
            f"layout={text!r} has {sum(counts)} t, in stages of {', '.join(map(str, counts))}, and "
            f"the model has {layers} layers"
        )
    return counts


def write_layout(counts: list[int]) -> str:
    """The layout of stages with so many layers."""
    stages = ["t" * count if count < 2 else f"t*{count}" for count in counts]
    return "E" + "|".join(stages) + "L"
