"""Between the user's modules and arrays: chunks, ends, unlike stages, batches, losses, keys.

What lives here turns modules into the state that the kernel is given, and back. No action runs
here, and nothing here is differentiated.
"""
