"""Reports about a step: predicted bytes and traffic, measured costs, profiles.

It reads the engine (`pipeline.core`); the engine does not import it.
"""
