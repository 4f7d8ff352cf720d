"""Jobs and rows of bench.gpu; jobs do not depend on the memory of a codec's arrays, and a device
with its own clock stands in for a real one."""

import json

import numpy as np
import pytest
import torch
import typer

import compll
from bench import gpu, gpu_times
from bench.gpu import round_jobs
from bench.gpu_times import CYCLES_PER_MS, LONGEST_SPIN_MS, Times, timed
from compll.runtime import library


@pytest.mark.parametrize("name", ["powersgd", "thc", "randomk", "onebit"])
def test_jobs_of_rounds(name, rng):
    codec, n = compll.compile(name), 5000
    x = rng.standard_normal(n).astype(np.float32)
    jobs = round_jobs(codec, x, codec.init_state(n))
    ends = ["decode_rounds"] if codec.rounds else []
    assert list(jobs) == [f"round_{one.name}" for one in codec.rounds] + ends
    for job, moved in jobs.values():
        job()
        assert moved >= 4


class Stream:
    """A device that runs the host's queue, one job after the other; times in milliseconds."""

    def __init__(self):
        self.host = self.done = 0.0

    def launch(self, host, device):
        self.host += host
        self.done = max(self.done, self.host) + device

    def wait(self):
        self.host = max(self.host, self.done)

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.at = max(self.stream.done, self.stream.host)

    def query(self):
        return self.at <= self.stream.host

    def synchronize(self):
        self.stream.host = max(self.stream.host, self.at)

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def stream(monkeypatch):
    made = Stream()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda n: made.launch(0.002, n / CYCLES_PER_MS))
    monkeypatch.setattr(gpu_times, "perf_counter", lambda: made.host / 1e3)
    return made


def test_the_devices_time_is_apart_from_the_hosts(stream):
    def small():
        for _ in range(10):
            stream.launch(host=0.05, device=0.01)

    def large():
        stream.launch(host=0.05, device=3.0)

    took = timed({"small": small, "large": large}, 5)
    assert took["small"] == Times(pytest.approx(0.1), pytest.approx(0.5), True)
    assert took["large"] == Times(pytest.approx(3.0), pytest.approx(0.05), True)


def test_a_job_that_waits_has_the_hosts_time_and_not_the_spins(stream):
    def waits():
        stream.launch(host=0.05, device=0.3)
        stream.wait()
        stream.launch(host=0.05, device=0.3)

    took = timed({"waits": waits}, 5)["waits"]
    assert not took.queued
    assert took.ms == pytest.approx(0.3 + 0.05 + 0.3)


def test_a_host_slower_than_the_longest_spin_is_told(stream):
    def slow():
        for _ in range(2):
            stream.launch(host=LONGEST_SPIN_MS, device=1.0)

    assert not timed({"slow": slow}, 3)["slow"].queued


@pytest.mark.parametrize("megabytes, cached", [(1, True), (50, True), (51, False), (1024, False)])
def test_a_share_of_copy_time_is_given_beyond_the_cache(megabytes, cached):
    n, l2 = megabytes << 18, 50 << 20
    took = {"copy": Times(8.0, 1.0, True), "encode": Times(4.0, 1.0, True)}
    row = gpu.row_of(n, took, {"encode": 2.0}, l2)
    assert row["cached"] == cached
    assert row["encode"]["share_of_copy_time"] == (None if cached else pytest.approx(0.5))
    assert gpu.show(
        [{"codec": "a", "megabytes": 1} | row | {"decode_add": row["encode"]}]
    ).row_count


def row(name, megabytes, ms=1.0):
    one = {"ms": ms, "host_ms": ms, "queued": True, "GBps": 1.0, "share_of_copy_time": None}
    return {"codec": name, "megabytes": megabytes, "copy_GBps": 9.0, "encode": one,
            "decode_add": one}  # fmt: skip


class Bench:
    """main on an emulated device; records measured rows, and the file when each begins."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "gpu.json"
        self.ms, self.breaks, self.begun = 1.0, {}, []

    def measure(self, name, megabytes, repeat):
        self.begun.append((name, megabytes, self.labels() if self.path.exists() else None))
        if why := self.breaks.get((name, megabytes)):
            raise why
        return row(name, megabytes, self.ms)

    def run(self, names, sizes="1,16", **options):
        gpu.main(names, sizes, 3, self.folder, **options)

    def labels(self):
        found = json.loads(self.path.read_text())["rows"]
        return [gpu.label_of(each["codec"], each["megabytes"]) for each in found]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    made = Bench(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "about", lambda repeat: {"repeat": repeat})
    monkeypatch.setattr(gpu, "measure", made.measure)
    return made


def test_the_file_is_written_after_every_row(bench, capsys):
    bench.run(["fp16", "dgc"], add=False)
    assert [each for _, _, each in bench.begun] == [
        None, ["fp16 1 MB"], ["fp16 1 MB", "fp16 16 MB"],
        ["dgc 1 MB", "fp16 1 MB", "fp16 16 MB"],
    ]  # fmt: skip
    assert capsys.readouterr().out.startswith("fp16 1 MB: encode 1.000, decode_add 1.000\n")


@pytest.mark.parametrize("why", [MemoryError("none"), KeyError("x"), OSError("device lost")])
def test_rows_survive_what_breaks_at_one_size(bench, why):
    bench.breaks["dgc", 16] = why
    bench.run(["dgc", "fp16"], add=False)
    assert bench.labels() == ["dgc 1 MB", "fp16 1 MB", "fp16 16 MB"]
    left_out = json.loads(bench.path.read_text())["left_out"]
    assert left_out == {"dgc 16 MB": f"{type(why).__name__}: {why}"}


def test_an_interrupt_keeps_the_rows(bench):
    bench.breaks["dgc", 16] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.run(["dgc", "fp16"], add=False)
    assert bench.labels() == ["dgc 1 MB"]


def test_rows_that_were_not_measured_again_stay(bench):
    bench.breaks["stc", 1] = RuntimeError("first")
    bench.run(["dgc", "fp16", "stc"], add=False)
    bench.ms, bench.breaks = 2.0, {("dgc", 1): RuntimeError("now")}
    bench.run(["dgc", "stc"], sizes="1", add=True)
    found = json.loads(bench.path.read_text())
    times = {(each["codec"], each["megabytes"]): each["encode"]["ms"] for each in found["rows"]}
    assert times == {
        ("dgc", 16): 1.0, ("fp16", 1): 1.0, ("fp16", 16): 1.0, ("stc", 1): 2.0, ("stc", 16): 1.0
    }  # fmt: skip
    assert found["left_out"] == {"dgc 1 MB": "RuntimeError: now"}


def test_without_add_the_file_begins_anew(bench):
    bench.run(["dgc"], add=False)
    bench.run(["fp16"], sizes="1", add=False)
    assert bench.labels() == ["fp16 1 MB"]


def test_bad_options_are_refused_before_measuring(bench, capsys):
    with pytest.raises(typer.Exit):
        bench.run(["dgc", "fp61"], add=False)
    assert "fp16" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        bench.run(["dgc"], sizes="1,large", add=False)
    assert "'large'" in capsys.readouterr().err
    assert not bench.begun


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["onebit_group", "dgc", "powersgd"])
def test_a_gpu_is_measured_and_its_memory_freed(name):
    cupy = pytest.importorskip("cupy")
    gpu.release()
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    found = gpu.measure(name, 1, 3)
    assert all(found[key]["ms"] > 0 for key in ("encode", "decode_add"))
    gpu.release()
    assert not library._compiled
    assert pool.used_bytes() == before


@pytest.fixture
def rng():
    return np.random.default_rng(1)
