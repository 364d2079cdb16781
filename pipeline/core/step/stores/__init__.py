"""Storage of a rank's values between actions: device and host memory, windows, slices, totals.

A store makes its places before the first tick. The program's tables assign values to places.
"""
