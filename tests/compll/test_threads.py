"""Codecs are shared by the threads of a process, whatever these do."""

import threading

import numpy as np
import torch

import compll
from compll.frontend import source
from compll.numerics.held import Memo
from compll.runtime import batches, library


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
