"""The search for timetables better than the published: list scheduling, local search, bounds.

The public function is `schedules.auto`. The timers here run the clocks of the package on plain
lists of numbers, to time thousands of orders. Tests compare them with `schedules.simulate`, which
is the function to time a single schedule.
"""
