"""The modules of `pipeline.weights`, whose documentation describes them."""
