"""The command line, ``python -m pipeline``: a file for each command, and what they have in common.

A command says here what it takes and how it fails; what it does the packages do for whoever imports
them, but for runs of a configuration, which are put together here. Nobody imports this room.
"""
