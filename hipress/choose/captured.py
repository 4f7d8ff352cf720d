"""Plans whose buckets are launched as CUDA graphs, and what forbids that.

[Note: captured plans] With capture="auto" such a plan takes turns with the same one launched task
by task, and is kept if its steps are faster. In the first steps of a turn graphs are made, and
tasks launched: a rank where that fails says so, and no rank launches a graph. Averages have the
same bits either way, and a graph ends with the plan, its buckets, or its states (see [Note:
capture] in casync/runtime/capture.py). DDP's buckets live as long as DDP; those of a Synchronizer
would only live on for their graphs, which is why it captures only if it is told to.
"""

from __future__ import annotations

from dataclasses import replace

from casync.runtime.capture import capture_obstacle
from hipress.choose.plan import Plan
from hipress.options import AUTO, Options

__all__ = ["forbidden", "with_captured"]


def forbidden(plan: Plan, options: Options) -> str:
    """The reason why a plan over NCCL is not tried with CUDA graphs; "" if it is."""
    if options.capture != AUTO:
        return f"capture={options.capture}"
    if options.policy is not None:
        return "a policy changes what is launched"
    if not plan.compresses or plan.hosted:
        return "nothing is compressed on the GPU"
    return capture_obstacle(plan.codecs)


def with_captured(plan: Plan, options: Options, *, by_nccl: bool) -> tuple[Plan, ...]:
    """The plan, and it captured if that may be tried."""
    if not by_nccl or forbidden(plan, options):
        return (plan,)
    return plan, replace(plan, captured=True)
