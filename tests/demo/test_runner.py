"""Two real processes over loopback: baselines, reports of failures, and their clean end."""

import json
import subprocess
import sys
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hipress
from hipress.model import devices
from hipress.tools.run import methods, runner, worker
from hipress.tools.run.jobs import TRAINED, Job, Workload
from hipress.tools.run.lstm import OPTIMIZERS
from hipress.tools.run.place import Loopback
from hipress.tools.run.synchronize import synchronize
from tests.patience import HANG

TINY = Workload(vocabulary=200, width=16, batch=2, length=5)
SIZE = 4 * TINY.parameters


@pytest.fixture(autouse=True)
def small_corpus(tmp_path, monkeypatch):
    import numpy as np

    path = tmp_path / "corpus.npy"
    np.save(path, np.random.default_rng(0).integers(0, 200, 5000))
    monkeypatch.setattr(runner.corpus, "prepare", lambda: path)


class Watched(Loopback):
    """Loopback that remembers its processes, and may start another program for a rank."""

    def __init__(self, instead=None):
        self.started, self.instead = [], instead or {}

    def start(self, rank, arguments, **options):
        arguments = self.instead.get(rank, arguments)
        self.started.append(super().start(rank, arguments, **options))
        return self.started[-1]


@pytest.mark.slow  # two processes, for each of which torch is imported anew
@pytest.mark.parametrize(
    "method, payload", [("ddp-fp32", SIZE), ("ddp-fp16", SIZE / 2), ("sync:none", SIZE)]
)
def test_a_method_trains_and_counts_its_bytes(method, payload):
    done = []
    result = runner.run(Loopback(), Job(method, steps=4, workload=TINY), done.append)
    assert result.error is None
    assert done == [1, 2, 3, 4]
    assert len(result.seconds) == len(result.losses) == 4
    assert len(result.timed) == 2
    assert result.identical is True
    assert result.payload_bytes == pytest.approx(payload, rel=0.01)
    assert result.wire_bytes is None or result.wire_bytes > payload
    assert 5e7 < result.peak_bytes < 5e9


@pytest.mark.slow
def test_rounds_of_an_outer_loop_are_timed_as_a_whole():
    method = "outer:int8_group:every=3:delay=1:lr=1.0:momentum=0.0"
    result = runner.run(Loopback(), Job(method, steps=10, workload=TINY), lambda done: None)
    assert result.error is None
    assert len(result.seconds) == 10
    assert result.timed == [fmean(result.seconds[at : at + 3]) for at in (4, 7)]
    assert result.identical is None
    assert 0 < result.payload_bytes < SIZE / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, per_host, payload",
    [
        ("ddp-bf16", 1, SIZE / 2),
        ("fsdp2", 1, SIZE * 3 / 2),
        ("fsdp2-bf16", 1, SIZE * 3 / 4),
        ("hsdp", 2, SIZE / 2),  # of a shard, between hosts
        ("hsdp:int4_group", 2, SIZE / 2 / 7.5),
        ("shard:int4_group", 1, SIZE / 2 / 7.5 + SIZE / 4),
        ("shard:int4_group:bf16=true", 1, SIZE / 2 / 7.5 + SIZE / 4),
    ],
)
def test_shards_and_their_replicas_train_like_ddp(method, per_host, payload):
    """Weights that all ranks together hold are equal; bytes are those of the formula, and of
    compressors about as many."""
    load = replace(TINY, vocabulary=190, width=96)
    job = Job(method, 2 * per_host, steps=4, workload=load, per_host=per_host)
    result = runner.run(Loopback(), job)
    assert result.error is None
    assert result.identical is True
    whole = 4 * load.parameters / SIZE
    assert result.payload_bytes == pytest.approx(whole * payload, rel=0.3)
    other = runner.run(Loopback(), replace(job, method="ddp-fp32"))
    assert result.losses == pytest.approx(other.losses, rel=0.02)


class Told(Watched):
    """Remembers the messages to ranks, and starts none."""

    def __init__(self):
        super().__init__({rank: [sys.executable, "-c", ""] for rank in range(3)})
        self.orders = []

    def start(self, rank, arguments, **options):
        self.orders.append(json.loads(arguments[-1]))
        return super().start(rank, arguments, **options)


class Throttled:
    """Throttled links, which are not this machine's own."""

    interface = "lo"

    def __init__(self):
        self.told = Told()

    def start(self, *given, **options):
        return self.told.start(*given, **options)


