"""Jaxprs read, cleaned and run: one table of primitives, steps, dead code, forwarded results.

Nothing here differentiates or predicts; `pipeline.core.autodiff` and `pipeline.insight.forecast`
do.
"""
