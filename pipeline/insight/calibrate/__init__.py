"""Durations of actions: measured on the devices at hand.

It makes pipelines of one rank, runs parts of their steps, concludes, and writes files; no kernel
and no plan asks for it.
"""
