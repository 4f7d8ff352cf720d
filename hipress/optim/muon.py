"""torch.optim.Muon, which exists from torch 2.9 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hipress.errors import ConfigError
from hipress.optim.averaging import Averaging


class Muon(Averaging, torch.optim.Muon):
    """torch.optim.Muon with momentum that ranks average before it is orthogonalized."""

    BUFFER = "momentum_buffer"

    def _check_groups(self) -> None:
        if not all(0 < group["momentum"] < 1 for group in self.param_groups):
            raise ConfigError("ranks average the momentum, so it must be above 0 and below 1")

    def weight(self, group: Mapping[str, Any]) -> float:
        """Implements Averaging.weight: a step orthogonalizes the new buffer, momentum b + (1 -
        momentum) g; Nesterov's (1 - momentum) g + momentum times the new buffer."""
        momentum = float(group["momentum"])
        share = momentum**2 if group["nesterov"] else momentum
        return share / (1.0 - share)
