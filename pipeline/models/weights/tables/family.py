"""A family of checkpoints: the reading of its config.json, and a table of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.models.decoders.config import DecoderConfig
from pipeline.models.weights.tables.patterns import Row

Config = Mapping[str, Any]  # the content of config.json


@dataclass(frozen=True)
class Family:
    """A table of names and transposes.

    A layer's tensors are called ``prefix + blocks.format(n=...) + name``. Tensors of embed and head
    are called ``prefix + name``. A name that begins with a dot is used alone, without the dot. For
    a layer's name that begins with two dots, the tensor is ``prefix + name`` without the dots.

    Attributes:
      name: the family's name, the ``model_type`` of its config.json.
      rows: rows of a block; rows for weights that a model lacks are skipped.
      embed: rows of the embedding.
      head: rows of the head.
      mtp: additional rows of a layer for multi-token prediction.
      mtp_copies: (name, "embed" or "head") of tensors of such a layer that repeat a table.
      blocks: the prefix of names of layer n, such as ``layers.{n}.``.
      prefixes: prefixes of all names in checkpoints; exports use the first.
      ignored: regular expressions of tensors without information, such as buffers.
      config: a function from config.json to the decoder's configuration; None for your own model.
      sizes: a function from config.json to the sizes of the patterns' letters; by default those of
        a decoder.
    """

    name: str
    rows: tuple[Row, ...]
    embed: tuple[Row, ...]
    head: tuple[Row, ...]
    mtp: tuple[Row, ...] = ()
    mtp_copies: tuple[tuple[str, str], ...] = ()
    blocks: str = "layers.{n}."
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ()
    config: Callable[[Config], DecoderConfig] | None = field(default=None, compare=False)
    sizes: Callable[[Config], Mapping[str, int]] | None = field(default=None, compare=False)

    def sizes_of(self, config: Config) -> Mapping[str, int]:
        """Return the sizes of the patterns' letters.

        Raises:
          ValueError: the family has neither config nor sizes.
        """
        if self.sizes is not None:
            return self.sizes(config)
        if self.config is None:
            raise ValueError(
                f"the family {self.name!r} has neither config= nor sizes=: give one, so that "
                f"letters of patterns have sizes"
            )
        return decoder_sizes(self.config(config))

    def tensor_name(self, prefix: str, layer: int | None, name: str) -> str:
        """Return the name of a tensor in a file."""
        if name.startswith(".."):
            return prefix + name[2:]
        if name.startswith("."):
            return name[1:]
        return prefix + ("" if layer is None else self.blocks.format(n=layer)) + name

    def ignores(self, name: str) -> bool:
        """Tell whether a tensor carries no information."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def prefix_of(self, names: Sequence[str]) -> str:
        """Return the prefix of the names in a file."""
        held = set(names)
        rows = *self.embed, *self.head  # a tied head may have the only table of the embedding
        wanted = [source.name for row in rows for source in row.sources]
        wanted = [name for name in wanted if not name.startswith(".")]
        for prefix in self.prefixes:
            if any(self.tensor_name(prefix, None, name) in held for name in wanted):
                return prefix
        return self.prefixes[0]


def decoder_sizes(config: DecoderConfig) -> dict[str, int]:
    """Return the sizes of the letters of decoders' patterns."""
    return {
        "d": config.width,
        "v": config.vocabulary,
        "k": config.kv_heads,
        "g": config.heads // config.kv_heads,
        "h": config.heads,
        "c": config.head_dim,
        "f": config.hidden,
        "p": config.positions,
        "u": 2 * config.width,
        **_expert_sizes(config),
    }


def _expert_sizes(config: DecoderConfig) -> dict[str, int]:
    """Return the sizes of the letters of experts and of latent attention."""
    found: dict[str, int] = {}
    if (experts := config.experts) is not None:
        found = {"e": experts.number, "m": experts.hidden, "s": experts.shared_hidden}
    if (latent := config.latent) is not None:
        found |= {"q": latent.query_rank or 0, "r": latent.rank, "w": latent.value}
        found |= {"x": latent.nope + latent.rope, "y": latent.rank + latent.rope}
        found |= {"z": latent.nope + latent.value}
    return found
