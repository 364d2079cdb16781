"""Checks that name the part of a user's model that is at fault: NaN, effects, unread parameters.

Nothing here changes what a step computes.
"""
