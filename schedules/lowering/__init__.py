"""From a schedule to a program: slots, buffers by liveness, tables of integers, and a proof.

The proof runs the tables on symbols and knows nothing of how they were made. What executes a
program is `pipeline.core.step`; no jax is ever imported here.
"""
