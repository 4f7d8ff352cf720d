"""How large generated CPU kernels become: their compilation time follows from it."""

import ast

import numpy as np
import pytest

import compll
from compll.backends.cpu.numba_kernels import Source
from compll.backends.cpu.outline import outline

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
    return Source(compll.compile(path, "reference").module).text


def test_rounds_share_one_walk(tmp_path):
    sizes = []
    for times in (4, 8):
        path = tmp_path / f"{times}.yaml"
        path.write_text(ROUNDS.format(times=times))
        text = source(path)
        sizes.append(len(text))
        assert text.count("def encode_walk0(") == 1
        # the first mean, the round's and the selection's; what differs is not outlined
        assert text.count("for t in range(tiles):") == 3
    assert sizes[1] - sizes[0] < 4 * 500


def test_what_a_walk_changes_comes_back():
    kernel = """def encode(n, tiles, x):
    bad = 0
    s1 = 0.0
    for t in range(tiles):
        z = x[t]
        bad = max(bad, z)
        s1 += z
    s2 = s1 + bad
    for t in range(tiles):
        z = x[t]
        bad = max(bad, z)
        s2 += z
    return s2 * 100 + bad
"""
    functions, text = outline(kernel, "encode")
    assert len(functions) == 1
    assert text.count("encode_walk0(") == 2
    before, after = {}, {}
    exec(kernel, before)
    exec("\n".join([*functions, text]), after)
    assert after["encode"](4, 4, [3, 1, 4, 1]) == before["encode"](4, 4, [3, 1, 4, 1])


def test_walks_that_differ_stay():
    kernel = """def encode(tiles, x, y):
    for t in range(tiles):
        x[t] += 1
    for t in range(tiles):
        y[t] += 2
"""
    assert outline(kernel, "encode") == ([], kernel)


@pytest.mark.parametrize("name", compll.list_specs())
def test_no_line_repeats_itself_without_end(name):
    module = compll.compile(name, "reference").module
    if module.arrays or name == "none":
        pytest.skip("has no generated kernel")
    text = Source(module).text
    ast.parse(text)
    assert max(map(len, text.splitlines())) < 2500


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
