"""Tests of what a user calls: options, errors, transformations, states, optimizers."""
