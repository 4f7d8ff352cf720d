"""Test parameters of the fast tier and of `make test-all`."""

import pytest


def first_fast(values):
    """Parameters of which the fast tests take the first: each compiles another spec, or starts more
    ranks, with much the same result."""
    first, *others = values
    each = (value if isinstance(value, tuple) else (value,) for value in others)
    return [first, *(pytest.param(*value, marks=pytest.mark.slow) for value in each)]
