"""Distance between ranks whose parameters differ by design."""

from __future__ import annotations

import math
import zlib

import torch
import torch.distributed as dist
from torch import nn

from hipress.arguments import group_of
from hipress.errors import ConfigError, ConfigMismatch, HipressError
from hipress.model.params import as_module, trainable
from hipress.model.shards import local
from hipress.ranks.groups import gather


@torch.no_grad()
def consensus_distance(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    relative: bool = False,
) -> float:
    """Root mean square, over the ranks, of the distance of a rank's parameters from their average.

    `sqrt((1/N) sum_i |x_i - x_mean|^2)`, as for CHOCO-SGD, over all parameters that need gradients
    (of DTensors, this rank's shards) as one vector, in float64; 0 if all ranks are equal. With
    `relative`, divided by `|x_mean|`. Every rank of `process_group` (all ranks, by default) must
    call this, and gets the same number. It sends the parameters uncompressed, in float64: do not
    call it every step.

    Raises ConfigError for an object that is no module, or has no trainable parameters,
    ConfigMismatch if shapes differ between ranks, and HipressError if torch's all-reduce fails.
    """
    group = group_of(process_group)
    named = trainable(as_module(module))
    if not named:
        raise ConfigError("the model has no parameter that requires a gradient")
    try:
        _compare([f"{name} {tuple(local(p).shape)}" for name, p in named], group)
        # of the distance, of the average
        squares = torch.zeros(2, dtype=torch.float64, device="cpu")
        for _, parameter in named:
            own = local(parameter).detach().double()
            mean = own.clone()
            dist.all_reduce(mean, group=group)
            mean /= group.size()
            squares += torch.stack([(own - mean).square().sum(), mean.square().sum()])
        dist.all_reduce(squares, group=group)
    except RuntimeError as error:  # of torch.distributed
        raise HipressError(f"rank {dist.get_rank()}: consensus_distance: {error}") from error
    distance, norm = (squares / group.size()).sqrt().tolist()
    if not relative:
        return float(distance)
    return float(distance / norm) if norm else (math.inf if distance else 0.0)


def _compare(parameters: list[str], group: dist.ProcessGroup) -> None:
    """Raise ConfigMismatch unless ranks name the same parameters: gloo would mix their bytes up."""
    facts = [len(parameters), zlib.crc32("\n".join(parameters).encode())]
    own = torch.tensor(facts, device="cpu")
    for rank, theirs in enumerate(gather(own, group)):
        if not torch.equal(theirs, own):
            raise ConfigMismatch(
                f"consensus_distance compares modules of the same parameters, but rank "
                f"{dist.get_global_rank(group, rank)} has others than rank {dist.get_rank()}"
            )
