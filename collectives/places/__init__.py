"""Sizes of mesh axes, and the positions of their devices: processes, hosts and a torus of chips.

Nothing here communicates.
"""
