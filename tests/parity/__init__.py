"""A pipeline computes what the model computes without one: every family, any kind of stage."""
