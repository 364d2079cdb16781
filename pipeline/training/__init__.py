"""Training runs: a step and its precision, ragged batches, the loop, records, checkpoints.

The package uses only public names (`make_optimizer`, ``wrt=``, ``loss_scale=``, the layer view),
knows no rank, and trains any model that has a loss. Only the command line imports this package, so
it can be replaced. It contains no schedules, no kernels, and nothing about the placement of arrays.
"""
