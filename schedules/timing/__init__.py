"""The time of a schedule: simulation, reports, and differences from a measured step.

The clocks themselves are in `schedules.clocks`.
"""
