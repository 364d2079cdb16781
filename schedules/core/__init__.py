"""Timetables: actions, their orders, messages and costs; the `Schedule`, its files and its checks.

Nothing here lays out ticks, builds a family or searches. The event clock is here because the checks
and the grid run it; `check` shares no code with the families.
"""
