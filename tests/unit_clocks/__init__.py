"""Tests of clocks and of lowering: when actions run, in which slot, in which buffer."""
