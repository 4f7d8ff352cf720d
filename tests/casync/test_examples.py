"""The examples of docs/how/engine.md and of the package run as they stand."""

import re
import textwrap
from pathlib import Path

import torch

import casync
from casync.testing import Hub
from tests.casync.fakes import CODECS, tensors_of

ENGINE = Path(__file__).parents[2] / "docs" / "how" / "engine.md"


def test_the_example_that_opens_the_page_on_the_engine():
    code = re.search(r"```python\n(.*?)```", ENGINE.read_text("utf-8"), re.DOTALL)[1]
    exec(code, {"__name__": "example"})  # asserts the average on both ranks


def test_the_example_of_the_package():
    code = textwrap.dedent(casync.__doc__.split("::\n\n")[1].split("\n\n`")[0])
    (end,), bucket = Hub(1).endpoints(), torch.full((100,), 3.0)
    given = {name: getattr(casync, name) for name in casync.__all__} | {
        "tensors": tensors_of([100]), "choices": {"t0": casync.Choice("exact", "ps")},
        "codecs": CODECS, "world_size": 1, "rank": 0, "transport": end, "bucket": bucket,
        "states": {}, "step": 0,
    }  # fmt: skip
    exec(code, given)
    assert given["future"].wait() is bucket
    given["executor"].close()
    assert bucket.eq(3.0).all()
