"""Tools that read, clean and run jaxprs: a table of primitives, steps, dead code, forwarding.

`pipeline.core.autodiff` uses them to differentiate, `pipeline.insight.forecast` to predict.
"""
