"""Checks that a schedule is legal: rules, and errors that show the grid with the culprits marked.

A rule is a function from a schedule to its faults. Whether a lowered program does what its schedule
says is proved in `schedules.lowering`; nothing here times, builds or mends a schedule.
"""
