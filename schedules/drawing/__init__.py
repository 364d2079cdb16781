"""Drawings of timetables: terminal, picture, trace viewer, interactive page, in one palette.

A drawing shows a given schedule or report and computes no times. matplotlib is loaded by the
function that draws with it.
"""
