"""The elements of a timetable that all packages use: actions, messages, costs, arrays, text.

Modules here know actions and their orders, and import nothing else of the package.
`schedules.checks` decides whether a schedule is legal, `schedules.clocks` its duration; no family
and no drawing belongs here.
"""
