"""Tests of shardpipe, in folders that mirror the rooms; none is named like a package."""
