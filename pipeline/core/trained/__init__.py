"""The choice of trained parameters: filters on the plain model, and parameters left untrained.

Which gradients are formed follows from here; how, is for `pipeline.core.backward` and
`pipeline.core.kernel`.
"""
