"""When the actions of a given order run: clocks, `simulate`, reports, and the causes of waiting.

A clock never changes an order. The event clock, in which a rank waits only for its data, is in
`schedules.core`, because searches and checks use it. `schedules.clocks.hosted` chooses the values
in host memory, whose copies take time.
"""
