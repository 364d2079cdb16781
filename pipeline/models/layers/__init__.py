"""The modules behind `pipeline.layers`, which says what they are."""
