"""Models for a pipeline: layers, decoders, their checkpoints, and text from them.

The runtime does not import this package. Users import the public paths `pipeline.layers`,
`pipeline.decoders`, `pipeline.weights`, `pipeline.vocabulary` and `pipeline.generate`.
"""
