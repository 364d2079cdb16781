"""What actions take on the devices at hand: measured in the kernel, concluded, written to files.

It makes pipelines of one rank and runs parts of their steps; no kernel and no plan asks for it.
"""
