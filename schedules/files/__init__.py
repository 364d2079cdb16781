"""Timetables and costs as files: CSV, JSON, read whole or refused, written whole or not at all.

The CSV is the grammar of torch.distributed.pipelining, so files travel both ways. Drawings are
written by `schedules.drawing`.
"""
