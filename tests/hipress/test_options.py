"""Options: validated once, with messages that help."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hipress import options
from hipress.codecs import strategy_for
from hipress.errors import ConfigError
from tests.hipress.fakes import Halves, Int8, Sparse


def test_defaults_and_forms():
    made = options.make("auto", exclude="last.*", timeout=timedelta(seconds=3))
    assert made.automatic
    assert made.exclude == ("last.*",)
    assert made.timeout == 3
    assert options.make(Int8()).timeout == 1800


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("auto", {"scope": "tensr"}, "did you mean 'tensor'"),
        ("auto", {"timeout": 0}, "timeout must be positive"),
        ("auto", {"min_size": -1}, "min_size"),
        ("auto", {"seed": -1}, "seed"),
        ("auto", {"seed": "x"}, "seed='x'"),
        ("auto", {"verify": 1}, "verify=1"),
        ("auto", {"exclude": [3]}, "exclude"),
        ("auto", {"params": {"ratio": 0.1}}, "'ratio'"),
        (Int8(), {"params": {"bits": 2}}, "'bits'"),
        (7, {}, "compressor"),
    ],
)
def test_refuses(name, wrong, message):
    with pytest.raises(ConfigError, match=message):
        options.make(name, **wrong)


@pytest.mark.parametrize(
    "codec, suits",
    [(None, "allreduce"), (Halves(), "allreduce"), (Int8(), "ps"), (Sparse(), "allgather")],
)
def test_automatic_strategy(codec, suits):
    assert strategy_for(codec) == suits


@pytest.mark.parametrize(
    "codec, asked, message",
    [
        (Int8(), "pss", "did you mean 'ps'"),
        (Int8(), "allreduce", "do not add"),
        (Sparse(), "ring", "allgather"),
    ],
)
def test_strategy_that_cannot_work(codec, asked, message):
    with pytest.raises(ConfigError, match=message):
        strategy_for(codec, asked)
