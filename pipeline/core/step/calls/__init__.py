"""One rank's part of the model: its state, its stages' functions, and the types of messages.

The functions compute forwards and pullbacks from a rank's weights and operands.
`pipeline.core.step` decides when they run.
"""
