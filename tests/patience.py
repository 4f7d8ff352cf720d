"""How long tests wait for what comes at once on a quiet machine.

Only what hangs should run into it: machines that run tests can be ten times as slow for a
minute. How fast things are is for bench/ to say. pytest-timeout's limit is above it.
"""

HANG = 240.0  # seconds
