"""The layer view."""
