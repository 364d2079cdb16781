"""Tests of `collectives`: meshes, exchanges, reductions, ranks that share a layer."""
