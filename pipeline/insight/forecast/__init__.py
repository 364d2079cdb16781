"""Predictions of a step from types: memory, messages and costs; and their text.

It reads what the kernel traces; the kernel does not call it.
"""
