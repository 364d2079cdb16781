"""Text from a pipeline: caches of its stages, the flow of microbatches, the choice of a token.

Built of the kernel's parts, with a loop of its own: a timetable has an end, and decoding has one
only when all rows have. Training never comes here.
"""
