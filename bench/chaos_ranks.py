"""Ranks for bench/chaos.py: forked from a process that has imported torch, so that they start fast.

They end as programs do: an exception that nobody catches ends the interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

import compll
import hipress
import hipress.auto.search
import hipress.engine.engine
from bench.chaos_end import LAST
from casync.cost import CodecCost, Costs, Line, Transfer
from hipress.auto import probe, trial

WIDTH = 256
RATIOS = (0.1, 0.01)
#: a parameter that stays uncompressed, and so has a native reduce
RAW = "2.*"


def serve(orders: socket.socket) -> dict[str, Any]:
    """Fork a process for each order; returns only in the forked ones."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, 1 << 16, 3)
        if not text:
            os._exit(0)
        if text.isdigit():
            status = os.waitstatus_to_exitcode(os.waitpid(int(text), 0)[1])
            orders.send(str(status).encode())
            continue
        child = os.fork()
        if child == 0:
            order: dict[str, Any] = json.loads(text)
            order["listener"], order["pipe"], order["log"] = descriptors
            orders.close()
            return order
        for each in descriptors:
            os.close(each)
        orders.send(str(child).encode())


def busy_seconds() -> float:
    """Seconds for which this thread has had a core, or waited for one."""
    with open("/proc/thread-self/schedstat") as file:
        had, waited, _ = file.read().split()
    return (int(had) + int(waited)) * 1e-9


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Python drops an interrupt that comes while it frees an object: the user presses Ctrl-C again,
    and the training goes on until then."""
    sys.__unraisablehook__(lost)
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()


class Rank:
    """A process of a run."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.rank = order, order["rank"]
        os.dup2(order["log"], 1)
        os.dup2(order["log"], 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = _interrupt_again
        faulthandler.register(signal.SIGUSR1)
        LAST.append(partial(self.tell, "left"))

    def tell(self, what: str, **more: Any) -> None:
        """Send an event, with its time, to the parent process."""
        message = {"what": what, "at": time.monotonic(), "busy": busy_seconds(), **more}
        os.write(self.order["pipe"], json.dumps(message).encode() + b"\n")

    def run(self) -> None:
        """Train; report how it ended, once that is shown."""
        try:
            self._train()
        except BaseException:
            show = sys.excepthook

            def shown(kind: Any, error: BaseException, trace: Any) -> None:
                show(kind, error, trace)
                notes = getattr(error, "__notes__", ())
                self.tell("error", text="\n".join([f"{kind.__name__}: {error}", *notes]))

            sys.excepthook = shown
            raise
        self.tell("done")

    def _train(self) -> None:
        self._join()
        order = self.order
        model = _model(order["way"])
        codec = {"compressor": order["codec"], "strategy": order["strategy"], **order["options"]}
        self.tell("wrap")
        step = WAYS[order["way"]](model, codec)
        self.tell("wrapped")
        for number in itertools.count():  # the others end by the fault
            self.tell("step", number=number)
            if self._fails(number):
                return
            step()

    def _fails(self, number: int) -> bool:
        """True if this rank takes fewer steps than the others; or it fails at once."""
        if (self.rank, number) != (self.order["victim"], self.order["step"]):
            return False
        if self.order["fault"] == "raise":
            raise ValueError("a bug of this rank's")
        if self.order["fault"] == "exit":
            sys.exit(3)
        return str(self.order["fault"]) == "leave"

    def _join(self) -> None:
        """Join like torchrun, or with the store in rank 0."""
        order, listener = self.order, self.order["listener"]
        port = socket.socket(fileno=os.dup(listener)).getsockname()[1]
        keeps = order["keeper"] == "rank 0" and self.rank == 0
        delay = timedelta(seconds=order["timeout"])
        if not keeps:
            os.close(listener)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(order["keeper"] == "agent")
        store = TCPStore(
            "127.0.0.1", port, is_master=keeps, wait_for_workers=False,
            master_listen_fd=listener if keeps else None,
        )  # fmt: skip
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=order["ranks"], timeout=delay
        )


