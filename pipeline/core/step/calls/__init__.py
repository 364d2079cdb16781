"""One rank's own model: its state, its stages' functions, and the types of messages.

Functions of a rank's weights and operands, forward and back. When they run is for
`pipeline.core.step` to say.
"""
