"""Conversion of the user's modules to the kernel's state: chunks, ends, batches, losses, keys.

This package converts modules to the arrays that the kernel takes, and back. It runs no action and
differentiates nothing.
"""
