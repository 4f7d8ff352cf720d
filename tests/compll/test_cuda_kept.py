"""Values that the CUDA backend keeps between calls: their lifetime, and calls without them."""

import gc
import re
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import compll
from compll.backends.cuda import backend as cuda
from compll.backends.cuda import device as cuda_device
from compll.backends.cuda import launch
from compll.backends.cuda import source as cuda_source
from compll.errors import PayloadError, UsageError
from compll.runtime.batches import Encoding
from compll.runtime.codec import Codec
from compll.runtime.library import type_check
from tests.compll.cuda_host import HostDevice, kernels
from tests.compll.cuda_host import codec as codec_on
from tests.tiers import first_fast

AT = np.zeros(1, np.int64)
ROOT = Path(__file__).parents[2]


def round_trip(device, name, n, rng):
    """Encode and decode n elements, and compare with the reference."""
    reference = compll.compile(name, "reference")
    table, out = np.array([[0, n, 0, 0, 0]]), np.zeros(reference.payload_bytes(n), np.uint8)
    x = rng.standard_normal(n).astype(np.float32)
    options = {"seed": 1, "step": 2, "scale": 1.0, "writeback": False}
    used = device.encode_batch(x, table, out, AT, None, Encoding(**options))
    expected = reference.encode(x, seed=1, step=2)
    np.testing.assert_array_equal(out[: used[0]], expected)
    y = np.zeros(n, np.float32)
    device.decode_batch(out, table, AT, used, y, add=False)
    np.testing.assert_array_equal(y, reference.decode(expected, n))


#: in passes with scratch, and an array at a time
NAMES = ["dgc", "thc"]


@pytest.mark.parametrize("name", NAMES)
def test_the_latest_unheld_arrays_are_kept(name, monkeypatch, rng):
    monkeypatch.setattr(launch, "KEPT", 6)
    device = kernels(name)
    for n in (*range(100, 108), 107, 100):
        round_trip(device, name, n, rng)
        assert len(device.keeper.copies) <= 6


class Counting(HostDevice):
    """A device that counts allocations in its memory. capture: True while a graph is captured."""

    made, capture, queue = 0, False, 0

    def upload(self, values):
        self.made += 1
        return super().upload(values)

    def zeros(self, count, dtype):
        self.made += 1
        return super().zeros(count, dtype)

    def capturing(self):
        return self.capture

    def stream(self):
        return self.queue

    def launch(self, *args):
        """Does nothing."""


class Part:
    """A program's batch of n elements: its arrays, and its calls."""

    def __init__(self, codec, n):
        self.codec, self.n = codec, n
        size = codec.payload_bytes(n)
        self.table = codec.hold(np.array([[0, n, 0, 0, 0]]))
        self.at, self.used = codec.hold(AT), codec.hold(np.array([size]))
        self.x, self.out = np.zeros(n, np.float32), np.zeros(size, np.uint8)

    def run(self):
        self.codec.encode_batch(self.x, self.table, self.out, self.at, writeback=True)
        self.codec.decode_batch(self.out, self.table, self.at, self.used, self.x, add=True)
        self.codec.decode_batch(self.out, self.table, self.at, self.used, self.x)


@pytest.mark.parametrize("name", first_fast(["int4_group", "topk", "dgc"]))
def test_held_arrays_are_made_once(name):
    """At least as many tables as a step of gpt2-xl needs at 8 ranks."""
    codec = codec_on(name, Counting)
    parts = [Part(codec, 65 + k) for k in range(1300)]
    for part in reversed(parts):  # the largest first: scratch memory does not grow
        part.run()
    device, before = codec.backend.device, codec.backend.device.made
    for _ in range(2):
        for part in parts:
            part.run()
    assert device.made == before


def test_held_numbers_that_were_checked_are_refused_for_other_arrays():
    """They are checked once for arrays of a length, not once for all."""
    codec, n = codec_on("int4_group", Counting), 640
    size = codec.payload_bytes(n)
    table, at, used = map(
        codec.hold, (np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64), np.array([size]))
    )
    x, out, more = np.zeros(n, np.float32), np.zeros(2 * size, np.uint8), {"writeback": True}
    codec.decode_batch(out, table, at, used, x)
    with pytest.raises(PayloadError, match="ends early"):
        codec.decode_batch(out[: size - 1], table, at, used, x)
    with pytest.raises(UsageError, match="a piece ends at 640"):
        codec.decode_batch(out, table, at, used, x[:-1])
    codec.encode_batch(x, table, out, at, incoming=(out[size:], at, used), **more)
    with pytest.raises(UsageError, match="memory in common"):
        codec.encode_batch(x, table, out, at, incoming=(out[1:], at, used), **more)


