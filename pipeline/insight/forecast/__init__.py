"""Predictions of a step from types: memory, messages and costs; and their text.

It reads what the kernel traces and is never asked by it.
"""
