"""The modules of `pipeline.layers`, whose documentation describes them."""
