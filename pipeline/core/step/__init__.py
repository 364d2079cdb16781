"""The kernel: one shard_map in which every rank runs the ticks of a program, and its derivatives.

It knows tables of integers, never a schedule by name. No prediction lives here.
"""