def test_rounds_of_held_arrays_are_captured():
    """A round's lengths follow from the table, and were uploaded anew, which a capture refuses."""
    codec = codec_on("powersgd", Counting)
    part, device = Part(codec, 5000), codec.backend.device
    at, sums = [codec.hold(np.zeros(1, np.int64)) for _ in range(2)], []
    outs = [np.zeros(each.payload_bytes(part.n), np.uint8) for each in codec.rounds]

    def run():
        sums.clear()
        for number, out in enumerate(outs):
            codec.encode_round(number, part.x, part.table, out, at[number], sums, workers=2)
            sums.append((out, at[number]))
        codec.decode_rounds(part.x, part.table, sums, workers=2)

    run()
    before, device.capture = device.made, True
    run()
    assert device.made == before


class Weighing(Counting):
    """A device that adds up the bytes of zeros."""

    size = 0

    def zeros(self, count, dtype):
        self.size += count * np.dtype(dtype).itemsize
        return super().zeros(count, dtype)


@pytest.mark.parametrize("name", ["int4_group", "topk", "dgc", "powersgd", "sparseloco"])
def test_scratch_memory_is_known_before_any_call(name):
    """It is the largest need of all kinds of calls with a tensor."""
    codec = codec_on(name, Weighing)
    part, device = Part(codec, 5000), codec.backend.device
    state = codec.init_state(5000) if codec.stateful else None
    before = device.size
    if codec.rounds:
        sums = []
        for number, one in enumerate(codec.rounds):
            out = np.zeros(one.payload_bytes(5000), np.uint8)
            how = {"workers": 1, "state": state}
            codec.encode_round(number, part.x, part.table, out, part.at, sums, **how)
            sums.append((out, part.at))
        codec.decode_rounds(part.x, part.table, sums, **how)
    else:
        codec.encode_batch(part.x, part.table, part.out, part.at, state=state)
        for add in (False, True):
            device.queue += 1  # merges and decodes have streams of their own in a step
            codec.decode_batch(part.out, part.table, part.at, part.used, part.x, add=add)
    made = device.size - before
    told = codec.scratch_bytes(5000)
    assert made == told
    assert (told == 0) == (name == "int4_group")


def test_the_guide_tells_scratch_memory():
    """Bytes for each element of a large tensor, in docs/use/wrap.md."""
    guide, n = (ROOT / "docs" / "use" / "wrap.md").read_text(), 4 * 10**6
    (row,) = re.findall(r"^\| `scratch` .*", guide, re.MULTILINE)
    told = dict(re.findall(r"`(\w+)` (?:needs )?(\d+)", row))
    assert len(told) == 4
    for name, size in told.items():
        assert round(codec_on(name).scratch_bytes(n) / n) == int(size), name


def test_held_arrays_are_freed_with_their_holder():
    codec = codec_on("dgc", Counting)
    part = Part(codec, 5000)
    part.run()
    (lent,) = (
        {id(b.lent): b.lent for b in part.table.kept.values() if hasattr(b, "lent")}.values(),
    )
    gone = [weakref.ref(each) for each in lent]
    assert gone
    del part, lent
    gc.collect()
    assert not any(each() for each in gone)
    assert not list(codec.backend.keeper.lent.values())


def test_tables_of_a_plan_share_scratch_memory_in_a_stream():
    codec = codec_on("dgc", Counting)
    small, large, other = (Part(codec, n) for n in (100, 9000, 100))
    for part in (small, large, small):
        part.run()
    codec.backend.device.queue = 1  # another stream
    other.run()

    def lent(part):
        return [b.lent for key, b in part.table.kept.items() if key[1:] == ("set",)]

    assert lent(small) == lent(large) != lent(other)


