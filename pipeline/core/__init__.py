"""The engine: options, placement of arrays, one rank's model, backward passes, the kernel.

Private. Public rooms import few names of it; nothing here imports a public room or
`pipeline.insight`.
"""
