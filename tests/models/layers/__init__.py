"""Tests of `pipeline.layers`, and of what runs beside a tensor axis."""
