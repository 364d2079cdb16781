"""The implementation of `pipeline.split`: any model becomes stages.

This package reads how a model calls its blocks, cuts between the calls, and makes modules of the
parts. It knows no schedule, mesh or step: the parts are given to a `Pipeline` like any other
modules.
"""
