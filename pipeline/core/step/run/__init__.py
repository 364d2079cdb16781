"""The actions of one rank in a step: it runs a program's ticks, slot by slot, in a memory of refs.

Nothing here knows of `shard_map`, of losses that are means, or of what a step returns:
`pipeline.core.step` starts it and reads its sums.
"""
