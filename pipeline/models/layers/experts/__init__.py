"""The modules of `pipeline.layers.experts`, whose documentation describes them."""
