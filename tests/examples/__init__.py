"""Tests of the examples: the main job and the Llama-family decoder."""
