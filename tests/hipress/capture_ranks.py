"""Ranks of test_captured.py: DDP on emulated devices, whose buckets may be CUDA graphs."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import ExitStack
from unittest import mock

import torch

import hipress
from hipress.choose.trial import Trial
from tests.casync.streams import FakeMemory, Graph
from tests.hipress.common import SMALL_BUCKETS, data, digest, make
from tests.hipress.device_training_ranks import on_device

STEPS = 40  # a trial takes 28 after three, and each bucket is made and captured


def trained(rank, size, name, captures, seconds=(0.11, 0.1), broken=None, unused=False):
    """A digest for each use of graphs, plans and text of its report, and the numbers of graphs
    that were made, of their launches, and of graphs that are left.

    seconds: of steps, task by task and captured. broken: rank whose captures fail.
    """
    found = []
    for capture in captures:
        with ExitStack() as stack:
            compiled = stack.enter_context(on_device(rank, transport="nccl"))
            scripted(stack, seconds)
            if rank == broken:
                fails = mock.Mock(side_effect=RuntimeError("operation not permitted"))
                stack.enter_context(mock.patch.object(FakeMemory, "capture", fails))
            graphs, launched = counted(stack)
            model = make(unused)
            kwargs = SMALL_BUCKETS | ({"find_unused_parameters": True} if unused else {})
            ddp = hipress.wrap(
                model, compiled(name), capture=capture, min_size=100, timeout=60, ddp_kwargs=kwargs
            )
            fit(ddp, rank)
            report = hipress.report(ddp)
            tried = [(each.plan, each.verdict) for each in report.tried]
            gc.collect()
            left = sum(graph() is not None for graph in graphs)
            found.append((digest(model), tried, report.capture, len(graphs), launched[0], left))
            hipress.detach(ddp)
    return found


def scripted(stack, seconds):
    """Let trials of two plans see these seconds for them."""
    observe = Trial.observe

    def observed(trial, taken):
        return observe(trial, taken if math.isinf(taken) else seconds[trial.current])

    stack.enter_context(mock.patch.object(Trial, "observe", observed))


def counted(stack):
    """References to the graphs of this rank, and a list of the number of their launches."""
    graphs, launched, made, launch = [], [0], Graph.__init__, Graph.launch

    def init(graph, schedule):
        graphs.append(weakref.ref(graph))
        made(graph, schedule)

    def counting(graph):
        launched[0] += 1
        return launch(graph)

    stack.enter_context(mock.patch.multiple(Graph, __init__=init, launch=counting))
    return graphs, launched


def fit(ddp, rank):
    """Train; half-way load the state that was just saved, in arrays of its own."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for step in range(STEPS):
        x, y = data(rank, step)
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS // 2:
            hipress.load_state_dict(ddp, hipress.state_dict(ddp))
