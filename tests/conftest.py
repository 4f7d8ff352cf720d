"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does; pytest-timeout ends what hangs.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# torch's stores look up the names of addresses as they connect. Where a DNS server drops a
# question, that takes 5 s unless glibc is told to ask again sooner: longer than some tests have.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
