"""Trainers that nobody here wrote, given a pipeline in place of its model."""
