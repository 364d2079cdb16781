"""Effects of a call of the model beside its result: random numbers and added losses.

Writes of state are in `pipeline.core.rank`. Nothing here knows a rank or a schedule.
"""
