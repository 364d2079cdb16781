"""The public names of drawings; `schedules.tools` draws."""
