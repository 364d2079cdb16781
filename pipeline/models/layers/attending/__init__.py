"""Attention's parts below the layer: its formula, the order of positions on ranks, the ring.

Never here: weights, rotary positions, the choice of a kernel.
"""
