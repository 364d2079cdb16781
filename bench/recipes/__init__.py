"""Training recipes that MaxText publishes for TPUs, compiled as peers of this library.

A recipe (`table`) is data: a model, a slice, a batch, compiler flags, attention blocks, and which
activations are saved, offloaded to host memory or computed again. `model` trains it as MaxText
does: `jax.jit` over sharded arrays, a scan over layers, FSDP left to the compiler. `predict` reads
the step's time from the compiled program and holds it against the published measurement.
"""
