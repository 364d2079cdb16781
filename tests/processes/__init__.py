"""Tests of many processes: how they start, meet, agree, share a batch and end."""
