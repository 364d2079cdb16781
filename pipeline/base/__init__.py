"""What everything stands on: pytrees, dtypes, variables, placeholders, equality of structures.

Nothing here knows a pipeline, a mesh axis or a schedule.
"""
