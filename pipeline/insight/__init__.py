"""Reports about a step: predicted bytes and traffic, measured costs, profiles.

This package reads the engine (`pipeline.core`); the engine does not import this package.
"""
