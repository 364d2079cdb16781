"""Decoders that people have: Llama, Qwen, Mistral, Gemma, GPT-2 and mixtures of experts as one
configurable model.

What lives here is the model, made of `pipeline.layers`, in the parts that a pipeline wants: stages,
embed and head. What never does is a file format, or the name that another library gives a weight:
those are the business of `pipeline.weights`.
"""
