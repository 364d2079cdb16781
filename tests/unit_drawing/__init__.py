"""Tests of drawings, files and the command line of `schedules`."""
