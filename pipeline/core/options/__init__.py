"""The resolved request: the plan, its defaults, the checks of options.

A plan is data. It knows no kernel and no module; what runs it is `pipeline.core.step`.
"""
