"""The actions of one rank in a step: a program's ticks, slot by slot, on memory in refs.

Nothing here knows of `shard_map`, of losses that are means, or of what a step returns:
`pipeline.core.step` starts it and reads its sums.
"""
