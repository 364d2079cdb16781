"""One rank's own model: its stages, what passes between neighbours, what all ranks share.

Functions of a rank's weights and operands, forward and back. When they run is for
`pipeline.kernel` to say.
"""
