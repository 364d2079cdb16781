"""What is trained: filters on the plain model, and parameters that nobody would train.

Which gradients are formed follows from here; how, is for `pipeline.core.backward` and
`pipeline.core.kernel`.
"""
