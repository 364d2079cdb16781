"""The interactive page (`schedules.tools.page`)."""

from schedules.tools.page import save_page

__all__ = ["save_page"]
