"""Predictions of a step from types: memory, messages and costs; and their text.

This package reads the traces of the kernel; the kernel does not call this package.
"""
