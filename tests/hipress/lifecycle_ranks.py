"""Ranks of test_lifecycle.py."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import hipress
from hipress import compat
from hipress.model.params import Param
from hipress.session import session_of
from tests.hipress.common import codec, digest, error_of, make, raised_by, train
from tests.patience import HANG


def frozen(rank, world_size):
    """Parameters that are frozen, or freed, between DDP and attach, and before another attach."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 3)]
    layers[1].requires_grad_(False)
    ddp = DistributedDataParallel(nn.Sequential(*layers), find_unused_parameters=True)
    planned = []
    for change, flag in (0, False), (1, True), (0, True):
        layers[change].requires_grad_(flag)
        hipress.attach(ddp, codec("int8"), exclude="2.*", verify=True)
        planned.append([d.name for d in hipress.report(ddp).decisions])
        for _ in range(2):
            ddp(torch.randn(4, 8) + rank).sum().backward()
        hipress.detach(ddp)
    return planned, [layer.weight.grad for layer in layers if layer is not layers[1]]


def freed(rank, world_size):
    """The error of a step after a parameter was freed that was frozen in `wrap`. A parameter that
    was not frozen then may be frozen and freed."""
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
    layers[1].requires_grad_(False)
    options = {"find_unused_parameters": True}
    ddp = hipress.wrap(nn.Sequential(*layers), codec("int8"), ddp_kwargs=options)

    def step():
        ddp(torch.randn(4, 8)).sum().backward()

    for flag in False, True:
        layers[0].requires_grad_(flag)
        step()
    layers[1].requires_grad_(True)
    return raised_by(step)


def copied(rank, world_size):
    """A copied and an unpickled module train on, and may be attached to."""
    ddp = hipress.wrap(make(), codec("int8"))
    train(ddp, rank, range(2))
    packed = io.BytesIO()
    torch.save(ddp, packed)
    packed.seek(0)
    copies = [copy.deepcopy(ddp), torch.load(packed, weights_only=False)]
    for one in (ddp, *copies):
        assert ("not attached" in error_of(hipress.report, one)[1]) == (one is not ddp)
        train(one, rank, range(2, 4))
    for one in copies:
        hipress.attach(one, codec("int8"))
        train(one, rank, range(4, 6))
    return [digest(one) for one in (ddp, *copies)], hipress.report(copies[0]).measured.steps


def shut_down(rank, world_size):
    """Functions that still work after torch.distributed was shut down."""
    ddp = hipress.wrap(make(), codec("int8"))
    train(ddp, rank, range(2))
    dist.barrier()
    dist.destroy_process_group()
    report, state = hipress.report(ddp), hipress.state_dict(ddp)
    hipress.load_state_dict(ddp, state)
    hipress.detach(ddp)
    return (report.rank, report.world_size, report.measured.steps), state["place"][0]


DEFAULTS = ("gradient_as_bucket_view", "find_unused_parameters", "broadcast_buffers",
            "static_graph", "bucket_bytes_cap", "device_ids", "dim", "mixed_precision")  # fmt: skip


def alone(rank, world_size):
    """With a single rank nothing is installed, and all functions can be called."""
    ddp = hipress.wrap(make(), codec("int8"))
    losses = train(ddp, rank, range(6))
    report = hipress.report(ddp)
    assert not report.installed
    assert "one rank" in str(report)
    state = hipress.state_dict(ddp)
    hipress.load_state_dict(ddp, state)
    ddp._comm_hooks.clear()
    plain = DistributedDataParallel(make())
    for each in DEFAULTS:  # a wrapper works wherever plain DDP does
        assert getattr(ddp, each) == getattr(plain, each), each
    train(plain, rank, range(6))
    assert digest(ddp) == digest(plain)
    hipress.detach(ddp)
    return losses, python_reducer(), *taken()


def python_reducer():
    """The refusal of the python reducer."""
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        return raised_by(hipress.wrap, make(), codec("int8"))
    finally:
        torch._dynamo.config.optimize_ddp = True


