"""The timetable of a real step, read off a profile: each rank's actions and their times.

It reads compiled steps and profiles, and makes a report. It runs a step but never changes it. The
kernel defines the step; the clocks of `schedules` predict its time.
"""

from pipeline.insight.profile.loops import Loop, loops_of
from pipeline.insight.profile.read import Event, events
from pipeline.insight.profile.run import trace
from pipeline.insight.profile.timeline import report, runs_of

__all__ = ["Event", "Loop", "events", "loops_of", "report", "runs_of", "trace"]
