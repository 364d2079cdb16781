"""The command line, ``python -m pipeline``: a file for each command, and shared code.

A command says here what it takes and how it fails; what it does the packages do for whoever imports
them, but for runs of a configuration, which are put together here. Nobody imports this room.
"""
