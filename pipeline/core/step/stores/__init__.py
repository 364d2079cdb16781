"""Where a rank keeps values between actions: device and host memory, windows, slices, totals.

A store makes its places before the first tick. Which value is in which place when, the tables of
the program say.
"""
