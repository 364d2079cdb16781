"""The layer view: trees of layers over stacks of ranks, and programs of layers run on stacks.

It converts between the layers that users see and the stored arrays [S, ...], sharded over
``stage``. Optimizers, labels and weights of other pipelines use it.
"""
