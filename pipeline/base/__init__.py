"""What everything stands on: pytrees, dtypes, variables, placeholders, masks, what is alike.

Nothing here knows a pipeline, a mesh axis or a schedule.
"""
