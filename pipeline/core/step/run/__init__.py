"""The actions of one rank in a step: a program's ticks, slot by slot, on memory in refs.

`pipeline.core.step` starts the ticks and reads their sums. This package handles no `shard_map`, no
mean of losses, and no results of a step.
"""
