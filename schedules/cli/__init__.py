"""The command line, ``python -m schedules``: shared options, commands, and text output.

The package offers all of its functions to Python code too; nothing is computed here.
"""
