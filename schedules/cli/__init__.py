"""The command line, ``python -m schedules``: shared options, commands, and text output.

All of its functions exist in Python too; this package computes nothing.
"""
