"""Optimizers whose momentum, instead of gradients, ranks average: Adam keeps its loss at one bit.

::

    optimizer = hipress.optim.AdamW(model.parameters(), lr=1e-3)
    model = hipress.wrap(model, "onebit_fine", optimizer=optimizer)

[Note: averages of momentum] Error feedback returns later the values that a codec leaves out. That
is exact if a step is linear in the averaged values, and Adam's is not: it divides by the root of v.
Once v is frozen, the step is linear in the momentum m (1-bit Adam, Tang et al. 2021), so the ranks
average b m + (1 - b) g, each with its own gradient g; m is the same on all of them, since it is
only ever that average. In the gradient's scale a rank contributes g + w m, w = b / (1 - b), and 1 -
b times the average is the new m. So w m is added to a ready gradient, and all later stages (codecs
and feedback, strategies, the native all-reduce) work as for gradients. Other optimizers step by
another sum of g and m, such as Lion by the sign of one: w is then that sum's, and m is updated from
the average.
"""

from __future__ import annotations

from typing import Any

from hipress.optim.adam import Adam, AdamW
from hipress.optim.averaging import Averaging
from hipress.optim.linear import SGD, Lion

__all__ = ["SGD", "Adam", "AdamW", "Averaging", "Lion", "Muon"]


def __getattr__(name: str) -> Any:
    """Muon, if torch has it."""
    if name != "Muon":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hipress.optim.linear import Muon

    return Muon
