"""The functions on results of wrap, attach, Synchronizer, Gossip, shard and Outer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress.handles import handle_of
from hipress.model.torch_modes import without_inference_mode
from hipress.ways.gossip import Gossip
from hipress.ways.outer import Outer
from hipress.ways.synchronizer import Synchronizer

if TYPE_CHECKING:
    from hipress.reporting.group_report import GroupReport
    from hipress.reporting.outer_report import OuterReport
    from hipress.reporting.report import Report
    from hipress.reporting.shard_report import ShardReport

__all__ = ["Synchronized", "detach", "load_state_dict", "report", "state_dict"]

Synchronized: TypeAlias = DistributedDataParallel | Synchronizer | Gossip | Outer | nn.Module


def detach(ddp: Synchronized) -> None:
    """Stop compressing: end threads and connections.

    Every rank must call this between the same two steps. A DDP module then averages uncompressed,
    and `attach` may be called again. The module of a Synchronizer is a plain module again; the
    Synchronizer's `step` raises ConfigError. Raises StateError within a backward pass (from a hook,
    for example) whose gradients still travel.
    """
    handle_of(ddp).detach()


@overload
def report(ddp: Outer) -> OuterReport: ...
@overload
def report(ddp: DistributedDataParallel | Synchronizer | Gossip) -> Report: ...
@overload
def report(ddp: nn.Module) -> Report | ShardReport: ...
@overload
def report(ddp: dist.ProcessGroup) -> GroupReport: ...
def report(
    ddp: Synchronized | dist.ProcessGroup,
) -> Report | ShardReport | OuterReport | GroupReport:
    """Choices, bytes and times so far; print it, or take its `to_dict()`. Also of a process group
    `hipress`."""
    made: Report | ShardReport | OuterReport | GroupReport = handle_of(ddp).report()
    return made


def state_dict(ddp: Synchronized | dist.ProcessGroup, *, portable: bool = False) -> dict[str, Any]:
    """This rank's step counter and residuals, by parameter name; call it between steps.

    With one rank nothing travels, and the counter stays: random draws, and a policy's `Warmup`, go
    on from there when there are more.

    Residuals differ between ranks: save one file per rank, or use torch.distributed.checkpoint with
    hipress.Stateful. With `portable` the state is the same on all ranks, which must all call this,
    and loads with any number of ranks (and of FSDP2's shards), codec and strategy; no gradient is
    lost, but a training does not go on bit for bit. The state holds only tensors, numbers and
    texts, so torch.load(weights_only=True) reads it; hipress/channel/records.py has its entries.

    Raises StateError during a step, or after a step failed: ranks may differ in their progress in
    it; with `portable`, the errors of Coordinator.run_watched, too.
    """
    return handle_of(ddp).state_dict(portable=portable)


@without_inference_mode()
def load_state_dict(
    ddp: Synchronized | dist.ProcessGroup, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Continue from a state of `state_dict`: bit for bit with scope "tensor", the same world size
    and strategy. A portable state fits any: what it had not delivered is added to each rank's next
    gradient, also where nothing is compressed.

    Every rank must call this, between the same two steps, with states of the same step.

    Raises StateError listing all entries that do not fit (with `strict=False` these start from
    zero, but for `shard` and `Outer`, whose own states fit as a whole or not), and during a step or
    after one failed. Raises ConfigMismatch if ranks' states are of different steps, or another rank
    refused its state; then no rank has loaded its state. Raises AgreementTimeout for ranks that do
    not arrive; another rank may then have loaded its state, so the module cannot take another step.
    """
    handle_of(ddp).load_state_dict(state, strict=strict)
