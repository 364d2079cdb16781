"""Tests of the pages, and of the rules that they state: layers, rooms, public names."""
