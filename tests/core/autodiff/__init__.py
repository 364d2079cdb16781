"""Tests of the backward: residuals, the split into I and W, sums, what is trained."""
