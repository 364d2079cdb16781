"""Checks that a schedule is legal: rules, and errors that show the grid with the culprits marked.

A rule is a function from a schedule to its faults. `schedules.lowering` proves that a lowered
program does what its schedule says. This package neither times, builds nor corrects schedules.
"""
