"""Codecs are shared by the threads of a process, whatever these do."""

import os
import signal
import threading

import numpy as np
import torch

import compll
from compll.frontend import source
from compll.runtime import batches, library
from compll.runtime.arrays import Memo, hold
from tests.compll.cuda_host import kernels


def test_a_value_that_another_thread_drops_is_still_the_result(monkeypatch):
    """Every store is followed at once by the other thread's `clear`."""

    def stored(self, key, value):
        dict.__setitem__(self, key, value)
        self.clear()

    monkeypatch.setattr(Memo, "__setitem__", stored, raising=False)
    codec = compll.compile("topk", "cpu", ratio=0.25)
    x = np.arange(64, dtype=np.float32)
    for n in (64, 63):
        payload = codec.encode(x[:n], state=codec.init_state(n))
        assert len(payload) <= codec.payload_bytes(n)
        assert codec.decode(payload, n)[-1] == n - 1


def evaluations(name, monkeypatch):
    """Static expressions evaluated in each of three steps."""
    calls, evaluate = [], batches.evaluate
    monkeypatch.setattr(batches, "evaluate", lambda *args: calls.append(args) or evaluate(*args))
    codec, x, found = compll.compile(name, "cpu"), np.ones(777, np.float32), []
    state = codec.init_state(777)
    for step in range(3):
        codec.encode(x, state=state, step=step)
        found.append(len(calls))
        calls.clear()
    return found


def test_numbers_that_do_not_depend_on_the_step_are_computed_once(monkeypatch):
    first, *later = evaluations("topk", monkeypatch)
    assert first > 0
    assert later == [0, 0]
    assert min(evaluations("dgc", monkeypatch)) > 0  # its ratio falls from step to step


def test_denormal_numbers_are_kept_in_threads_that_flush_them():
    codec = compll.compile("onebit_group", "cpu")
    x = (np.linspace(-3, 3, 5000) * 1e-38).astype(np.float32)
    found = []

    def encode(flush):
        torch.set_flush_denormal(flush)
        state = codec.init_state(len(x))
        payload = codec.encode(x, state=state)
        found.append([payload.tobytes(), codec.decode(payload, 5000), state["residual"]])

    for flush in (False, True):
        thread = threading.Thread(target=encode, args=(flush,))
        thread.start()
        thread.join()
    (payload, *arrays), (other, *others) = found
    assert payload == other
    assert all(np.array_equal(a, b) for a, b in zip(arrays, others, strict=True))


def test_a_spec_is_read_once(tmp_path, monkeypatch):
    """An editor's save between two reads would give the new kernels the old text's digest."""
    path, reads, read = tmp_path / "x.yaml", [], source.read
    path.write_text(library.locate("topk").read_text())

    def then_saved(*args):
        reads.append(read(*args))
        path.write_text("name: [")
        return reads[-1]

    monkeypatch.setattr(source, "read", then_saved)
    compll.compile(path, "reference")
    assert len(reads) == 1


def test_a_process_forked_during_a_compile_compiles(monkeypatch, tmp_path):
    """A lock around the compile stayed held in the child, for ever."""
    path, check = tmp_path / "own.yaml", library.check.check
    path.write_text("name: own\nencode: {q: 2 * g}\npayload: {q: 'float32[n]'}\ndecode: q / 2\n")
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        go_on.wait(30)
        return check(*args)

    monkeypatch.setattr(library.check, "check", slow)
    thread = threading.Thread(target=compll.compile, args=(path, "reference"))
    thread.start()
    begun.wait(30)
    child = os.fork()
    if child == 0:
        library.check.check = check
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os._exit(compll.compile(path, "reference").name != "own")
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_launches_of_two_threads_on_one_stream_do_not_interleave(rng):
    """They share scratch memory. Each launch lets another thread run as far as it gets."""
    device = kernels("topk")
    launch, launched = device.device.launch, []

    def launch_slowly(*args):
        launch(*args)
        launched.append(threading.get_ident())
        if len(launched) == 2:
            started.set()
            waiting.wait(0.5)  # the other thread comes here only if nothing holds it back
        elif len(set(launched)) == 2:
            waiting.set()

    device.device.launch = launch_slowly
    started, waiting, n = threading.Event(), threading.Event(), 3000
    table, at = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    reference, found = compll.compile("topk", "reference"), {}

    def encode(x, after=None):
        if after is not None:
            after.wait(30)
        out = np.zeros(reference.payload_bytes(n), np.uint8)
        device.encode_batch(x.copy(), table, out, at, None, batches.Encoding())
        found[x.tobytes()] = out.tobytes()

    a, b = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    threads = [threading.Thread(target=encode, args=given) for given in ((a,), (b, started))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {x.tobytes(): reference.encode(x).tobytes() for x in (a, b)}


def test_a_tick_counts_for_the_captured_calls_of_its_thread_alone(rng, monkeypatch):
    """A codec is shared by the models of a process: while one is captured, another one's calls took
    its tick, and contexts that overlapped left one for ever."""
    device = kernels("randomk")
    n, x = 3000, rng.standard_normal(3000).astype(np.float32)
    table, at = map(hold, (np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)))

    def encode(step=5):
        out = np.zeros(4 * n, np.uint8)
        device.encode_batch(x.copy(), table, out, at, None, batches.Encoding(step=step))
        return out.tobytes()

    alone, later, found = encode(), encode(12), []
    first, second = (device.ticking(np.array([tick], np.int64)) for tick in (9, 7))
    with first:
        assert encode() == alone  # of a model that is not captured
        monkeypatch.setattr(device.device, "capturing", lambda: True)
        second.__enter__()
        thread = threading.Thread(target=lambda: found.append(encode()))
        thread.start()
        thread.join()
        assert found == [alone]
    assert encode() == later != alone  # the second context has not ended
    second.__exit__(None, None, None)
    assert encode() == alone
