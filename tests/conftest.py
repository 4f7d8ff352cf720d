"""Settings of all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# An example's time depends on the machine's other work; pytest-timeout ends hanging tests.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# torch's stores look up the names of addresses as they connect. If a DNS server drops a question,
# that takes 5 s unless glibc is told to ask again sooner: more than some tests have.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


def pytest_collection_modifyitems(items):
    """Skip tests that need a GPU where there is none: see tests/gpus.py."""
    for item in items:
        if mark := item.get_closest_marker("gpu"):
            from tests import gpus  # torch takes seconds

            if why := gpus.lacking(*mark.args, **mark.kwargs):
                item.add_marker(pytest.mark.skip(reason=why))
