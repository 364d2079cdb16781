"""Durations of actions: measured on the devices at hand, or compiled for absent TPUs.

It makes pipelines of its own, of one rank or of types, and runs or reads parts of their steps,
concludes, and writes files; no kernel and no plan asks for it.
"""
