"""Checkpoints that people have, into pipelines and back: names and transposes are tables.

The functions read and write the Hugging Face layout, safetensors with a config.json, by slices that
a device holds. The models are in `pipeline.decoders`.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.models.weights.inspect import inspect
    from pipeline.models.weights.load import load, parts, read_into
    from pipeline.models.weights.save import Layer, named_layers, save
    from pipeline.models.weights.stream import stream, to_plain
    from pipeline.models.weights.tables.families import FAMILIES
    from pipeline.models.weights.tables.family import Family
    from pipeline.models.weights.tables.patterns import Row, row
    from pipeline.splitting.layouts import parse_layout, read_layout, write_layout

__all__ = [
    "FAMILIES",
    "Family",
    "Layer",
    "Row",
    "inspect",
    "load",
    "named_layers",
    "parse_layout",
    "parts",
    "read_into",
    "read_layout",
    "row",
    "save",
    "stream",
    "to_plain",
    "write_layout",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "pipeline.models.weights.inspect": "inspect",
        "pipeline.models.weights.load": "load parts read_into",
        "pipeline.models.weights.save": "Layer named_layers save",
        "pipeline.models.weights.stream": "stream to_plain",
        "pipeline.models.weights.tables.families": "FAMILIES",
        "pipeline.models.weights.tables.family": "Family",
        "pipeline.models.weights.tables.patterns": "Row row",
        "pipeline.splitting.layouts": "parse_layout read_layout write_layout",
    },
)
