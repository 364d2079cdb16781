"""The engine "programs": each rank runs its actions as separate programs, in its own order.

`pipeline.core.step` runs a timetable as one program, in which all ranks keep step. In this engine
each rank has its own mesh, and each action is a compiled function that waits only for its data. The
bodies of actions are the bodies of `pipeline.core.step`.
"""
