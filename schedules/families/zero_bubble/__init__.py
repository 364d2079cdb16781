"""Families that separate I from W and fill bubbles with W, one per file.

`schedules.families` lists them with all other families.
"""
