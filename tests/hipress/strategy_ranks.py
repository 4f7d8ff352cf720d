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
    raised_by,
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
    """Errors of each rank for impossible options, or options that differ between ranks."""
    different = [2, 1] if rank else [1, 2]
    cases = {
        "size": {"strategy": "hierarchical", "topology": 3},
        "ranks": {"strategy": "hierarchical", "topology": [[0, 1, 2]]},
        "twice": {"strategy": "hierarchical", "topology": [[0, 1], [1]]},
        "type": {"topology": "two"},
        "differ": {"strategy": "hierarchical", "topology": different[0]},
        "direction": {"strategy": "exchange", "down": "int4_group"},
        "down": {"down": "int4_grup"},
        "downs": {"down": ["int4_group", "int8_group"][rank % 2]},
        "not twice": {"strategy": "ps", "down": "dgc"},
    }
    found = {
        title: raised_by(hipress.wrap, make(), "topk", **case) for title, case in cases.items()
    }
    found["auto"] = raised_by(hipress.wrap, make(), down="int4_group")
    for strategy in ("hierarchical", "gtopk"):
        found[strategy] = raised_by(hipress.wrap, make(), "dgc", strategy=strategy)
    one, other = (hipress.wrap(make(), codec("sparse"), down=codec(n)) for n in ("int8", "none"))
    found["state"] = raised_by(hipress.load_state_dict, other, hipress.state_dict(one))
    return found
