"""The command line, ``python -m schedules``: options in common, commands, how it talks.

Everything it does the package does for whoever imports it; nothing is computed here.
"""
