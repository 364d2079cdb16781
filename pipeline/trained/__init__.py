"""What is trained: filters on the plain model, masks over leaves, parameters that nobody trains.

Which gradients are formed follows from here; how, is for `pipeline.backward` and `pipeline.kernel`.
"""
