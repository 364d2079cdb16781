"""What a step will hold, send and cost, predicted from types, and told.

It reads what the kernel traces and is never asked by it.
"""
