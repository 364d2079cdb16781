"""Jaxprs read, cleaned and run: one table of primitives, steps, dead code, forwarded results.

Nothing here differentiates or predicts; `pipeline.backward` and `pipeline.forecast` do.
"""
