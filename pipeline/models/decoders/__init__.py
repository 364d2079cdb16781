"""The modules behind `pipeline.decoders`, which says what they are."""
