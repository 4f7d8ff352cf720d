"""Ranks for bench/chaos.py: forked from a process that has imported torch, so that they start fast.

They end as programs do: an exception that nobody catches ends the interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compll
import hipress
import hipress.choose.search
import hipress.engine.engine
from bench.chaos_end import LAST
from casync.cost import CodecCost, Costs, Line, Transfer
from hipress.channel import executors, failures
from hipress.choose import probe, trial

WIDTH = 256
RATIOS = (0.1, 0.01)
#: a parameter that stays uncompressed, and so has a native reduce
RAW = "2.*"
STEPS, ROUNDS = 12, 30  # after which ranks end that nothing ends before, and sites
PATIENCE = 5.0  # seconds for which sites wait for one of the last round
SITES: list[TCPStore] = []  # the store of sites


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
        self.number, self.digest = -1, ""
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
        self.tell("done", digest=self.digest)

    def _train(self) -> None:
        self._dawdle("join")
        self._join()
        order = self.order
        model = _model(order["way"])
        codec = {"compressor": order["codec"], "strategy": order["strategy"], **order["options"]}
        self._delay_messages()
        self.tell("wrap")
        self._dawdle("wrap")
        step, kept = WAYS[order["way"]](model, codec)
        self.tell("wrapped")
        for self.number in itertools.count():  # the others end by the fault
            self.tell("step", number=self.number)
            if self._fails(self.number):
                return
            if self._is_done(kept):
                break
            self._dawdle("step")
            step()
            if self.number % 3 == 2:
                self._dawdle("checkpoint")
                self._save_and_load(kept)
        if order["way"] not in ("Gossip", "all_reduce"):  # else they need not be the same
            self.digest = _digest(kept.agreed() if hasattr(kept, "agreed") else _whole(model))

    def _is_done(self, kept: Any) -> bool:
        """True if all ranks were to come so far: sites to the same round, which a slow one is in,
        too."""
        slow = self.order["fault"] == "slow"
        if self.order["way"] == "Members":
            all_came = not slow or hipress.report(kept).sites == self.order["ranks"]
            return bool(kept.rounds >= ROUNDS and all_came)
        return slow and self.number == STEPS

    def _dawdle(self, place: str) -> None:
        """Wait, if it is here that this rank is slow."""
        order = self.order
        now = place in ("join", "wrap") or self.number == order["step"]
        if now and order["place"] == place and self.rank == order["victim"]:
            time.sleep(order["delay"])

    def _delay_messages(self) -> None:
        """Take a message late, if it is there that this rank is slow; and let ranks soon think that
        another is gone."""
        failures.LOOK = 0.05  # type: ignore[attr-defined]
        late = iter([True])

        def delay(task: str) -> None:
            if self.number == self.order["step"] and task.startswith("recv") and next(late, False):
                time.sleep(self.order["delay"])

        if self.order["place"] == "message" and self.rank == self.order["victim"]:
            executors.RunOptions = partial(executors.RunOptions, delay=delay)  # type: ignore[assignment, attr-defined]

    def _save_and_load(self, kept: Any) -> None:
        """Go on from a state that is saved now."""
        kind = self.order["keeps"]
        if kind == "dcp":
            folder = f"{tempfile.gettempdir()}/hipress-chaos-{self.port}"
            save({"hipress": hipress.Stateful(kept)}, checkpoint_id=folder)
            load({"hipress": hipress.Stateful(kept)}, checkpoint_id=folder)
        elif kind:
            state = hipress.state_dict(kept, portable=kind == "portable")
            hipress.load_state_dict(kept, state)

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
        port = self.port = socket.socket(fileno=os.dup(listener)).getsockname()[1]
        keeps = order["keeper"] == "rank 0" and self.rank == 0
        delay = timedelta(seconds=order["timeout"])
        if not keeps:
            os.close(listener)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(order["keeper"] == "agent")
        store = TCPStore(
            "127.0.0.1", port, is_master=keeps, wait_for_workers=False,
            master_listen_fd=listener if keeps else None,
        )  # fmt: skip
        if order["way"] == "Members":  # each site is a job of its own
            SITES.append(store)
            return
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
#: a step, and what `hipress.state_dict` takes
Training = tuple[Step, Any]


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, those of a sharded model whole."""
    parts: Any = model.named_parameters()
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in parts}


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for each in tensors.values():
        hashed.update(each.detach().numpy().tobytes())
    return hashed.hexdigest()[:12]


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


def _wrap(model: nn.Module, codec: Mapping[str, Any], **options: Any) -> Training:
    ddp = hipress.wrap(model, **options, **codec)
    return _stepping(ddp), ddp


def _attach(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    hipress.attach(model, exclude=RAW, **codec)
    return _stepping(model), model


def _synchronizer(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    sync = hipress.Synchronizer(model, exclude=RAW, **codec)
    return _stepping(model, begin=sync.step), sync


def _gossip(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    gossip = hipress.Gossip(model, "int8_group")
    return _stepping(model, end=gossip.step), gossip


def _all_reduce(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    tensor = torch.ones(WIDTH * WIDTH)
    return lambda: hipress.all_reduce(tensor, **codec), None


def _shard(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    fully_shard(model)
    hipress.shard(model, min_size=0)
    return _stepping(model), model


def _outer(model: nn.Module, codec: Mapping[str, Any], **options: Any) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = hipress.Outer(model, optimizer, "onebit_group", every=1, clip="median", **options)
    return _stepping(model, end=outer.step, optimizer=optimizer), outer


def _members(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    return _outer(model, codec, members=hipress.StoreMembers(SITES[0], patience=PATIENCE))


def _momentum(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    optimizer = hipress.optim.AdamW(model.parameters(), lr=0.01, freeze=4)
    ddp = hipress.wrap(model, "onebit_fine", min_size=0, exclude=RAW, optimizer=optimizer)
    return _stepping(ddp, optimizer=optimizer), ddp


def _auto(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    return _wrap(model, {"compressor": "auto"})


def _trial(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    _force_trials()
    return _auto(model, codec)


def _force_trials() -> None:
    """Let "auto" try plans, in short turns: the link seems slow, codecs seem free."""
    trial.COUNTED = 3
    trial.SLOW = hipress.choose.search.FAR = 1e9
    hipress.choose.search.MIN_GAIN_SECONDS = hipress.choose.search.SHARE = 0.0
    slow = dict.fromkeys(probe.DTYPES, Transfer(Line(1e-3, 1e-6)))
    probe.measure_link = lambda *_: Costs({1: Transfer(Line(1e-5, 1e-9))}, slow)
    free = CodecCost(*[Line(1e-6, 1e-10)] * 3)
    probe.measure_codecs = lambda group, codecs, link, *_: replace(
        link, codecs=dict.fromkeys(codecs, free)
    )


def _policy(model: nn.Module, codec: Mapping[str, Any]) -> Training:
    policy = hipress.GraVAC("topk", ratios=RATIOS, window=4, every=2)
    return _wrap(model, {"policy": policy})


WAYS: Mapping[str, Callable[[nn.Module, Mapping[str, Any]], Training]] = {
    "wrap": partial(_wrap, exclude=RAW),
    "attach": _attach,
    "verify": partial(_wrap, verify=True),
    "auto": _auto,
    "trial": _trial,
    "momentum": _momentum,
    "Synchronizer": _synchronizer,
    "Gossip": _gossip,
    "all_reduce": _all_reduce,
    "policy": _policy,
    "shard": _shard,
    "Outer": _outer,
    "Members": _members,
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
