"""Time-outs of tests for events that come at once on a quiet machine.

Only a hang should reach them: machines that run tests can be ten times as slow for a minute.
Measuring speed is the task of bench/. pytest-timeout's limit is above these.
"""

HANG = 240.0  # seconds

# Time that ranks wait for one that never comes: each test of that takes as long, and the work
# before it (connecting, a step) must fit in.
SILENCE = 5.0  # seconds
