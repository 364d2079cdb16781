"""The elements of a timetable that all packages use: actions, messages, costs, arrays, text.

Modules of this package know actions and their orders, and import no other package of schedules.
`schedules.checks` decides whether a schedule is legal, `schedules.clocks` how long it takes.
Families and drawings are in other packages.
"""
