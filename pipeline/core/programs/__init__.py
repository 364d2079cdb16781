"""The engine of programs: each rank runs its actions as programs of its own, in its own order.

`pipeline.core.step` runs a timetable as one program, in which all ranks keep step. Here a rank is a
mesh of its own, and each of its actions a compiled function that waits for its data alone. The
bodies of actions, and all that they call, are those of `pipeline.core.step`.
"""
