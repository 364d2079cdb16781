"""The implementation of `pipeline.split`: any model becomes stages.

What lives here reads how a model calls its blocks, cuts between them and makes modules of the
parts. What never does is a schedule, a mesh or a step: the parts are given to a `Pipeline` like any
others.
"""
