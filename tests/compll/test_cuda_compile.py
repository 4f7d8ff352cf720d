"""NVRTC compiles every spec to machine code for a device; no device is needed."""

import struct

import pytest

from compll.backends.cuda import nvrtc as cuda_nvrtc
from compll.backends.cuda import source as cuda_source
from compll.errors import SpecError
from compll.runtime.library import list_specs, type_check

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
GRADIENTS = list(cuda_source.GRADIENTS)
#: the architectures take turns, and so do the dtypes of gradients
ONCE = [(spec, ARCHITECTURES[i % len(ARCHITECTURES)]) for i, spec in enumerate(list_specs())]


@pytest.mark.slow
@pytest.mark.parametrize("spec, arch", ONCE)
def test_every_spec_becomes_a_cubin(spec, arch):
    module, _ = type_check(spec, {})
    turn = list_specs().index(spec) // len(ARCHITECTURES) + ARCHITECTURES.index(arch)
    gradient = GRADIENTS[turn % len(GRADIENTS)]
    try:
        source = cuda_source.source(module)
    except SpecError as why:
        pytest.skip(f"refused: {why}")
    # full optimization takes four times as long, and says no more about the source
    cubin = cuda_nvrtc.cubin(source.full(gradient), arch, "--Ofast-compile=max")
    assert cubin[:4] == b"\x7fELF"
    assert max(ends(cubin)) == len(cubin)
    for plan in source.plans.values():
        for step in plan.steps:
            assert step.kernel.encode() in cubin


def ends(elf):
    """Ends of the tables of program and section headers."""
    programs, sections = struct.unpack_from("<QQ", elf, 32)
    size, count, section_size, section_count = struct.unpack_from("<4H", elf, 54)
    return programs + size * count, sections + section_size * section_count


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, gradient", [("onebit_group", "float32"), ("topk", "bfloat16"), ("powersgd", "float32")]
)
def test_residuals_of_16_bits_become_a_cubin(spec, gradient):
    module, _ = type_check(spec, {"residual": "bfloat16"})
    text = cuda_source.source(module).full(gradient)
    cubin = cuda_nvrtc.cubin(text, ARCHITECTURES[-1], "--Ofast-compile=max")
    assert cubin[:4] == b"\x7fELF"


def test_totals_without_an_order_are_joined_by_blocks_first():
    """A single block adds up a piece's parts: of tiles of nvfp4, 4 million in 64 million
    elements, which would take it ten times as long as everything else."""
    source = cuda_source.source(type_check("nvfp4", {})[0])
    totals = [s for s in source.plans["feed"].scratch if s.name.startswith("part")]
    assert [(s.grid, s.of) for s in totals] == [(0, "blocks")]


def test_a_wrong_source_is_told():
    with pytest.raises(RuntimeError, match=r"NVRTC.*undefined_name"):
        cuda_nvrtc.cubin("__global__ void k() { undefined_name; }", "sm_80")
