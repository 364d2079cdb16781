"""Constructions of timetables that several families share.

They are formulas for one rank per stage, patterns of slots that repeat, rounds of a heuristic, and
checks of sizes that only some families can run. No published family is in this package.
"""
