"""Compressed gradient synchronization for data-parallel PyTorch training.

::

    model = hipress.wrap(model)                      # "auto": compress where it pays, or not
    model = hipress.wrap(model, "dgc", ratio=0.01)   # a DistributedDataParallel with our hook
    hipress.attach(ddp, "onebit_group", strategy="ring")
    sync = hipress.Synchronizer(model, "dgc")        # without DDP: sync.step() ends a step
    gossip = hipress.Gossip(model, "int4_group")     # parameters, with neighbours only
    hipress.shard(model)                             # a model of FSDP2's fully_shard
    outer = hipress.Outer(model, optimizer, every=100)  # weights, once in 100 steps
    model = hipress.wrap(model, policy=hipress.GraVAC("topk", ratios=(0.1, 0.01, 0.001)))
    state = hipress.state_dict(ddp); hipress.load_state_dict(ddp, state)
    app = {"model": ddp, "hipress": hipress.Stateful(ddp)}  # for torch.distributed.checkpoint
    print(hipress.report(ddp))
    publisher = hipress.Publisher(dict(model.named_parameters()), "/shared/run7")
    receiver = hipress.Receiver("/local/checkpoint", "/shared/run7")  # of changed weights
"""

from __future__ import annotations

from typing import Any

from hipress import optim
from hipress.api import detach, load_state_dict, report, state_dict
from hipress.errors import (
    AgreementTimeout,
    ConfigError,
    ConfigMismatch,
    DivergenceError,
    HipressError,
    RankLost,
    StateError,
    SyncError,
)
from hipress.outer.schedule import OuterSGD
from hipress.outer.store_members import StoreMembers
from hipress.outer.torchft_members import TorchftMembers
from hipress.policies import Accordion, GraVAC, Warmup
from hipress.stateful import Stateful
from hipress.ways.all_reduce import all_reduce
from hipress.ways.consensus import consensus_distance
from hipress.ways.gossip import Gossip
from hipress.ways.outer import Outer
from hipress.ways.process_group import GroupOptions
from hipress.ways.process_group import register as _register
from hipress.ways.shard import shard
from hipress.ways.synchronizer import Synchronizer
from hipress.ways.wrap import attach, wrap
from hipress.weights.publisher import Publisher
from hipress.weights.receiver import Receiver

__all__ = [
    "Accordion",
    "AgreementTimeout",
    "ConfigError",
    "ConfigMismatch",
    "DivergenceError",
    "Gossip",
    "GraVAC",
    "GroupOptions",
    "HipressError",
    "Outer",
    "OuterSGD",
    "Publisher",
    "RankLost",
    "Receiver",
    "StateError",
    "Stateful",
    "StoreMembers",
    "SyncError",
    "Synchronizer",
    "TorchftMembers",
    "Warmup",
    "__version__",
    "all_reduce",
    "attach",
    "consensus_distance",
    "detach",
    "load_state_dict",
    "optim",
    "report",
    "shard",
    "state_dict",
    "wrap",
]

_register()


def __getattr__(name: str) -> Any:
    """The version, which is compll's; importing that takes a while."""
    if name == "__version__":
        import compll

        return compll.__version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
