"""One rank's own model: its state, its stages' functions, the types of what passes between them.

Functions of a rank's weights and operands, forward and back. When they run is for
`pipeline.core.step` to say.
"""
