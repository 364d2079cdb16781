"""Tests of `schedules`: actions, families, what is legal, sizes, the search."""
