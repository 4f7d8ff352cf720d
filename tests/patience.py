"""Time-outs of tests for what comes at once on a quiet machine.

Only what hangs should run into it: machines that run tests can be ten times as slow for a
minute. How fast things are is for bench/ to say. pytest-timeout's limit is above it.
"""

HANG = 240.0  # seconds

# How long ranks wait for one that never comes: each test that shows it takes as long, and what
# comes before (connecting, a step) has to fit in.
SILENCE = 5.0  # seconds
