"""The `Schedule`: orders of actions for each rank, and the rank of each stage.

Nothing here knows how long an action takes.
"""
