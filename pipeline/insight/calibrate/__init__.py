"""Durations of actions: measured on the devices at hand.

It makes pipelines of one rank, runs parts of their steps, computes costs, and writes files. The
kernel and the plans do not use it.
"""
