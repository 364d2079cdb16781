"""A stage's backward: outcomes, pullbacks into buffers, residuals, the split into I and W.

This package works on one traced function and a mask of trained parameters. It depends on no rank
and no schedule.
"""
