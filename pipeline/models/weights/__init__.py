"""The modules behind `pipeline.weights`, which says what they are."""
