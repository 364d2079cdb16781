"""Families that separate I from W and fill bubbles with W, one file each.

`schedules.families` lists them with all others.
"""
