"""NNX layers whose weights may be spread over the ranks of a mesh axis.

A layer holds its whole weights as `nnx.Param`, whose metadata ``out_sharding`` names the axis that
cuts them, as everywhere in flax. Whoever runs it hands it this rank's part inside `jax.shard_map`;
it takes all sizes from that part and exchanges what the other ranks need (`collectives.tensor`).
Where the axis is not manual it is handed the whole, and is the plain layer. Everything is computed
in the dtype of the input.
"""
