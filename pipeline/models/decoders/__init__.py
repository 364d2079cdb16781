"""The modules of `pipeline.decoders`, whose documentation describes them."""
