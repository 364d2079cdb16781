"""Training runs: a step and its precision, ragged batches, the loop, records, checkpoints.

It uses what a user could use (`make_optimizer`, ``wrt=``, ``loss_scale=``, the layer view), knows
no rank, and trains any model that has a loss. Nothing but the command line imports it, so it can be
replaced.
Never here: schedules, kernels, where an array lies.
"""
