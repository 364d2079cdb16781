"""The picture (`schedules.tools.draw`)."""

from schedules.tools.draw import save_timeline

__all__ = ["save_timeline"]
