"""Placement of arrays: specs over mesh axes, ZeRO and FSDP, several processes.

Which stage a rank holds is a schedule's matter; messages between stages are the kernel's.
"""
