"""A rank's steps of whole models on a device: numbers of calls and of allocations.

Nothing is allocated after the first steps. Kernels and messages do nothing, and tensors have no
memory, so only the host's part runs.
"""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from casync.memory.host import HostMemory
from casync.runtime.executor import Executor
from compll.runtime.codec import Codec
from tests.casync.whole_models import CODEC, gpt2, programs_of
from tests.compll.cuda_host import HostDevice, kernels


class Wire:
    """An endpoint that transfers nothing. groups: number of posted groups."""

    def __init__(self, ranks):
        self.rank, self.world_size, self.groups = (ranks // 2 + 1) % ranks, ranks, 0

    def exchange(self, transfers):
        self.groups += 1

    def abort(self):
        pass

    close = abort


class Memory(HostMemory):
    """Memory of a device that does nothing. made: number of tensors made."""

    host, device, made = False, torch.device("meta"), 0

    def zeros(self, count, dtype):
        self.made += 1
        return torch.empty(count, dtype=dtype, device=self.device)

    staging = None  # payloads of known lengths need none

    def array(self, tensor):
        return tensor.detach()

    def stream(self, *, urgent=False):
        return self

    caller = stream

    def after(self, event):
        pass

    record = after

    def run(self, work):
        work()


class Device(HostDevice):
    """A device that counts uploads and allocations; launches do nothing."""

    made = 0

    def upload(self, values):
        self.made += 1
        return super().upload(values)

    def zeros(self, count, dtype):
        self.made += 1
        return np.zeros(1, dtype)

    def part(self, zone, place):
        return zone

    def dtype(self, array):
        return "float32"

    def launch(self, *args):
        pass


class Arrays:
    """Arrays without memory; see compll.runtime.arrays.Arrays for the members."""

    host = False

    def vector(self, x, name, *, write=False):
        return x

    def payloads(self, x, name, what, *, write=False):
        return x

    def raw(self, x, name):
        return x

    view = raw

    def stream(self):
        return nullcontext()

    def address(self, x):
        return x.storage_offset()


class Counted(Codec):
    """A codec that counts its calls."""

    calls = 0

    def encode_batch(self, *args, **options):
        self.calls += 1
        return super().encode_batch(*args, **options)

    def decode_batch(self, *args, **options):
        self.calls += 1
        return super().decode_batch(*args, **options)


def codec_of(name):
    made = kernels(name, Device)
    made.arrays = Arrays()
    return Counted(made.module, made.params, "cuda", name, made)


def counts(sizes, ranks, steps):
    """For each step of ps: calls of the codec, groups, and tensors made in any memory."""
    codec, wire, memory = codec_of(CODEC), Wire(ranks), Memory()
    programs = programs_of(sizes, ranks)
    buckets = [
        torch.empty(max(row[0] + row[1] for part in program.parts for row in part.rows),
                    device="meta")
        for program in programs
    ]  # fmt: skip
    found = []
    with Executor(wire, {CODEC: codec}, memory=memory) as executor:
        for number in range(steps):
            before = Counter(calls=codec.calls, groups=wire.groups)
            before |= Counter(made=codec.backend.device.made + memory.made)
            for program, bucket in zip(programs, buckets, strict=True):
                executor.submit(program, bucket, {}, number)
            after = Counter(calls=codec.calls, groups=wire.groups)
            after |= Counter(made=codec.backend.device.made + memory.made)
            found.append({name: after[name] - before[name] for name in after})
    return found


@pytest.mark.parametrize("ranks, calls", [(2, 39), (8, 52)])
def test_a_step_of_gpt2_takes_few_calls_and_groups(ranks, calls):
    """Each of 13 buckets takes an encode, the owner's merge, and a decode; with 8 ranks the owner
    encodes the sum in another call."""
    first, *others = counts(gpt2(), ranks, 3)
    assert first["made"] > 0
    for step in others:
        assert step["calls"] <= calls, step  # of 1300 tasks' own
        assert step["groups"] <= 26, step  # of 182
        assert step["made"] == 0, step


@pytest.mark.slow
def test_nothing_is_made_after_two_steps_of_gpt2_xl():
    *_, third, last = counts(gpt2(48, 1600), 8, 4)
    assert (third["made"], last["made"]) == (0, 0)
    assert last["groups"] > 0
