"""Checkpoints that people have, into pipelines and back: names and transposes are tables.

What lives here reads and writes the Hugging Face layout, safetensors with a config.json, by slices
that a device holds. What never does is a model (`pipeline.decoders`) or a step; and nobody imports
this room but the command line. (Runs of a configuration name `parts` as any function of a user's.)
"""

from pipeline.splitting.layouts import parse_layout, read_layout, write_layout
from pipeline.weights.inspect import inspect
from pipeline.weights.load import load, parts, read_into
from pipeline.weights.native import export_stages, import_stages
from pipeline.weights.save import Layer, named_layers, save
from pipeline.weights.tables.families import FAMILIES
from pipeline.weights.tables.family import Family
from pipeline.weights.tables.patterns import Row, row

__all__ = [
    "FAMILIES",
    "Family",
    "Layer",
    "Row",
    "export_stages",
    "import_stages",
    "inspect",
    "load",
    "named_layers",
    "parse_layout",
    "parts",
    "read_into",
    "read_layout",
    "row",
    "save",
    "write_layout",
]
