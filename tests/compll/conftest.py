"""For all tests of compll: every spec in specs/, with the parameters worth varying."""

from pathlib import Path

import numpy as np
import pytest

import compll
from tests.compll.cuda_host import hostile

VARIANTS = {
    "terngrad_uniform": [{"bits": b} for b in (1, 4, 8)],
    "dgc": [
        {"ratio": 0.01, "nesterov": True, "clip": 1.0, "workers": 4},
        {"ratio": 0.01, "warmup": 3, "bits": 16},
    ],
    "mxnet_2bit": [{"threshold": 1.5}, {"residual": "bfloat16"}],
    "onebit_group": [{"residual": "bfloat16"}],
    "sketch": [{"q": 4}, {"q": 16}, {"q": 256}],
    "powersgd": [
        {"rank": 1, "columns": 100},
        {"rank": 4},
        {"residual": "bfloat16"},
        {"bits": 16},
    ],
    "randomk": [{"ratio": 0.3}, {"ratio": 0.3, "residual": False}],
    "thc": [{"bits": 2, "block": 64}, {"clipped": 0.0, "residual": False}],
    "atomo": [{"rank": 2, "columns": 16}, {"rank": 8, "columns": 0}],
    "int4_group": [{"entropy": True}],
    "int3_group": [{"entropy": True}],
    "tern_group": [{"entropy": True}],
    "threelc": [{"s": 1.9}],
    "topk": [{"ratio": 0.3}, {"ratio": 1.0}, {"ratio": 0.05, "residual": "bfloat16"}],
    "graddrop": [{"ratio": 0.2}],
    "dithering": [{"natural": True}, {"norm": True, "bits": 8}],
    "ddp_uint8": [{"bucket": 512}],
    "qsgd": [{"bits": 4, "bucket": 64}],
    "qsparse": [{"ratio": 0.2, "bits": 2}],
    "adacomp": [{"bin": 32}],
    "threshold": [{"tau": 1.5}],
    "inceptionn": [{"bound": 2e-4}, {"bound": 2e-20}],
    "stc": [{"ratio": 0.2}],
    "gaussiank": [{"ratio": 0.3}],
    "redsync": [{"ratio": 0.1, "tries": 9}],
    "sidco_e": [{"ratio": 0.1, "stages": 3}],
    "sidco_gp": [{"ratio": 0.3}],
}
CASES = [(name, {}) for name in compll.list_specs()]
CASES += [(name, params) for name, all_ in VARIANTS.items() for params in all_]


def label(case):
    name, params = case
    return name + "".join(f"-{k}={v}" for k, v in params.items())


#: parameters with which the reference, a column after the other, takes no second for a gradient
SMALL = {"atomo": {"rank": 2, "columns": 16}}


def costing(case):
    """A spec with other parameters is slow, since it must be compiled; others are fast."""
    fast = case[1] == SMALL.get(case[0], {})
    return pytest.param(case, id=label(case), marks=() if fast else pytest.mark.slow)


#: every spec with other parameters too, for tests that hold backends to the same bits. Others take
#: each spec once.
variants = pytest.mark.parametrize("case", [*map(costing, CASES)])


@pytest.fixture(params=[(name, SMALL.get(name, {})) for name in compll.list_specs()], ids=label)
def case(request):
    return request.param


#: a spec of every kind of kernel; the other specs' differ in arithmetic only
KINDS = [(name, SMALL.get(name, {}) | hostile.PARAMS.get(name, {})) for name in hostile.SPECS]
each_kind = pytest.mark.parametrize("case", [*map(costing, KINDS)])


def modules(cases):
    """The typed module of each case. The process keeps them for all test files that ask."""
    return [compll.compile(name, "reference", **params).module for name, params in cases]


@pytest.fixture
def cpu(case):
    return compll.compile(case[0], "cpu", **case[1])


@pytest.fixture
def reference(case):
    return compll.compile(case[0], "reference", **case[1])


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def pytest_collection_modifyitems(items):
    """Send tests of one kernel to one worker: others would only wait for its compilation."""
    known, here = {label(case): case for case in CASES}, Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        labels = (label(p) if p in CASES else p for p in params if isinstance(p, str | tuple))
        found = next((each for each in labels if isinstance(each, str) and each in known), None)
        if found is not None:
            item.add_marker(pytest.mark.xdist_group(found))


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite generated golden files")
