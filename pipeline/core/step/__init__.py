"""The kernel: one shard_map in which every rank runs the ticks of a program, and its derivatives.

The kernel reads tables of integers, never a schedule by name. It predicts neither time nor memory.
"""
