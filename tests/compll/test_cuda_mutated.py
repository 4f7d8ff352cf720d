"""Array specs with some operators and names exchanged: results as by the reference."""

import random
import re
from pathlib import Path

import pytest

import compll
from compll.backends.cuda import source as cuda_source
from compll.errors import SpecError, UsageError
from compll.runtime.library import type_check
from tests.compll import test_cuda_arrays as arrays
from tests.compll.cuda_host.pieces import pieces_equal
from tests.tiers import first_fast

SPECS = Path(compll.__file__).parents[1] / "specs"
TEXTS = [(SPECS / f"{name}.yaml").read_text() for name in ("randomk", "powersgd", "thc")]
TEXTS += [arrays.DRAWN, arrays.SMALL, arrays.WIDE, arrays.BASES, arrays.MIXED, arrays.DRAWS]
OTHERS = (
    "abs", "sum", "max", "min", "mean", "norm2", "sqrt", "floor", "sign", "transpose", "flat",
    "orthonormal", "float16", "exp", "round", "g", "n", "1", "0.5", "step", "-1", "random(0, 1)",
    "shared(0, 1)", "m @ transpose(m)", "sum(g)", "where(g > 0, g, 0)", "float32", "bfloat16",
    "uint2", "uint8", "own", "error", "none",
)  # fmt: skip


def mutated(source):
    """A text with one to three of its tokens replaced."""
    text = source.choice(TEXTS)
    for _ in range(source.choice([1, 1, 2, 3])):
        tokens = list(re.finditer(r"[A-Za-z_]\w*|\d+\.?\d*|[-+*/@<>]", text))
        old = source.choice(tokens)
        other = source.choice(tokens).group() if source.random() < 0.5 else source.choice(OTHERS)
        text = text[: old.start()] + other + text[old.end() :]
    return text


def typed(text, folder):
    """The module of a text that mixes elements and compiles; otherwise None."""
    path = folder / "spec.yaml"
    path.write_text(text)
    try:
        module, _ = type_check(path, {})
        cuda_source.source(module, 64)
    except SpecError:
        return None
    return module if module.decoded is None else None


@pytest.mark.parametrize("seed", first_fast(range(8)))
def test_mutated_specs(seed, tmp_path, rng):
    source, done = random.Random(seed), 0
    while done < 3:
        text = mutated(source)
        if typed(text, tmp_path) is None:
            continue
        done += 1
        try:
            pieces_equal(
                text, tmp_path, rng.standard_normal, lengths=(100, 0, 1, 1100), writeback=True
            )
        except UsageError:
            continue  # a matrix without room, say
        except AssertionError as error:
            raise AssertionError(f"{text}\n{error}") from error
