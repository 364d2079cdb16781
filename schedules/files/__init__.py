"""Timetables and costs as files: CSV and JSON, read whole or refused, written atomically.

The CSV has the grammar of torch.distributed.pipelining, so either library can read the other's
files. `schedules.drawing` writes drawings.
"""
