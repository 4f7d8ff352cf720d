"""docs/compressors.md lists the specs as they are, and its formulas are the layouts'."""

import shutil
from math import ceil, floor, sqrt
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import compll
from bench import spec_table
from bench.spec_facts import HIPRESS, facts, logic_lines
from compll.ir import exclusive
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
    found = exclusive.longest(codec.module, most, lambda sizes: longest(known, n, sizes, among))
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


@pytest.mark.parametrize("name", HIPRESS)
def test_specs_take_at_most_half_the_lines_of_hipress(name):
    _, logic, functions = HIPRESS[name]
    assert 2 * facts(name).lines <= logic + functions


def test_the_docs_are_current():
    text = spec_table.DOCS.read_text("utf-8")
    for name in SPECS:
        assert f"| `{name}` |" in text, "run python -m bench.spec_table"
    assert spec_table.compressors_page(text) == text, "run python -m bench.spec_table"


def test_hipress_ships_the_evidence_that_was_measured():
    text = spec_table.EVIDENCE.read_text("utf-8")
    assert spec_table.evidence(text) == text, "run python -m bench.spec_table"


def test_readme_shows_the_losses_that_were_measured():
    text = spec_table.README.read_text("utf-8")
    assert spec_table.readme(text) == text, "run python -m bench.spec_table"


def test_check_finds_what_is_out_of_date(tmp_path, monkeypatch):
    for name in ("DOCS", "README", "EVIDENCE"):
        path = shutil.copy(getattr(spec_table, name), tmp_path)
        monkeypatch.setattr(spec_table, name, Path(path))
    path, text = spec_table.DOCS, spec_table.DOCS.read_text("utf-8")
    path.write_text(text.replace("`ceil(n / 8) + 4`", "`ceil(n / 8) + 5`"), "utf-8")
    app = spec_table.typer.Typer()
    app.command()(spec_table.main)
    assert CliRunner().invoke(app, ["--check"]).exit_code == 1
    assert CliRunner().invoke(app, []).exit_code == 0
    assert path.read_text("utf-8") == text
    assert CliRunner().invoke(app, ["--check"]).exit_code == 0


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


def test_a_text_without_marks_is_refused():
    with pytest.raises(ValueError, match="no <!-- SPECS -->"):
        spec_table.fill("nothing", {"SPECS": "x"})
