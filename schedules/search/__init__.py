"""The search for a better timetable than any published: list scheduling, local search, bounds.

`schedules.auto` is the door. The fast clocks here are tested equal to `schedules.simulate` and are
for thousands of orders; whoever times one schedule uses that.
"""
