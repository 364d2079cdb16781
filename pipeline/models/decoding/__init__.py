"""Text generation with a pipeline: caches, the flow of microbatches, the choice of tokens.

It uses parts of the kernel in a loop of its own: a timetable has a fixed length, but decoding ends
when all rows have ended. Training does not use this package.
"""