def taken():
    """The refusal of a module that has a hook, and of things that are no DDP module."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp, plain = DistributedDataParallel(make()), DistributedDataParallel(make())
    ddp.register_comm_hook(None, allreduce_hook)
    return [
        raised_by(hipress.attach, ddp, codec("int8")),
        raised_by(hipress.attach, make(), codec("int8")),
        raised_by(hipress.wrap, plain, codec("int8")),
        raised_by(hipress.wrap, torch.compile(plain, backend="eager"), codec("int8")),
        *nested(),
    ], twice()


def twice():
    """Errors of wrapping again, as a whole, by attach, or a part; and of DDP in DDP."""
    model = nn.Sequential(make(), nn.Linear(3, 3))
    ddp = hipress.wrap(model, codec("int8"))
    whole = raised_by(hipress.wrap, ddp, codec("int8"))
    assert raised_by(hipress.attach, ddp, codec("int8")) == whole
    part = raised_by(hipress.wrap, torch.compile(model[0].second), codec("int8"))
    hipress.detach(ddp)
    assert error_of(hipress.wrap, model[0].second, codec("int8"))[0] == "none"
    both = DistributedDataParallel(DistributedDataParallel(make()))
    return whole, part, raised_by(hipress.attach, both, codec("int8"))


def nested():
    """Errors for a DDP module in a model: trained by both, by the inner one, by the outer one."""
    found = []
    for frozen, ignored in (False, False), (True, False), (False, True):
        inner = DistributedDataParallel(make())
        inner.requires_grad_(not frozen)
        model = nn.Sequential(inner, nn.Linear(3, 3))
        if ignored:
            names = [name for name, _ in model.named_parameters() if name.startswith("0.")]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        found.append(raised_by(hipress.wrap, model, codec("int8")))
    return found


def collected_by_its_own_thread(rank, world_size):
    """Errors of finalizers, and threads that are left, after the collector found a model in the
    thread that compares its gradients."""
    import gc

    errors = []
    sys.unraisablehook = lambda told: errors.append(str(told.exc_value))
    ddp = hipress.wrap(make(), codec("int8"), verify=True)
    train(ddp, rank, range(2))
    verifier = session_of(ddp).engine.channels.verifier
    future, found = torch.futures.Future(), []

    def collect(_):
        found.append(threading.current_thread().name)
        gc.collect()

    checked = verifier.check(future, [Param("a", 0, 3, (3,), torch.float32, False)], 2)
    checked.add_done_callback(collect)
    ddp.cycle = ddp
    gc.disable()
    del ddp, verifier, checked
    future.set_result(torch.ones(3))
    names = ("casync", "hipress-verify")
    threads = [each for each in threading.enumerate() if each.name.startswith(names)]
    for each in threads:
        each.join(HANG)
    return found, errors, [each.name for each in threads if each.is_alive()]


def forked(rank, world_size):
    """A forked child that collects its parent's synchronized objects and uses another one."""
    import gc
    import signal

    gc.disable()
    dead, ddp = (hipress.wrap(make(), codec("int8"), verify=True) for _ in range(2))
    for each in (dead, ddp):
        train(each, rank, range(2))
    steered = hipress.wrap(make(), policy=hipress.Accordion("topk", 0.5, 0.1))
    cycle = [dead, steered, hipress.Synchronizer(make(), "topk"), hipress.Gossip(make(), "topk")]
    cycle.append(cycle)
    del dead, each, steered, cycle
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        logging.disable(logging.CRITICAL)
        signal.alarm(60)  # a child that hangs ends
        gc.collect()
        found = raised_by(train, ddp, rank, range(1))
        del ddp
        gc.collect()
        os.write(there, json.dumps(found).encode())
        os._exit(0)
    os.close(there)
    with open(here) as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    gc.enable()
    gc.collect()
    train(ddp, rank, range(2, 4))
    return status, json.loads(told or "null"), digest(ddp)


class Made(TorchDispatchMode):
    """Bytes that calls of torch take."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, list | tuple) else [made]:
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                self.bytes += each.numel() * each.element_size()
        return made


def known(rank, world_size):
    """The number of parameters in a DDP module's buckets, and the bytes that it took to ask."""
    ddp = DistributedDataParallel(nn.Linear(300, 300))
    with Made() as made:
        held = compat.parameters_in_buckets(ddp)
    return len(held), made.bytes
