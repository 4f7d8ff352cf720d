"""A rank of a run: `python -m hipress.tools.run.worker JSON`.

Reports events on standard output, one JSON object a line::

    {"event": "step", "step": 0, "seconds": 0.2, "loss": 9.2}
    {"event": "done", "seconds": [...], "losses": [...], "payload_bytes": 1.0, "wire_bytes": 1.0,
    "peak_bytes": 1, "identical": true}
    {"event": "error", "message": "..."}

The rank ends when its standard input is closed, so it never outlives its parent.
"""

import hashlib
import json
import math
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hipress.reading import build
from hipress.tools.run import lstm, methods
from hipress.tools.run.jobs import PROBED, TRACED, TRAINED, Job
from hipress.tools.run.synchronize import Synchronized, synchronize

if TYPE_CHECKING:
    from hipress.tools.tracing.spans import Span

ALONE = 5  # backward passes timed without synchronization; the fastest counts


@dataclass(frozen=True)
class Order:
    """The parent's order to a rank."""

    job: Job
    rank: int
    corpus: str  # .npy file of word numbers
    rendezvous: str  # URL: a file that does not exist yet, or a host and port
    interface: str
    sharers: int  # ranks whose bytes the interface counts together
    nccl: bool  # True if GPUs use NCCL; otherwise through the host
    gpu: int  # modulo the number of GPUs here

    @classmethod
    def parse(cls, text: str) -> "Order":
        """The order of a text by `json.dumps(asdict(order))`."""
        order: Order = build(cls, json.loads(text))
        return order


def main() -> None:
    """Runs the order of the command line; exit status 1 after an error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _emit("done", **_run(Order.parse(sys.argv[1])))
    except Exception as error:
        traceback.print_exc()
        _emit("error", message=f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(1)  # threads of a broken process group may hang at exit


def _run(order: Order) -> dict[str, Any]:
    torch.set_num_threads(1)
    lstm.take_device(order.job.workload, order.gpu)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if order.nccl else "gloo",
        init_method=order.rendezvous,
        rank=order.rank,
        world_size=order.job.hosts,
        timeout=timedelta(seconds=order.job.timeout),
    )
    try:
        return PURPOSES[order.job.purpose](order)
    finally:
        dist.destroy_process_group()


def _probe(order: Order) -> dict[str, Any]:
    """Measure the profile of link and compressors; returned by rank 0."""
    from hipress import options
    from hipress.tools.probe_command import measure_profile, placed

    workload = order.job.workload
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        transport = "nccl" if order.nccl else "staged"
        wanted = options.make("auto", optimizer=workload.optimizer)
        measure_profile(path, wanted, placed(workload.device, transport))
        return {"profile": json.loads(path.read_text()) if order.rank == 0 else None}


def _train(order: Order) -> dict[str, Any]:
    job, workload = order.job, order.job.workload
    task = lstm.make(workload, order.corpus)
    method = methods.parse(job.method)
    synchronized = synchronize(task.module, method, task.training, job.per_host)
    trainer = Trainer(task, order.rank, synchronized)
    dist.barrier()
    for step in range(job.warmup):
        trainer.step(step)
    before = _Meter.read(order, synchronized, job.warmup)
    for step in range(job.warmup, job.steps):
        trainer.step(step)
    after = _Meter.read(order, synchronized, job.steps)
    return {
        "seconds": trainer.seconds,
        "losses": trainer.losses,
        **after.since(before, job.steps - job.warmup, order.sharers),
        "peak_bytes": _peak_bytes(),
        "tried": synchronized.tried(),
        "parameters": sum(each.numel() for each in task.module.parameters()),
        "identical": None if _apart(job.method) else _identical(synchronized.module),
    }


def _apart(method: str) -> bool:
    """True if ranks hold different parameters by design."""
    return method in methods.ALONE or methods.parse(method).way == methods.OUTER


def _trace(order: Order) -> dict[str, Any]:
    """Spans of a step on this rank, and of the predicted one."""
    from hipress.tools.tracing import predicted, record

    job = order.job
    task = lstm.make(job.workload, order.corpus)
    synchronized = synchronize(task.module, methods.parse(job.method), task.training)
    session = record.session_of(synchronized.module)
    trainer = Trainer(task, order.rank, synchronized)
    for step in range(job.steps):
        trainer.step(step)
    costs = predicted.measure_costs(session)
    passes = [trainer.passes_alone(job.steps + number) for number in range(ALONE)]
    forward, alone = map(min, zip(*passes, strict=True))
    spans, update = trainer.trace(job.steps + ALONE)
    spans_then = predicted.predict(session, costs, alone, spans)
    rest = forward + update
    return {
        "alone": alone,
        "rest": rest,
        "spans": [astuple(span) for span in spans],
        "predicted": [astuple(span) for span in spans_then],
        "sweep": [astuple(p) for p in predicted.sweep(session, costs, alone, spans, rest)],
    }


PURPOSES = {TRAINED: _train, PROBED: _probe, TRACED: _trace}


class Trainer:
    """Trains on this rank, and reports each step."""

    def __init__(self, task: lstm.Task, rank: int, synchronized: Synchronized) -> None:
        self._task, self._rank = task, rank
        self._module, self._synchronize = synchronized.module, synchronized.step
        own = synchronized.optimizer
        self._optimizer = own or task.training.make(self._module.parameters())
        alone = own is not None and synchronized.clips
        self._clip = math.inf if alone else task.training.clip
        self._stepped = synchronized.stepped
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, step: int) -> None:
        """Run the step of this number."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._task.loss(self._module, self._rank, step)
        torch.autograd.backward(loss)
        self._synchronize()
        if math.isfinite(self._clip):
            nn.utils.clip_grad_norm_(self._module.parameters(), self._clip)
        self._optimizer.step()
        self._stepped()
        _synchronize(loss)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        _emit("step", step=step, seconds=self.seconds[-1], loss=self.losses[-1])

    def passes_alone(self, step: int) -> tuple[float, float]:
        """Seconds of forward and backward pass without synchronization; gradients are dropped."""
        self._optimizer.zero_grad()
        with cast(DistributedDataParallel, self._module).no_sync():
            begin = time.perf_counter()
            loss = self._task.loss(self._module, self._rank, step)
            _synchronize(loss)
            middle = time.perf_counter()
            torch.autograd.backward(loss)
            _synchronize(loss)
        end = time.perf_counter()
        self._optimizer.zero_grad()
        return middle - begin, end - middle

    def trace(self, step: int) -> "tuple[list[Span], float]":
        """The spans of a backward pass with its synchronization, and seconds of the update."""
        from hipress.tools.tracing.record import record

        self._optimizer.zero_grad()
        loss = self._task.loss(self._module, self._rank, step)
        dist.barrier()
        spans = record(self._module, lambda: torch.autograd.backward(loss))
        begin = time.perf_counter()
        self._optimizer.step()
        _synchronize(loss)
        return spans, time.perf_counter() - begin


