"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does; pytest-timeout ends what hangs.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Several tests run at once, so that no core is idle while one compiles.
os.environ.setdefault("COMPLL_JOBS", "1")
