"""The time that a schedule takes: simulation, reports of it, and differences to a measured step.

The clocks themselves are in `schedules.clocks`.
"""
