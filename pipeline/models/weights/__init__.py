"""Checkpoints that people have, into pipelines and back: names and transposes are tables.

What lives here reads and writes the Hugging Face layout, safetensors with a config.json, by slices
that a device holds. What never does is a model (`pipeline.decoders`) or a step; and nobody imports
this room but the command line. (Runs of a configuration name `parts` as any function of a user's.)
"""
