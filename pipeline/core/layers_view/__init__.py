"""The layer view: trees of layers over stacks of ranks, and programs of layers run on stacks.

The one door between users, who speak of layers, and state, which lies [S, ...] over ``stage``.
Optimizers, labels and weights of other pipelines come through it.
"""
