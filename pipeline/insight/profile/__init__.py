"""The timetable of a real step, read off a profile: each rank's actions and their times.

Here live the reading of compiled steps and of profiles, and the report that they make. A step is
run here, and never changed: what it is made of is the kernel's, and what it was to take a clock's.
"""

from pipeline.insight.profile.loops import Loop, loops_of
from pipeline.insight.profile.read import Event, events
from pipeline.insight.profile.run import trace
from pipeline.insight.profile.timeline import report, runs_of

__all__ = ["Event", "Loop", "events", "loops_of", "report", "runs_of", "trace"]
