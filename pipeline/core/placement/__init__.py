"""Placement of arrays: specs over mesh axes, ZeRO and FSDP, several processes.

A schedule assigns stages to ranks; the kernel sends messages between stages.
"""
