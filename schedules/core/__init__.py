"""The words of a timetable and what all rooms count with: actions, messages, costs, arrays, text.

What lives here knows actions and their orders and needs nothing else of the package. Whether a
schedule is legal is asked in `schedules.checks`, how long it takes in `schedules.clocks`; no family
and no drawing ever lives here.
"""
