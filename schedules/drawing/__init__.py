"""Timetables for people: terminal, picture, trace viewer, interactive page, in one palette.

A drawing shows a schedule or a report as it is given; nothing here computes a time. matplotlib is
loaded by the function that draws with it.
"""
