"""The kernel: one shard_map in which every rank runs the ticks of a program, and its derivatives.

It reads tables of integers, never a schedule by name. It contains no prediction of time or memory.
"""
