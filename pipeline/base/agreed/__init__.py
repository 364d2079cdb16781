"""Types that layers and the engine share: marks of a shared vocabulary, places of slices.

Layers use them without the engine, and the engine finds them without knowing any layer. They
compute no step.
"""
