"""Tests of pipeline/decoding."""
