"""The families of checkpoints by name, under the path that scripts import them from."""

from pipeline.models.weights.tables.families import FAMILIES, family_of

__all__ = ["FAMILIES", "family_of"]
