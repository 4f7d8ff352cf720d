"""Routines: all printers write the same functions, and refuse what the language lacks."""

import ctypes
import subprocess

import numpy as np
import pytest

from compll.backends.cpu.instructions import function
from compll.backends.cuda.instructions import routine as in_cuda
from compll.backends.reference.routines import function as in_python
from compll.errors import UsageError
from compll.ir.storage import rice_parameter
from compll.routines import huffman, language, streams
from compll.routines.language import I32, I64, routine
from tests.compll.routines import ADDRESS, WORD, Library

TYPES = """typedef long long i64; typedef unsigned long long u64; typedef int i32;
#define D extern "C"
"""


@routine
def mixed(numbers: I32, count: int, out: I64) -> int:
    total, odd = 0, False
    for i in range(0, count, 2):
        odd = odd ^ (numbers[i] & 1 == 1)
        if odd:
            total += numbers[i]
        else:
            total -= 1
        for k in (0, 1):
            out[i + k] = total * 3 + k
    while total > 100:
        total >>= 1
    return total


@routine
def shadowed(count: int) -> int:
    i = total = 7
    total += i
    for i in range(count):
        total += i
    return total


@routine
def turns(numbers: I32, count: int) -> int:
    total = 0
    for step in (1, 2):
        for i in range(0, count, step):
            pair = i, i + 1
            for k in (0, step):
                total += numbers[pair[0]] * k
    return total


@routine
def joined(a: int, b: int) -> int:
    total = 0
    if a > 1 and b > 1:
        total = 1
    return total


@routine
def ending(count: int) -> int:
    total = 0
    for i in range(count):
        total += i
    else:
        total = -1
    return total


@routine
def chosen(first: I64, other: I64, count: int) -> int:
    array = first
    if count > 1:
        array = other
    return array[0]


@routine
def early(count: int) -> int:
    if count > 1:
        return 1
    return 0


def expected(numbers):
    total, odd, out = 0, False, []
    for x in numbers[::2].tolist():
        odd ^= x % 2 == 1
        total += x if odd else -1
        out += [total * 3, total * 3 + 1]
    while total > 100:
        total >>= 1
    return total, out


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Functions of all printers, by name; for C, an array is the address of its elements."""
    routines = {
        "mixed": mixed, "shadowed": shadowed, "turns": turns,
        "rice_parameter": streams.rice_parameter, "join": huffman.join,
    }  # fmt: skip
    kinds = {
        "mixed": [ADDRESS, WORD, ADDRESS], "shadowed": [WORD], "turns": [ADDRESS, WORD],
        "rice_parameter": [WORD, WORD], "join": [ADDRESS, ADDRESS, WORD],
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("routines")
    (folder / "all.cpp").write_text(TYPES + "".join(map(in_cuda, routines.values())))
    files = str(folder / "all.cpp"), "-o", str(folder / "all.so")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", *files], check=True)
    other = ctypes.CDLL(str(folder / "all.so"))
    for name, of in kinds.items():
        getattr(other, name).argtypes = of
        getattr(other, name).restype = WORD
    first = Library("routines", {n: function(r) for n, r in routines.items()}, kinds)

    def called(name):
        of = in_python(routines[name])

        def call(*args):
            given = [(memoryview(a).cast("B"), 0) if hasattr(a, "dtype") else (a,) for a in args]
            return of(*(x for each in given for x in each))

        return call

    def addressed(of):
        return lambda *args: of(*(getattr(a, "ctypes", a) for a in args))

    return {
        "cpu": lambda n: addressed(first.functions[n]),
        "cuda": lambda n: addressed(getattr(other, n)), "python": called,
    }  # fmt: skip


@pytest.mark.parametrize("printer", ["cpu", "cuda", "python"])
def test_statements(printed, printer):
    numbers = np.random.default_rng(0).integers(-50, 90, 40, dtype=np.int32)
    out = np.zeros(40, np.int64)
    total = printed[printer]("mixed")(numbers, 40, out)
    assert (total, out.tolist()) == expected(numbers)


@pytest.mark.parametrize("printer", ["cpu", "cuda", "python"])
def test_names(printed, printer):
    assert printed[printer]("shadowed")(5) == 7 + 7 + 10


@pytest.mark.parametrize("printer", ["cpu", "cuda", "python"])
def test_names_of_a_loop_end_with_it(printed, printer):
    """A second turn binds them anew."""
    numbers = np.arange(6, dtype=np.int32)
    assert printed[printer]("turns")(numbers, 6) == 15 + 2 * 6


@pytest.mark.parametrize("printer", ["cpu", "cuda", "python"])
def test_rice_parameter(printed, printer):
    given = [(count, n) for n in (1, 2, 5, 1000, 10**9) for count in (0, 1, 2, n // 3, n)]
    found = [printed[printer]("rice_parameter")(*each) for each in given]
    assert found == [rice_parameter(*each) for each in given]


@pytest.mark.parametrize("printer", ["cpu", "cuda", "python"])
@pytest.mark.parametrize("weights, depths", [
    ([], []), ([7], [0]), ([1, 1], [1, 1]), ([1, 1, 2, 4], [3, 3, 2, 1]), ([5] * 4, [2] * 4),
])  # fmt: skip
def test_tree(printed, printer, weights, depths):
    tree, parents = np.full(34, -1, np.int64), np.zeros(34, np.int32)
    tree[1 : 1 + len(weights)] = weights
    printed[printer]("join")(tree[1:], parents, len(weights))
    assert tree[1 : 1 + len(depths)].tolist() == depths
    assert tree[0] == -1  # also without weights


def test_a_return_inside_a_branch_is_refused():
    with pytest.raises(TypeError, match="no such statement: return 1"):
        in_cuda(early)


def test_a_loop_has_no_else():
    with pytest.raises(TypeError, match="no such statement: for i in range"):
        in_cuda(ending)


def test_a_branch_binds_no_other_array():
    with pytest.raises(TypeError, match="array is no variable: a branch or a loop cannot"):
        in_cuda(chosen)


def test_conditions_are_not_joined_by_words():
    with pytest.raises(TypeError, match="known in the kernel only"):
        in_cuda(joined)


def test_a_missing_source_is_told(monkeypatch):
    def missing(of):
        raise OSError("could not get source code")

    lost = language.Routine(early.of, inline=False)
    monkeypatch.setattr(language.inspect, "getsource", missing)
    with pytest.raises(UsageError, match="early is read from its source"):
        in_cuda(lost)


def test_a_variable_keeps_its_kind():
    @routine
    def changing(count: int) -> int:
        count = count > 1
        return 1 - count

    with pytest.raises(TypeError, match="count is i64, not bool"):
        in_cuda(changing)
