"""Comparison of objects and of stages: what makes two of them differ.

Which stages share code is decided in `pipeline.core.model`.
"""
