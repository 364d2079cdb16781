"""Tests of training: steps, checkpoints, faults."""
