"""The modules behind `pipeline.layers.experts`, which says what they are."""