def test_ranks_with_a_gpu_each_are_joined_by_nccl(monkeypatch):
    """Not over throttled links, which NCCL would bypass; nor if ranks share a GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    told, throttled = Told(), Throttled()
    on_gpus = replace(TINY, device="cuda")
    for place, hosts, workload in (
        (told, 2, on_gpus), (told, 3, on_gpus), (told, 2, TINY), (throttled, 2, on_gpus)
    ):  # fmt: skip
        runner.run(place, Job("ddp-fp32", hosts=hosts, steps=2, workload=workload))
    orders = told.orders + throttled.told.orders
    assert [(order["gpu"], order["nccl"]) for order in orders] == [
        *((0, True), (1, True)),
        *((0, False), (1, False), (2, False)),
        *((0, False), (1, False)),
        *((0, False), (1, False)),
    ]


@pytest.mark.parametrize(
    "nccl, backend, asked",
    [(True, "cpu:gloo,cuda:nccl", {}), (False, "gloo", {"transport": "staged"})],
)
def test_groups_of_ranks_on_gpus(nccl, backend, asked, monkeypatch, tmp_path):
    """Uncompressed by torch's own group, compressed by the transport of the binding."""
    given, gpu, init = [], SimpleNamespace(is_cuda=True), dist.init_process_group
    join = (tmp_path / "rendezvous").as_uri()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", given.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *names, **how: given.extend(names) or init("gloo", **how)
    )
    monkeypatch.setattr(devices, "by_gloo", lambda group: not nccl)
    monkeypatch.setattr(hipress, "wrap", lambda model, codec, **how: given.append(how))

    def train(order):
        model = SimpleNamespace(parameters=lambda: iter([gpu]))
        synchronize(model, methods.parse("hipress:onebit_group"), OPTIMIZERS["sgd"])

    monkeypatch.setitem(worker.PURPOSES, TRAINED, train)
    job = Job("hipress:onebit_group", hosts=1, steps=2, workload=replace(TINY, device="cuda"))
    worker._run(worker.Order(job, 0, "", join, "lo", 1, nccl, 3))
    assert given == [1, backend, asked]


@pytest.mark.slow
def test_without_communication_nothing_is_sent():
    result = runner.run(Loopback(), Job("none", steps=2, workload=TINY))
    assert (result.error, result.payload_bytes, result.identical) == (None, 0, None)


@pytest.mark.slow
def test_ddp_that_sends_nothing_but_a_number_trains_as_each_rank_would_alone():
    alone, met = (
        runner.run(Loopback(), Job(name, steps=3, workload=TINY)) for name in methods.ALONE
    )
    assert (met.error, met.payload_bytes, met.identical) == (None, 4, None)
    assert met.losses == alone.losses


@pytest.mark.slow
def test_fp32_twice_gives_the_same_losses():
    job = Job("ddp-fp32", steps=3, workload=replace(TINY, optimizer="adamw"))
    first, second = (runner.run(Loopback(), job) for _ in range(2))
    assert first.losses == second.losses


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_its_message():
    place = Watched()
    result = runner.run(place, Job("ddp-fp32", steps=2, workload=replace(TINY, optimizer="adam")))
    assert "KeyError: 'adam'" in result.error
    assert all(child.poll() is not None for child in place.started)


def test_a_rank_that_dies_is_told_with_its_last_words():
    place = Watched({1: [sys.executable, "-c", "raise SystemExit('no memory left')"]})
    result = runner.run(place, Job("ddp-fp32", steps=2, workload=TINY))
    assert result.error == "rank 1 ended with status 1: no memory left"
    assert all(child.poll() is not None for child in place.started)


@pytest.mark.slow
def test_a_run_that_stands_still_times_out():
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    place = Watched({0: asleep, 1: asleep})
    result = runner.run(place, Job("ddp-fp32", steps=2, workload=TINY, timeout=0.5))
    assert result.error == "timed out: no step for 0.5 s"
    assert all(child.poll() is not None for child in place.started)


@pytest.mark.slow
def test_a_rank_ends_when_its_parent_is_gone():
    child = subprocess.Popen(
        [sys.executable, "-m", "hipress.tools.run.worker", "not an order"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    child.communicate(timeout=HANG)
    assert child.returncode in (1, 3)


@pytest.mark.slow
def test_ranks_keep_their_memory():
    """Otherwise glibc would return it in every step, and fault it in again in the next."""
    said = "raise SystemExit(os.environ['MALLOC_TRIM_THRESHOLD_'] + os.environ['MALLOC_MMAP_MAX_'])"
    place = Watched({1: [sys.executable, "-c", f"import os; {said}"]})
    result = runner.run(place, Job("ddp-fp32", steps=2, workload=TINY))
    assert result.error == f"rank 1 ended with status 1: {1 << 40}0"


def test_every_default_method_is_known():
    assert [each.text for each in methods.parse_all(",".join(methods.DEFAULTS))]
