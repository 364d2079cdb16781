"""Tools for all other packages: pytrees, dtypes, variables, placeholders, masks, layouts.

They depend on no pipeline, mesh axis or schedule.
"""
