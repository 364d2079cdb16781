"""Ways to write a timetable that several families share.

Formulas over a rank per stage, patterns of slots that repeat, rounds of a heuristic, and the sizes
that only some families can run. No family stands here under its own name.
"""
