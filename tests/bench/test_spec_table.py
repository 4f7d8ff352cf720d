"""Formulas of bench/results/compressors.md are those of layouts; tables of speeds add up."""

from math import ceil, floor, sqrt

import numpy as np
import pytest

import compll
from bench import spec_table
from bench.spec_facts import facts, logic_lines
from compll.ir import layout
from compll.ir.layout import limits
from compll.ir.storage import STORAGES

SPECS = compll.list_specs()


@pytest.mark.parametrize("name", SPECS)
def test_formulas_give_the_length_of_payloads(name):
    for n in (1, 63, 1000, 20011):
        formula_gives_the_length(name, n)


def formula_gives_the_length(name, n):
    codec, known = compll.compile(name, "reference"), facts(name)
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    payload = codec.encode(x)
    if not codec.module.selections:
        bound = eval(known.payload, {"ceil": ceil, "floor": floor, "sqrt": sqrt, "n": n})
        assert bound == codec.payload_bytes(n), n
        assert len(payload) == bound if codec.fixed else len(payload) <= bound
        return
    # A selection's size cannot be separated from its gaps: the bounds of both give the bound.
    assert known.limits
    most = limits(codec.module, n, codec.params)
    among = {name: most.get(codec.module.among(name), n) for name in most}
    found = layout.longest(codec.module, most, lambda sizes: longest(known, n, sizes, among))
    assert found == codec.payload_bytes(n), n


def longest(known, n, bounds, among):
    names = {s: s for s in bounds}
    values = {
        "count": lambda s: bounds[s],
        "gaps": lambda s: STORAGES["gaps"].most_bytes(bounds[s], among[s], 1) - bounds[s],
        "golomb": lambda s: STORAGES["golomb"].most_bytes(bounds[s], among[s], 1),
    }
    return eval(known.payload, values | names | {"ceil": ceil, "n": n})


def test_logic_is_counted_as_hipress_counts_it():
    text = """name: x
about: something
params:
  bits: 2
encode:
  # a remark
  a: mean(g)  # another

  b: >-
    g * a
payload: {a: float32, b: "float32[n]"}
decode:
  out: b
update:
  s: a
feedback: error
"""
    assert logic_lines(text) == 6


def test_speeds_are_summed_up():
    rate = {"rate": 4.0, "spread": 0.0, "moved": 8.0, "share": 0.5}
    rows = [
        {"codec": name, "copy": 9.0, "rates": {"encode": rate, "decode": rate, "decode_add": rate},
         "torch": {"encode": t, "decode": 1.0}}
        for name, t in (("b", 1.0), ("a", 8.0))
    ]  # fmt: skip
    about = dict.fromkeys(("cpu", "date", "torch", "numpy"), "?")
    text = spec_table.speeds({"about": about | {"elements": 10, "repeat": 1}, "rows": rows})
    assert "| `a` | 4.0 | 8.00 | 0.5x | 4.0 | 1.00 | 4.0x | 4.0 | 50% |" in text
    assert "merge" not in text  # a column that is empty in all rows
    rows[1]["rates"] = rows[1]["rates"] | {"merge": rate}
    text = spec_table.speeds({"about": about | {"elements": 10, "repeat": 1}, "rows": rows})
    assert "| `b` | 4.0 | 1.00 | 4.0x | 4.0 | 1.00 | 4.0x | 4.0 | - | 50% |" in text
    assert "Encode is 2.2x as fast" in text
    assert "median of 2 methods; slower: `a` (0.50x)." in text
    assert "slower: none" in text
