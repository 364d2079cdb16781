"""The published schedules, a file each: from sizes to an order of actions for every rank.

A file is named after its family and says who published it. What several share stands in
`schedules.families.constructions`. A family decides orders only: never a clock, a slot or a buffer.
"""