def _synchronize(loss: torch.Tensor) -> None:
    """Wait until a device has done its queued work."""
    if loss.is_cuda:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class _Meter:
    payload: int
    wire: int | None
    phases: dict[str, float] | None  # seconds so far

    @classmethod
    def read(cls, order: Order, synchronized: Synchronized, steps: int) -> "_Meter":
        dist.barrier()  # on loopback the interface also counts a slower rank's bytes
        counter = Path(f"/sys/class/net/{order.interface}/statistics/tx_bytes")
        wire = int(counter.read_text()) if counter.exists() else None
        meter = cls(synchronized.sent(steps), wire, synchronized.phases())
        dist.barrier()
        return meter

    def since(self, before: "_Meter", steps: int, sharers: int) -> dict[str, Any]:
        wire = None if self.wire is None or before.wire is None else self.wire - before.wire
        start = before.phases or {}
        return {
            "payload_bytes": (self.payload - before.payload) / steps,
            "wire_bytes": None if wire is None else wire / steps / sharers,
            "phases": self.phases
            and {name: (spent - start.get(name, 0)) / steps for name, spent in self.phases.items()},
        }


def _peak_bytes() -> int | None:
    """Peak memory of this process in bytes; None if the kernel does not tell."""
    status = Path("/proc/self/status")
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "", re.M)
    return None if peak is None else int(peak[1]) * 1024


def _identical(module: nn.Module) -> bool:
    """True if all ranks hold the same parameters, bit by bit."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().cpu().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


def _emit(event: str, **data: Any) -> None:
    print(json.dumps({"event": event, **data}), flush=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(3)


if __name__ == "__main__":
    main()
