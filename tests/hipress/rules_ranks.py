"""Ranks of test_rules.py."""

from __future__ import annotations

import hipress
from tests.hipress.common import error_of, make, train
from tests.hipress.fakes import Halves, Int8
from tests.hipress.tuner_ranks import quick, through_trial


def codecs(ddp):
    """The codec of some parameters; "int8" stands for the fake."""
    shown = ("second.weight", "second.bias", "last.weight")
    found = {d.name: d.codec for d in hipress.report(ddp).decisions}
    return {name: found[name] and found[name].replace("int8_fake", "int8") for name in shown}


def ruled(rank, world_size):
    """Codecs by rules with a compressor and with auto, through a trial; errors of mistakes."""
    rules = {"second.weight": Halves(), "*.bias": None}
    fixed = hipress.wrap(make(), Int8(), rules=rules, verify=True)
    train(fixed, rank, range(3))
    quick()
    auto = hipress.wrap(make(), rules=rules, verify=True)
    through_trial(auto, lambda: train(auto, rank, range(10)))
    tried = hipress.report(auto).tried
    assert len(tried) > 1
    assert all("half_fake" in each.plan for each in tried)
    mismatch = error_of(hipress.wrap, make(), rules={f"*.{('bias', 'weight')[rank]}": None})
    useless = error_of(hipress.wrap, make(), rules={"lost": None} if rank else {"*": None})
    return codecs(fixed), codecs(auto), mismatch[:2], useless[:2]
