"""The counts of bench.gpu_code in machine code."""

import pytest

from bench.gpu_code import rows_of


def test_registers_are_those_of_what_is_launched():
    """Not of the stripped source whose instructions are counted, which needs 38."""
    encode, _ = rows_of("int4_group", "sm_90")
    assert encode["registers"] == 64


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
