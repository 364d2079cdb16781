"""The command line, ``python -m pipeline``: a file for each command, and shared code.

A command defines its arguments and its errors; other packages do its work. Only runs of a
configuration are put together here. No other package imports this one.
"""
