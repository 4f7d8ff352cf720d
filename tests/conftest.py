"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# An example's time depends on the machine's other work; pytest-timeout ends hanging tests.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# torch's stores look up the names of addresses as they connect. If a DNS server drops a question,
# that takes 5 s unless glibc is told to ask again sooner: more than some tests have.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
