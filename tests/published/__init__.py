"""Published numbers compared with ours: ``python -m tests.published`` prints all rows."""
