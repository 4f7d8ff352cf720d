"""Sizes of generated CPU kernels, on which their compilation time depends."""

import re

import numpy as np
import pytest

import compll
from compll.backends.cpu import backend
from compll.backends.cpu.kernels import module_text
from compll.ir.tile import Call, When
from compll.passes import lower

ROUNDS = """
name: rounds
about: Many rounds.
encode:
  a: abs(g)
  threshold: iterate(t, mean(a), mean(a, a < t), {times}, {times})
  kept: filter(a >= threshold)
  index: indices(kept)
  value: g[kept]
payload:
  index: gaps[kept]
  value: float32[kept]
decode: scatter(index, value)
"""


def source(path):
    return backend.source(compll.compile(path, "reference").module)


def test_rounds_share_one_walk(tmp_path):
    sizes = []
    for times in (4, 8):
        path = tmp_path / f"{times}.yaml"
        path.write_text(ROUNDS.format(times=times))
        text = source(path)
        sizes.append(len(text))
        # first mean, the round's, the selection's, and the selection; with AMD's stores
        assert len(re.findall(r'define internal void @"encode_walk', text)) == 4
    assert sizes[1] - sizes[0] < 4 * 5000


@pytest.mark.slow
@pytest.mark.parametrize("name", compll.list_specs())
def test_no_kernel_is_without_end(name):
    """LLVM's time depends on the amount of code that is compiled together."""
    module = compll.compile(name, "reference").module
    parts = [module_text(name, part) for part in lower.kernels(module).values()]
    assert max(len(text.splitlines()) for text in parts) < 12_000


@pytest.mark.slow
@pytest.mark.parametrize("divisor", [1, 2, 3, 8, 1 << 20])
def test_remainders_of_negative_integers(tmp_path, divisor):
    path = tmp_path / "remainder.yaml"
    path.write_text(
        "name: remainder\nabout: Whole numbers modulo a constant.\n"
        f"encode: {{q: (exponent(g) - 60) % {divisor}}}\npayload: {{q: 'int32[n]'}}\ndecode: q\n"
    )
    x = np.float32(2.0) ** np.arange(-120, 120, dtype=np.float32)
    cpu, reference = (compll.compile(path, target) for target in ("cpu", "reference"))
    assert np.array_equal(cpu.encode(x), reference.encode(x))
    assert np.array_equal(
        reference.decode(reference.encode(x), 240), (np.arange(-180, 60)) % divisor
    )


def test_a_condition_refuses_steps_whose_results_it_cannot_clear():
    module = compll.compile("threshold", "reference").module
    kernel = next(
        k for part in lower.kernels(module).values() for k in part if k.name == "decode_set"
    )
    (when,) = (s for s in kernel.steps if isinstance(s, When))
    when.steps.append(Call("ascending", attr=module.fields[0]))
    with pytest.raises(AssertionError, match="ascending"):
        module_text("threshold", [kernel])
