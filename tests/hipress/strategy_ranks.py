"""Ranks of test_strategies.py."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

import hipress
from tests.hipress.common import (
    SMALL_BUCKETS,
    Trained,
    codec,
    delivered,
    difference,
    digest,
    make,
    refuses,
    train,
)


def real(rank, world_size, cases):
    """The trained models by case."""
    plain = DistributedDataParallel(make())
    train(plain, rank, range(5))
    found = []
    for name, options in cases:
        ddp = hipress.wrap(make(), name, verify=True, ddp_kwargs=SMALL_BUCKETS, **options)
        losses = train(ddp, rank, range(5))
        report = hipress.report(ddp)
        assert report.installed
        assert report.to_dict()["options"]["down"] == options.get("down", "auto")
        apart, held = difference(plain, ddp), digest(ddp)
        found.append(Trained(apart, losses, held, delivered(ddp, rank)))
        hipress.detach(ddp)
    return found


def refused(rank, world_size):
    """Impossible options, options that differ between ranks, and states of other codecs."""
    for text, options in (
        ("topology=3: 2 ranks do not make nodes of 3", {"strategy": "hierarchical", "topology": 3}),
        ("has 3 ranks, but the group", {"strategy": "hierarchical", "topology": [[0, 1, 2]]}),
        ("each rank once", {"strategy": "hierarchical", "topology": [[0, 1], [1]]}),
        ("topology is the number of ranks per node", {"topology": "two"}),
        (
            "ranks disagree on topology: rank 0: 1, rank 1: 2",
            {"strategy": "hierarchical", "topology": 1 + rank},
        ),
        ("'exchange' has one direction", {"strategy": "exchange", "down": "int4_group"}),
        ("did you mean 'int4_group'", {"down": "int4_grup"}),
        ("ranks disagree on down", {"down": ("int4_group", "int8_group")[rank]}),
        ("'dgc' cannot encode twice", {"strategy": "ps", "down": "dgc"}),
    ):
        refuses(text, hipress.wrap, make(), "topk", **options)
    refuses("down needs a compressor that is named", hipress.wrap, make(), down="int4_group")
    for text, strategy in (
        ("'dgc' cannot encode twice", "hierarchical"),
        ("strategy 'gtopk' needs; use strategy 'exchange'", "gtopk"),
    ):
        refuses(text, hipress.wrap, make(), "dgc", strategy=strategy)
    one, other = (hipress.wrap(make(), codec("sparse"), down=codec(n)) for n in ("int8", "none"))
    state = hipress.state_dict(one)
    refuses("and down raw()", hipress.load_state_dict, other, state, kind="StateError")
