"""The lockstep clock and the causes of waiting: ticks, slots, meetings, idle time explained.

A clock computes when each action of a given order runs; it never changes an order. The event clock,
in which a rank waits only for its data, is in `schedules.core`, because searches and checks use it.
"""
