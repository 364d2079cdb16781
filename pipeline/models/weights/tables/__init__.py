"""Tables of published families: which tensor of a checkpoint is which weight.

Nothing here reads a file.
"""
