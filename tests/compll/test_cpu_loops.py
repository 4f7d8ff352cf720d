"""Elementwise steps between arrays: compiled loops, bit for bit as the reference."""

import llvmlite.binding as llvm
import numpy as np
import pytest

import compll
from compll.backends.cpu import backend, instructions, jit
from tests.compll.cuda_host.pieces import pieces_equal

#: elementwise operators of every type between arrays, draws of both kinds, sums, states, codes
MIXED = """name: mixed
params:
  c: 3
state:
  seen: float32[n]
  level: float32
encode:
  m: matrix(g, 16)
  y: flat(m)
  q: (exponent(g) & 7) + c
  big: abs(g) > mean(abs(y)) and not isnan(y)
  v: where(big, y * exp2(q), clip(g, -1, level)) + random(-1, 1) * shared(0, 2)
  w: hadamard(v - seen, 64) / max(1e-3, norm2(v))
  tilted: min(max(w, -step), 7) * (2.5 if c > 2 else 1) + sign(g)
  total: sum(tilted, big) + 0 * sum(g)
  few: floor(tilted)
  alike: shared(0, 1)
  code: w * 100 + 7.5
payload:
  total: float32
  few: float32[n]
  code: uint4[n]
rounds: {total: mean, few: mean, code: mean}
decode: few + code * total * alike
update:
  seen: where(big, w, v) + round(g)
  level: mean(w * w)
feedback: own
"""


@pytest.mark.parametrize("spoil", [1.0, np.inf])
def test_loops_equal_the_reference(spoil, tmp_path, rng):
    def values(n):
        x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)
        x[n // 2] *= spoil
        return x

    pieces_equal(MIXED, tmp_path, values, on=["cpu"])


def test_payloads_that_cannot_be_written_to(rng):
    codec, x = compll.compile("thc"), rng.standard_normal(3000).astype(np.float32)
    payload = codec.encode(x, step=2)
    y = codec.decode(payload.tobytes(), 3000, step=2)
    assert np.array_equal(y, codec.decode(payload, 3000, step=2))


KEPT = """name: kept
state: {held: "float32[n]"}
encode: {v: g}
payload: {v: "float32[n]"}
decode: v
update: {held: g}
"""


def test_values_that_are_kept_need_no_masked_stores(tmp_path, monkeypatch):
    """AMD's processors without AVX-512 take 12 cycles and more for a masked store."""
    path = tmp_path / "kept.yaml"
    path.write_text(KEPT)
    codec = compll.compile(path)
    least = np.float32(2**-149)
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 3.4e38, -least, 1, -2] * 9, np.float32)
    before = np.arange(1, 73, dtype=np.float32) * least
    state = {"held": before.copy()}
    codec.encode(values, state=state)
    wanted = np.where(np.abs(values) < 2**48, values, before)  # states take up no more
    assert state["held"].tobytes() == wanted.tobytes()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine("x86-64-v3", "", opt=3, reloc="pic")
    monkeypatch.setattr(jit, "machine", lambda: machine)
    monkeypatch.setattr(instructions, "MASKED", False)
    if llvm.get_process_triple().startswith("x86_64"):
        assert "maskmov" not in jit.assembly(backend.source(codec.module))
