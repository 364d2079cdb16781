"""Tests of the engine of programs: parity, order, memory by rank, and what it refuses."""
