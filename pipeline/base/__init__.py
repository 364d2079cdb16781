"""The ground floor: pytrees, dtypes, variables, placeholders, masks, equality, layouts.

Nothing here knows a pipeline, a mesh axis or a schedule.
"""
