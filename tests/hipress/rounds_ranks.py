"""Ranks of test_rounds.py."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

import hipress
from tests.hipress.common import difference, digest, make, train


def in_rounds(rank, world_size, name, cases):
    """Thirty steps of a codec with rounds, checked by verify=True in each, and of plain DDP.

    Without momentum: with 0.9, error feedback that reaches the biases diverges on this network,
    with topk as with low rank.
    """
    plain = DistributedDataParallel(make())
    train(plain, rank, range(30), momentum=0.0)
    found = {}
    for title, (options, ddp_kwargs) in cases.items():
        ddp = hipress.wrap(make(), name, verify=True, ddp_kwargs=ddp_kwargs, **options)
        losses = train(ddp, rank, range(30), momentum=0.0)
        report = hipress.report(ddp).to_dict()
        found[title] = {
            "losses": losses,
            "digest": digest(ddp),
            "difference": difference(plain, ddp),
            "decisions": report["decisions"],
            "measured": report["measured"],
        }
        hipress.detach(ddp)
    return found
