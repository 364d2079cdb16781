"""Training recipes that MaxText publishes for TPUs.

A recipe (`table`) is data: a model, a slice, a batch, compiler flags, attention blocks, and which
activations are saved, offloaded to host memory or computed again. `model` trains it as MaxText
does: `jax.jit` over sharded arrays, a scan over layers, FSDP left to the compiler.
"""
