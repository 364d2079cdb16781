"""Published checkpoints, read into pipelines and written back: names and transposes are tables.

The functions read and write the Hugging Face layout, safetensors with a config.json, by slices that
a device holds. The models are in `pipeline.decoders`.
"""

from typing import TYPE_CHECKING

from pipeline.base.imports import exports

if TYPE_CHECKING:
    from pipeline.models.weights.load import inspect as inspect
    from pipeline.models.weights.load import load as load
    from pipeline.models.weights.load import parts as parts
    from pipeline.models.weights.load import read_into as read_into
    from pipeline.models.weights.save import Layer as Layer
    from pipeline.models.weights.save import named_layers as named_layers
    from pipeline.models.weights.save import save as save
    from pipeline.models.weights.save import stream as stream
    from pipeline.models.weights.save import to_plain as to_plain
    from pipeline.models.weights.tables.families import FAMILIES as FAMILIES
    from pipeline.models.weights.tables.patterns import Family as Family
    from pipeline.models.weights.tables.patterns import Row as Row
    from pipeline.models.weights.tables.patterns import row as row
    from pipeline.splitting.layouts import parse_layout as parse_layout
    from pipeline.splitting.layouts import read_layout as read_layout
    from pipeline.splitting.layouts import write_layout as write_layout

__getattr__, __dir__, __all__ = exports(__name__)
