"""Types that layers and the engine agree on: marks of a shared vocabulary, places of slices.

Layers use them without the engine, and the engine finds them without knowing any layer. Nothing
here computes a step.
"""
