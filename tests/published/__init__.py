"""Numbers that others published, each beside ours: ``python -m tests.published`` prints all."""
