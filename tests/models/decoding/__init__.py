"""Tests of `pipeline.models.decoding`."""
