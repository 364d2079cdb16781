"""The parts of attention below the layer: its formula, the order of positions on ranks, the ring.

They contain no weights, no rotary positions and no choice of a kernel.
"""
