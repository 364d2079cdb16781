"""The options of a pipeline, their checks, and the plan: the options with every choice made.

A plan is data. It refers to no kernel and no module; `pipeline.core.step` runs it.
"""
