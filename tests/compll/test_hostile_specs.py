"""Specs that would exhaust the compiler fail soon, with an error; places are exact in any text."""

import subprocess
import sys

import numpy as np
import pytest

import compll
from compll.backends.cpu import backend
from compll.frontend.source import LIMIT_BYTES
from compll.ir import static
from compll.numerics import bits
from compll.runtime.library import load
from tests.compll.wrong import problems

SPEC = """name: x
encode:
{lines}
payload:
  s: float32
  g: float32[n]
decode: g * s
"""


def chain(first, step, count, last):
    """Bindings each made from the one before, which is `A` in `step`."""
    lines = [f"  a0: {first}"]
    lines += [f"  a{i}: {step.replace('A', f'a{i - 1}')}" for i in range(1, count + 1)]
    return SPEC.format(lines="\n".join([*lines, f"  s: {last.replace('A', f'a{count}')}"]))


def bomb(levels):
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for i in range(1, levels):
        lines.append(f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    return "\n".join(lines)


HOSTILE = {
    "static doubling": (chain("n", "A + A", 60, "mean(g) if A > 0 else 2 * mean(g)"), "parts"),
    "scalar doubling": (chain("mean(g)", "A + A", 60, "A"), "parts"),
    "element doubling": (chain("g", "A * A", 60, "mean(A)"), "parts"),
    "giant integers": (chain("n", "A * A", 60, "mean(g) if A > 0 else 2 * mean(g)"), "parts"),
    "a long chain": (chain("mean(g)", "A + 1", 3000, "A"), "101 deep"),
    "alias bomb": (bomb(9), "values, aliases counted"),
}


@pytest.mark.parametrize("text, message", HOSTILE.values(), ids=HOSTILE)
def test_exhausting_specs_end_soon(text, message, tmp_path):
    found = problems(text, tmp_path)
    assert sum(message in d.message for d in found) == 1, [str(d) for d in found][:3]


def test_nesting_ends_no_process(tmp_path):
    """PyYAML's composer recurses in C; in a process of its own, which would end by SIGSEGV."""
    path = tmp_path / "spec.yaml"
    for text in ("name: " + "[" * 40_000 + "]" * 40_000, "- " * 40_000, "? " * 40_000):
        path.write_text(text)
        command = [sys.executable, "-c", "from compll.tools.cli import main; main()", "check", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done
        assert "nest" in done.stderr + done.stdout  # PyYAML 6.0.4 has a bound of its own


MANY = {
    "unknown sections": "".join(f"section{i}: 1\n" for i in range(3000)),
    "unknown names": "encode:\n" + "".join(f"  a{i}: zz{i} + 1\n" for i in range(3000)),
}


@pytest.mark.parametrize("text", MANY.values(), ids=MANY)
def test_reading_ends_after_many_mistakes(text, tmp_path):
    found = problems(text, tmp_path)
    assert len(found) == 101
    assert found[-1].message == "100 mistakes: reading ends here"


def test_a_file_has_a_limited_number_of_values(tmp_path):
    (found,) = problems("about: x\n" * 10_000, tmp_path)
    assert (found.span.line, found.message) == (4000, "more than 4000 values")


def test_control_characters_are_read_as_escapes(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.format(lines="  s: mean(g)") + 'about: "a\\e[2J\\u202Eb"\n')
    assert load(path).about == r"a\x1b[2J\u202eb"


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_the_deepest_allowed_expressions_compile(target, tmp_path):
    path = tmp_path / "spec.yaml"
    lines = ["  a0: g", *(f"  a{i}: a{i - 1} + 1" for i in range(1, 97))]
    decode = ["  b0: a96", *(f"  b{i}: b{i - 1} - 1" for i in range(1, 97))]
    path.write_text(
        "name: deepest\nencode:\n" + "\n".join(lines) + "\npayload:\n  a96: float32[n]\n"
        "decode:\n" + "\n".join(decode) + "\nfeedback: error\n"
    )
    if target == "cpu":  # its text only: LLVM is not tested here
        backend.source(compll.compile(path, "reference").module)
        return
    codec = compll.compile(path, target)
    x = np.arange(100, dtype=np.float32)
    assert np.allclose(codec.decode(codec.encode(x, state=codec.init_state(100)), 100), x, 1e-3)


@pytest.mark.parametrize(
    "value, line, col",
    [
        ("meen(g)", 3, 6),
        ("'meen(g)'", 3, 7),
        ("mean(g) +\n    meen(g)", 4, 5),
        ("|\n    mean(g) + (\n      meen(g))", 5, 7),
        (">-\n    mean(g)\n    + meen(g)", 5, 7),
        ('"mean(g)\n    + meen(g)"', 4, 7),
        ("mean(g)  + meen(g)", 3, 17),
    ],
)
def test_places_in_every_style_of_text(value, line, col, tmp_path):
    text = SPEC.format(lines=f"  s: {value}")
    (found,) = problems(text, tmp_path)
    assert "'meen'" in found.message
    assert (found.span.line, found.span.col) == (line, col)


def test_places_behind_letters_of_several_bytes(tmp_path):
    found = problems(SPEC.format(lines="  s: mean(é) + mean(h)"), tmp_path)
    assert [(d.span.line, d.span.col) for d in found] == [(3, 11), (3, 21)]


@pytest.mark.parametrize("key", ["default", "max"])
def test_numbers_too_large_for_a_float(key, tmp_path):
    path = tmp_path / "spec.yaml"
    given = {"default": "1", "max": "inf", key: "1" + "0" * 400}
    param = f"{{type: float, default: {given['default']}, max: {given['max']}}}"
    path.write_text(f"name: x\nparams: {{p: {param}}}\npayload: {{g: 'float32[n]'}}\ndecode: g\n")
    assert compll.compile(path, "reference").payload_bytes(2) == 8
    path.write_text(path.read_text().replace("max: " + given["max"], "max: 5"))
    with pytest.raises(compll.SpecError, match="from -inf to 5"):
        compll.compile(path, "reference", p=10**400)


@pytest.mark.parametrize("key", ["min", "max"])
@pytest.mark.parametrize("end", ["inf", "-inf", "nan", "1" + "0" * 400])
def test_bounds_that_no_default_is_within(key, end, tmp_path):
    """Each bound is reported; other errors of the spec may follow from another."""
    param = f"{{type: int, default: 2.5, {key}: {end}}}"
    found = problems(
        f"name: x\nparams: {{p: {param}}}\npayload: {{g: 'float32[n]'}}\ndecode: g + p\n", tmp_path
    )
    told = {f"{key!r} is a number"} if end == "nan" else set()
    assert {d.message for d in found} == {
        *told, "the default is not allowed: parameter 'p' is int, not 2.5"
    }  # fmt: skip


def scaled_by(number, folder):
    """A spec that multiplies by a number known before any data."""
    path = folder / "spec.yaml"
    path.write_text(
        f'name: x\nparams: {{p: 10}}\nencode: {{q: "g * ({number})"}}\n'
        "payload: {q: 'float32[n]'}\ndecode: q\n"
    )
    return path


@pytest.mark.parametrize(
    "number, value",
    [
        ("2 << ceil(nan)", 2), ("p >> 1", 5), ("floor(p) | 1", 11), ("int(n / 0) + 4", 4),
        ("min(floor(n / 0), 7)", 7), ("floor(n / 0) >> 50", 8), ("(n << 64) >> 51", 4),
        ("7.5 // 2", 3), ("1 // 0.1", 10), ("5.5 % -2", -0.5), ("7 // 0", 0), ("exp(log(n))", 3),
        ("log(-n) > 0", 0), ("isinf((-n) ** 400)", 0), ("isinf(10.0 ** 400 ** n)", 1),
    ],
)  # fmt: skip
def test_arithmetic_before_any_data(number, value, tmp_path):
    """The rules of the language hold: `//` is floor(a / b), integers stay at 2**53."""
    x = np.ones(3, np.float32)
    for target in ("reference", "cpu"):
        codec = compll.compile(scaled_by(number, tmp_path), target)
        assert codec.decode(codec.encode(x), 3).tolist() == [value] * 3


@pytest.mark.parametrize(
    "number", ["1 << 64", "(1 << 60) >> 58", "p * 2 ** 3 * 9007199254740993", "floor(1 / 0)",
               "(p << 30) * (p << 30)", "round(-inf) & 7"],
)  # fmt: skip
def test_whole_numbers_that_are_not_exact_are_refused(number, tmp_path):
    with pytest.raises(compll.SpecError, match=r"spec.yaml:3:\d+: .*below 2\*\*53"):
        compll.compile(scaled_by(number, tmp_path), "reference")


def test_exp_log_and_powers_before_any_data_are_those_of_elements(tmp_path):
    """Not those of the C library, which differ from machine to machine."""
    codec = compll.compile(scaled_by("0.7 ** (n + 0.3)", tmp_path), "reference")
    for n in range(1, 60):
        exact = float(bits.power(np.float64(0.7), np.float64(n + 0.3)))
        assert codec.decode(codec.encode(np.ones(n, np.float32)), n)[0] == np.float32(exact)
    assert static.evaluate(codec.module.fields[0].expr.args[1].args[0], {"n": 3}) == float(
        bits.power(np.float64(0.7), np.float64(3.3))
    )


def test_long_chains_before_any_data(tmp_path):
    deep = "t + n"
    for _ in range(16):
        deep = f"sqrt({deep})"
    path = scaled_by("chain", tmp_path)
    chain = f'encode: {{chain: "iterate(t, 1.0, {deep}, 32, 32)", '
    path.write_text(path.read_text().replace("encode: {", chain))
    codec = compll.compile(path, "reference")
    assert str(codec.module.fields[0].expr).count("sqrt") == 16 * 32
    assert np.isfinite(codec.decode(codec.encode(np.ones(3, np.float32)), 3)).all()


def test_decode_without_an_expression(tmp_path):
    (found,) = problems("name: x\npayload: {g: 'float32[n]'}\ndecode: {}\n", tmp_path)
    assert found.message == "an expression is missing here"
    assert found.span.line == 3


@pytest.mark.parametrize(
    "name",
    [
        "a\0b",
        "a\0b.yaml",
        "x" * 5000 + ".yaml",
        "/dev/zero",
        "/dev/null",
        "onebitt",
        ".",
        "nowhere/x.yaml",
    ],
)
def test_files_that_are_no_specs(name):
    with pytest.raises(compll.SpecError):
        compll.compile(name, "reference")


def test_a_file_that_is_too_long(tmp_path):
    (found,) = problems("#" * (LIMIT_BYTES + 5), tmp_path)
    assert "too long" in found.message
