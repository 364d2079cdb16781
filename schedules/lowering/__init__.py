"""From a schedule to a program: slots, buffers by liveness, tables of integers, and a proof.

The proof runs the tables on symbols and does not know how they were made. `pipeline.core.step`
executes a program; this package never imports jax.
"""
