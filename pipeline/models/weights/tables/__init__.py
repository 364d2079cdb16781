"""Tables of published families, from tensors of a checkpoint to weights.

This package reads no file.
"""
