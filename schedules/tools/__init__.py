"""Tools: the command line ``python -m schedules``, and drawings of timetables in one palette.

Building, timing and lowering a schedule loads nothing of this room. A drawing shows a given
schedule or report and computes no times. matplotlib is loaded by the function that draws with it.
"""
