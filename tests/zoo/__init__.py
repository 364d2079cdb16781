"""Models of other packages through `pipeline.split`: `make zoo` (issue 43)."""
