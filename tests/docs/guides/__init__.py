"""Guides: their programs run, their consoles show what is printed, their files parse."""
