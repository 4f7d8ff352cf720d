"""Checks that need a device.

Its own instructions are compared with the functions of other processors, on every float; and calls
run under torch's capture of a CUDA graph.
"""

import ctypes
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import compll
from compll.backends.cuda import device as cuda_device
from compll.backends.cuda import nvrtc as cuda_nvrtc
from compll.backends.cuda.plans import numbers
from tests.compll import cuda_host
from tests.compll.test_cuda import on_gpu
from tests.compll.test_cuda_arithmetic import floats

needs_gpu = pytest.mark.skipif(not on_gpu(), reason="no CUDA device")

#: differences for a float x of these bits; A:: is the device, B:: any other processor
CHECKS = {
    "codes": "A::op_code(x, 255) != B::op_code(x, 255) || A::op_code(x, 7) != B::op_code(x, 7)",
    "whole_numbers": "__float2uint_rz(x) != B::__float2uint_rz(x)",
    "to_float16": "A::float16_bits(x) != B::float16_bits(x)",
    "from_float16": "other(A::float16_value(half), B::float16_value(half))",
}
SHIMMED = ("__float2uint_rz",)
COMMON = """
using A::u16; using A::u32; using A::u64;
D float value(u32 bits) { return __int_as_float((int)bits); }
D bool other(float a, float b) {  // of NaN, the bits are a processor's own
  return __float_as_int(a) != __float_as_int(b) && !(a != a && b != b);
}
"""
CHECK = """
D bool differs_{name}(u32 bits) {{
  const float x = value(bits);
  const int half = (int)(bits & 0xffffu);
  return {differs};
}}
extern "C" __global__ void {name}(u64* wrong, u32* first) {{
  const u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < 1ull << 32; i += step)
    if (differs_{name}((u32)i)) {{
      atomicAdd(wrong, (u64)1);
      atomicMin(first, (u32)i);
    }}
}}
"""
ON_THE_HOST = """
extern "C" void count_{name}(u64* wrong, const u32* bits, long long n) {{
  for (long long i = 0; i < n; ++i) *wrong += differs_{name}(bits[i]);
}}
"""


def shimmed(name):
    """The definition of an intrinsic in cuda_host/shim.h."""
    text = (Path(cuda_host.__file__).parent / "shim.h").read_text()
    found = re.search(rf"^inline \w+ {name}\((?:[^\n]*\}}\n|.*?^\}}\n)", text, re.M | re.S)
    assert found is not None, name
    return found[0]


@cache
def source():
    """All checks, with each kernel function twice: the device's, and other processors'."""
    text = numbers()
    shims = "typedef unsigned long long uint64_t;\n" + "".join(map(shimmed, SHIMMED))
    portable = text.replace("__CUDA_ARCH__", "NO_DEVICE")
    assert portable != text
    both = f"namespace A {{\n{text}}}\nnamespace B {{\n{shims}{portable}}}\n"
    checks = [CHECK.format(name=name, differs=differs) for name, differs in CHECKS.items()]
    return f"#define GRADIENT 0\n{both}{COMMON}{''.join(checks)}"


def test_compared_methods_are_equal_without_a_device(rng):
    """Both sides are equal on the host, so a difference on a device is the device's."""
    counts = "".join(ON_THE_HOST.format(name=name) for name in CHECKS)
    library = ctypes.CDLL(str(cuda_host.build(source() + counts)))
    bits = floats(rng).view(np.uint32)
    for name in CHECKS:
        wrong, count = np.zeros(1, np.uint64), library[f"count_{name}"]
        count.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong]
        count(wrong.ctypes.data, bits.ctypes.data, len(bits))
        assert wrong[0] == 0, name


@pytest.mark.slow
def test_compared_methods_compile_for_a_device():
    _, used = cuda_nvrtc.compiled(source(), "sm_90")
    assert set(used) == set(CHECKS)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_computes_what_other_processors_do(name):
    """Compare all 2**32 floats. first: bits of the smallest one that differs."""
    cupy = cuda_device.cupy()
    path = cuda_nvrtc.kept(source(), cupy.cuda.Device().compute_capability)
    kernel = cupy.RawModule(path=str(path)).get_function(name)
    wrong, first = cupy.zeros(1, "uint64"), cupy.full(1, 2**32 - 1, "uint32")
    kernel((2048,), (256,), (wrong, first))
    assert int(wrong[0]) == 0, f"{int(wrong[0])} floats, first 0x{int(first[0]):08x}"


class Call:
    """An encode and a decode of one tensor, all in torch's memory."""

    def __init__(self, spec, n=100_000):
        self.codec = compll.compile(spec, "cuda")
        self.x, self.y = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
        size = self.codec.payload_bytes(n)
        self.out = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.table = self.codec.hold(np.array([[0, n, 0, 0, 0]], np.int64))
        self.at = self.codec.hold(np.zeros(1, np.int64))

    def __call__(self):
        used = self.codec.encode_batch(self.x, self.table, self.out, self.at, step=3)
        self.codec.decode_batch(self.out, self.table, self.at, used, self.y, step=3)

    def results(self):
        """Results of the call; they are cleared."""
        found = self.out.clone(), self.y.clone()
        self.out.zero_()
        self.y.zero_()
        return found


def allocations(call):
    """Number of times that a call asks CuPy and torch for device memory."""

    class Count(cuda_device.cupy().cuda.MemoryHook):
        name = "count"
        asked = 0

        def malloc_preprocess(self, device_id, size, mem_size):
            self.asked += 1

    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with Count() as hook:
        call()
    return hook.asked + torch.cuda.memory_stats()["allocation.all.allocated"] - before


SPECS = ["onebit", "int4_group", "dgc", "stc", "randomk", "powersgd", "thc"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("spec", SPECS)
def test_a_gpu_allocates_nothing_after_the_first_call(spec):
    call = Call(spec)
    call()
    assert allocations(call) == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("spec", SPECS)
def test_a_gpu_captures_calls_under_torch(spec):
    """Capture with torch's default mode: no thread may allocate or wait meanwhile."""
    call = Call(spec)
    call()
    expected = call.results()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
        for found, wanted in zip(call.results(), expected, strict=True):
            assert torch.equal(found, wanted)
