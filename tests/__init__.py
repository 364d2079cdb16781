"""Tests of shardpipe. Flat on purpose: a folder named like a package would shadow it."""