def test_arrays_of_a_graph_outlive_growth():
    codec = codec_on("dgc", Counting)
    small = Part(codec, 100)
    small.run()
    device = codec.backend.device
    device.capture, device.queue = True, 5  # a capture has its own stream
    made = device.made
    small.run()
    device.capture, device.queue = False, 0
    assert device.made == made  # no allocation during a capture
    _, fresh = next(made for key, made in small.table.kept.items() if key[1:] == ("fresh",))
    batch = next(b for key, b in fresh.kept.items() if key[1:] == ("feed",))
    first, large = batch.lent, Part(codec, 9000)
    large.run()
    small.run()
    assert batch.lent is not first
    assert batch.captured[0] is first


@pytest.mark.parametrize("stream", [0, 5], ids=["its stream", "a stream of its own"])
@pytest.mark.parametrize("first", [100, 9000])
def test_calls_beside_a_graph_have_other_scratch_memory(stream, first):
    """Replays run on a stream of the user's, so nothing orders them and calls of other streams."""
    codec = codec_on("topk", Counting)
    device, parts = codec.backend.device, [Part(codec, n) for n in (100, first, 100)]

    def arrays(part):
        batches = [b for b in part.table.kept.values() if isinstance(b, launch.Batch) and b.lent]
        return {id(array) for b in batches for array in b.lent.arrays}

    for part in parts:
        part.run()
    device.capture, device.queue = True, stream
    for part in parts[1:]:  # one after another, so graphs share theirs
        part.run()
    device.capture, device.queue = False, 0
    graphs = arrays(parts[1]) | arrays(parts[2])
    for part in parts:
        part.run()
        assert not arrays(part) & graphs
    device.capture, device.queue, made = True, stream, device.made
    parts[0].run()
    assert arrays(parts[0]) <= graphs
    assert device.made == made


def test_graphs_of_two_streams_share_no_scratch_memory():
    """Their tables did in calls before, on one stream."""
    codec = codec_on("topk", Counting)
    device, parts = codec.backend.device, [Part(codec, 100) for _ in range(2)]
    for part in parts:
        part.run()
    device.capture = True
    lent = []
    for device.queue, part in enumerate(parts, 2):
        part.run()
        batches = [b for b in part.table.kept.values() if isinstance(b, launch.Batch) and b.lent]
        lent.append({id(array) for b in batches for array in b.lent.arrays})
    assert not lent[0] & lent[1]


def test_numbers_of_a_graph_outlive_those_of_later_steps():
    codec = codec_on("dgc", Counting, warmup=10)
    part = Part(codec, 5000)

    def encode(step):
        state = codec.init_state(5000)
        codec.encode_batch(part.x, part.table, part.out, part.at, state=state, step=step)

    encode(1)
    codec.backend.device.capture = True
    encode(1)
    codec.backend.device.capture = False
    batch = next(b for b in part.table.kept.values() if isinstance(b, launch.Batch))
    place = weakref.ref(batch.evaluated[2])
    encode(2)
    gc.collect()
    assert place() is not None
    assert place() is not batch.evaluated[2]


def test_a_graph_is_not_made_of_what_nobody_holds():
    codec = codec_on("int4_group", Counting)
    part = Part(codec, 100)
    part.run()
    codec.backend.device.capture = True
    part.run()
    with pytest.raises(UsageError, match=r"give codec\.hold"):
        codec.encode_batch(part.x, np.array(part.table), part.out, AT)