def keep(order: dict[str, Any]) -> None:
    """Keep the store, like torchrun's agent."""
    port = socket.socket(fileno=os.dup(order["listener"])).getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False,
        master_listen_fd=order["listener"],
    )  # fmt: skip
    signal.pause()
    del store


Step = Callable[[], object]


def _model(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return DistributedDataParallel(model, bucket_cap_mb=0.2) if way == "attach" else model


def _stepping(
    model: nn.Module,
    end: Step = lambda: None,
    begin: Step = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        begin()
        optimizer.step()
        end()

    return step


def _synchronizer(model: nn.Module, codec: Mapping[str, Any]) -> Step:
    return _stepping(model, begin=hipress.Synchronizer(model, exclude=RAW, **codec).step)


def _gossip(model: nn.Module, codec: Mapping[str, Any]) -> Step:
    return _stepping(model, end=hipress.Gossip(model, "int8_group").step)


def _all_reduce(model: nn.Module, codec: Mapping[str, Any]) -> Step:
    tensor = torch.ones(WIDTH * WIDTH)
    return lambda: hipress.all_reduce(tensor, **codec)


def _momentum(model: nn.Module, codec: Mapping[str, Any]) -> Step:
    optimizer = hipress.optim.AdamW(model.parameters(), lr=0.01, freeze=4)
    ddp = hipress.wrap(model, "onebit_fine", min_size=0, exclude=RAW, optimizer=optimizer)
    return _stepping(ddp, optimizer=optimizer)


def _auto(model: nn.Module, codec: Mapping[str, Any]) -> Step:
    _force_trials()
    return _stepping(hipress.wrap(model, "auto"))


def _force_trials() -> None:
    """Let "auto" try plans, in short turns: the link seems slow, codecs seem free."""
    trial.COUNTED = 3
    trial.SLOW = hipress.auto.search.FAR = 1e9
    hipress.auto.search.MIN_GAIN_SECONDS = hipress.auto.search.SHARE = 0.0
    slow = dict.fromkeys(probe.DTYPES, Transfer(Line(1e-3, 1e-6)))
    probe.measure_link = lambda *_: Costs({1: Transfer(Line(1e-5, 1e-9))}, slow)
    free = CodecCost(*[Line(1e-6, 1e-10)] * 3)
    probe.measure_codecs = lambda group, codecs, link, *_: replace(
        link, codecs=dict.fromkeys(codecs, free)
    )


def _policy(model: nn.Module, codec: Mapping[str, Any]) -> Step:
    policy = hipress.GraVAC("topk", ratios=RATIOS, window=4, every=2)
    return _stepping(hipress.wrap(model, policy=policy))


WAYS: Mapping[str, Callable[[nn.Module, Mapping[str, Any]], Step]] = {
    "wrap": lambda model, codec: _stepping(hipress.wrap(model, exclude=RAW, **codec)),
    "attach": lambda model, codec: _stepping(hipress.attach(model, exclude=RAW, **codec)),
    "verify": lambda model, codec: _stepping(hipress.wrap(model, verify=True, **codec)),
    "auto": lambda model, codec: _stepping(hipress.wrap(model, "auto")),
    "trial": _auto,
    "momentum": _momentum,
    "Synchronizer": _synchronizer,
    "Gossip": _gossip,
    "all_reduce": _all_reduce,
    "policy": _policy,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    # LLVM initializes with the first; a time-out does not include compiling
    for name in sys.argv[2:]:
        compll.compile(name).for_shape((WIDTH, WIDTH)).prepare()
    for ratio in RATIOS:
        compll.compile("topk", ratio=ratio).prepare()
    gc.collect()
    gc.freeze()  # else each child copies all pages of objects as it ends, to look for cycles
    order = serve(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=int(sys.argv[1])))
    if order["rank"] is None:
        keep(order)
    else:
        Rank(order).run()
