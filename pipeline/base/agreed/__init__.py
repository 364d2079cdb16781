"""Types that layers and the engine share: markers for a shared vocabulary, and slices.

Layers use them without the engine, and the engine finds them without knowing any layer. They
compute no step.
"""
