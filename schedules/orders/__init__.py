"""The `Schedule`: orders of actions for each rank, and where stages are.

Nothing here knows how long an action takes.
"""
