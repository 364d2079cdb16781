"""Tests of where arrays lie: ZeRO, FSDP, Explicit axes, what is said of it."""
