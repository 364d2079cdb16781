"""A stage's backward: pullbacks into buffers, residuals, and the split into I and W.

It works on one traced function and a mask of what is trained, and knows neither ranks nor
schedules.
"""
