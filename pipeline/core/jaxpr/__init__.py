"""Jaxprs read, cleaned and run: one table of primitives, steps, dead code, forwarded results.

Nothing here differentiates or predicts; `pipeline.core.backward` and `pipeline.insight.forecast`
do.
"""
