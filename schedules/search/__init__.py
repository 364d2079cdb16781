"""The search for a better timetable than any published: list scheduling, local search, bounds.

`schedules.auto` is the door. The timers here run the clocks of the package on plain lists of
numbers, for thousands of orders, and are tested equal to `schedules.simulate`; whoever times one
schedule uses that.
"""