class Short(HostDevice):
    """A device that runs out of memory once."""

    left = 10**9

    def zeros(self, count, dtype):
        self.left -= count
        if self.left < 0:
            self.left = 10**9
            raise MemoryError
        return super().zeros(count, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_memory_that_ends_is_taken_from_what_is_kept(name, rng):
    device = kernels(name, Short)
    round_trip(device, name, 100, rng)
    kept = len(device.keeper.copies)
    device.device.left = 5
    round_trip(device, name, 2000, rng)
    assert device.device.left > 5
    assert len(device.keeper.copies) <= kept  # those of 2000 elements


class Interrupted(HostDevice):
    """A device whose user presses Ctrl-C."""

    after = 10**9

    def launch(self, *args):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt
        super().launch(*args)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_after_an_interrupted_one_begins_anew(name, rng):
    device = kernels(name, Interrupted)
    round_trip(device, name, 5000, rng)
    for number in range(1, len(device.device.launches)):
        device.device.after = number
        with pytest.raises(KeyboardInterrupt):
            round_trip(device, name, 5000, rng)
        round_trip(device, name, 5000, rng)


class Array(np.ndarray):
    """An array like CuPy's."""

    def set(self, values, stream):
        self[:] = values


class Cupy:
    """The part of CuPy that CupyDevice uses, with two devices."""

    def __init__(self, stream=7):
        self.number, self.capturing, self.waited, self.current = 0, False, 0, stream
        self.runtime = SimpleNamespace(getDevice=lambda: self.number)
        self.cuda = self
        self.asarray = np.array

    def empty(self, count, dtype):
        return Array(count, dtype)

    def get_current_stream(self):
        waiting = {"synchronize": self.synchronize}
        return SimpleNamespace(is_capturing=lambda: self.capturing, ptr=self.current, **waiting)

    def Device(self):
        return self

    def synchronize(self):
        self.waited += 1


def test_nothing_is_made_while_a_graph_is_captured(monkeypatch):
    module = Cupy()
    monkeypatch.setattr(cuda_device, "cupy", lambda: module)
    device = cuda_device.CupyDevice(cuda_source.source(type_check("onebit", {})[0]))
    makes = [lambda: device.upload(AT), lambda: device.zeros(3, "uint8")]
    calls = [*makes, device.settle, device.finish]
    for call in calls:
        call()
        module.capturing = True
        with pytest.raises(UsageError, match="the same call once before the capture"):
            call()
        module.capturing = False
    assert module.waited == 2


def test_numbers_may_change_once_they_are_given(monkeypatch):
    """They may be in pinned memory, which CUDA reads when the stream gets there."""
    module, late = Cupy(), []
    monkeypatch.setattr(cuda_device, "cupy", lambda: module)
    monkeypatch.setattr(Array, "set", lambda _, values, stream: late.append(values))
    device = cuda_device.CupyDevice(cuda_source.source(type_check("onebit", {})[0]))
    numbers = np.arange(4)
    device.upload(numbers)
    numbers[:] = 9
    assert late[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("stream, count", [(7, 1), (2, 2)], ids=["one", "each thread's default"])
def test_threads_share_scratch_memory_on_one_stream_only(monkeypatch, stream, count):
    """CUDA has one name for the default streams of all threads, on which calls run at once."""
    monkeypatch.setattr(cuda_device, "cupy", lambda: Cupy(stream))
    device = cuda_device.CupyDevice(cuda_source.source(type_check("onebit", {})[0]))
    numbers = [device.stream(), device.stream()]
    thread = threading.Thread(target=lambda: numbers.append(device.stream()))
    thread.start()
    thread.join()
    assert numbers[0] == numbers[1]
    assert len({*numbers}) == count


def test_every_device_has_codecs_of_its_own(monkeypatch):
    module = Cupy()
    monkeypatch.setattr(cuda_device, "cupy", lambda: module)
    monkeypatch.setattr(cuda, "cupy", lambda: module)
    monkeypatch.setattr("compll.runtime.library._compiled", {})
    first = compll.compile("onebit", "cuda")
    module.number = 1
    other = compll.compile("onebit", "cuda")
    assert first is not other
    assert (first.backend.device.number, other.backend.device.number) == (0, 1)
    module.number = 0
    assert compll.compile("onebit", "cuda") is first


@pytest.mark.parametrize(
    "used, room, error",
    [
        ([40], 0, None),
        ([40], -1, PayloadError),
        ([40, 40], 0, UsageError),
        (np.array([40], np.int32), 0, UsageError),
    ],
)
def test_lengths_in_device_memory_are_of_payloads_that_have_room(used, room, error):
    module, params = type_check("topk", {"ratio": 0.1})
    codec = Codec(module, params, "cuda", "topk", kernels("topk"))
    table, payload = np.array([[0, 100, 0, 0, 0]]), np.zeros(codec.payload_bytes(100) + room, "u1")
    there = type("There", (), {"dtype": np.asarray(used).dtype, "__len__": lambda _: len(used)})()
    if error is None:
        codec._arguments.lengths(payload, table, AT, there)
    else:
        with pytest.raises(error, match="topk: "):
            codec._arguments.lengths(payload, table, AT, there)
