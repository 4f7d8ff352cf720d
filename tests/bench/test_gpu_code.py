"""The counts of bench.gpu_code in machine code."""

import pytest

from bench.gpu_code import disassemble, ready_only, rows_of
from compll.backends.cuda import nvrtc, source
from compll.runtime.library import type_check


@pytest.mark.slow
def test_registers_are_those_of_what_is_launched():
    """Not those of the reduced source whose instructions are counted, which needs fewer."""
    encode, _ = rows_of("int4_group", "sm_90")
    text = source.source(type_check("int4_group", {})[0]).full()
    launched, reduced = (nvrtc.compiled(each, "sm_90")[1] for each in (text, ready_only(text)))
    assert encode["registers"] == launched["encode_walk0"].registers
    assert encode["registers"] > reduced["encode_walk0"].registers


@pytest.mark.slow
@pytest.mark.parametrize("spec, least", [("none", 1), ("onebit_group", 2)])
def test_a_walk_reads_and_writes_four_elements_at_once(spec, least):
    encode, decode = rows_of(spec, "sm_90")
    assert (encode["what"], decode["what"]) == ("encode", "decode_add")
    for one in (encode, decode):
        assert 16 < one["registers"] <= 128
        # 8 loads of 32 lanes and 4 elements for every array, and some at the head of a block
        assert 8 * least <= one["cycles_per_1024"]["lsu"] < 150
        assert 100 < one["instructions_per_1024"] < 1000
        assert 0 < one["share_of_copy_time_at_most"] <= 1


@pytest.mark.parametrize(
    "spec, feed, wanted",
    [
        ("none", False, 4 + 4),
        ("int4_group", False, 4 + 0.5),
        ("onebit_group", True, 8 + 4 + 0.125),
        # keys: both read, one written, and read for each of three digits; lanes counted; then taken
        ("topk", True, 8 + 4 + 3 * 4 + 8 + 8 + 4),
    ],
)
def test_bytes_that_kernels_move(spec, feed, wanted):
    """Bytes per element of the launched kernels, not the least that a program needs."""
    module, _ = type_check(spec, {})
    assert source.moved(module, feed=feed) == pytest.approx(wanted, abs=0.05)


@pytest.mark.slow
def test_memory_s_cycles_are_of_what_kernels_move():
    encode, _ = rows_of("topk", "sm_90")
    cycles_of_a_byte = 1024 / (4.3e12 / 132 / 1.7e9)
    assert encode["memory_cycles_per_1024"] == pytest.approx(44 * cycles_of_a_byte, rel=1e-3)
    assert encode["kernels"] == 4


@pytest.mark.slow
def test_keys_are_stored_four_at_once():
    """A thread stores 32 keys with 8 stores."""
    module, _ = type_check("topk", {})
    cubin, _ = nvrtc.compiled(ready_only(source.source(module).full()), "sm_90")
    assert disassemble(cubin)["feed_keys0"].count("STG") == 8
