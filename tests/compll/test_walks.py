"""Walks over memory, and bytes that they move, of every kernel of every spec, as recorded.

This net catches a lost fusion. After a change that moves less, or one that must move more,
`pytest --update-golden` on this file records them again.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from compll.ir.tile import (
    GRADIENT,
    SEARCHES,
    Array,
    Call,
    Kernel,
    Store,
    Value,
    View,
    Walk,
    flat,
    order_inside,
    text,
)
from compll.passes import fusion, lower
from compll.runtime.library import type_check
from tests.compll.conftest import CASES, label

GOLDEN = Path(__file__).parent / "golden" / "walks.json"
#: values of lanes that a walk reads from memory
READS = ("load", "unpack", "spread")


def moved(kernel: Kernel) -> list[float]:
    """The number of walks, and the bytes per element that they read and write; for elements of a
    selection or a matrix as if these had all of the gradient's."""
    total = 0.0
    for walk in kernel.walks:
        parts = [array for one in walk.compacts for array, _ in one.parts]
        writes = [bytes_of(s.array) for s in walk.stores if s.value.level == "element"]
        total += read(walk.values) + sum(writes) + sum(map(bytes_of, parts))
    for call in searches(kernel):
        keys = call.made[:1] if call.routine == "kth_largest" else ()
        total += read(order_inside([call.views[0].value])) + sum(map(bytes_of, keys))
    return [len(kernel.walks) + len(searches(kernel)), round(total, 4)]


def searches(kernel: Kernel) -> list[Call]:
    """Calls that walk over elements themselves."""
    return [s for s in flat(kernel.steps) if isinstance(s, Call) and s.routine in SEARCHES]


def read(values: Iterable[Value]) -> float:
    """Bytes that lanes read of each array, once."""
    lanes = (v for v in values if v.op in READS and v.level == "element")
    return sum(bytes_of(array) for _, array in {(v.op, v.attr) for v in lanes})


def bytes_of(array: Array) -> float:
    """Bytes of an element."""
    return array.storage.bits / 8


def found(case) -> dict[str, list[float]]:
    kernels = lower.kernels(type_check(*case)[0])
    return {kernel.name: moved(kernel) for part in kernels.values() for kernel in part}


@pytest.fixture(scope="module")
def golden(request):
    if request.config.getoption("--update-golden"):
        rows = [f"{json.dumps(label(case))}: {json.dumps(found(case))}" for case in CASES]
        GOLDEN.write_text("{\n " + ",\n ".join(rows) + "\n}\n")
    return json.loads(GOLDEN.read_text())


def test_no_kernel_walks_more_often_or_moves_more_bytes(golden):
    assert sorted(golden) == sorted(map(label, CASES))
    for case in CASES:
        now, before = found(case), golden[label(case)]
        assert now.keys() == before.keys(), label(case)
        for name in now:
            assert all(a <= b for a, b in zip(now[name], before[name], strict=True)), (case, name)


def test_what_is_counted(golden):
    """A walk reads gradient and residual, and writes both with an eighth of a byte of signs."""
    assert golden["onebit_group"]["encode_feed"] == [1, 16.125]


def test_a_walk_computes_the_short_product_that_it_alone_reads():
    """The product of PowerSGD's factors, in the decode of its rounds, too."""
    parts = lower.kernels(type_check("powersgd", {})[0])
    kernels = {kernel.name: kernel for part in parts.values() for kernel in part}
    for name in ("rounds", "rounds_feed", "encode_feed", "decode_set", "decode_add"):
        kernel = kernels[name]
        (product,) = [walk.product for walk in kernel.walks if walk.product is not None]
        assert product not in kernel.steps
        assert product in flat(kernel.steps)
        assert not set(product.made) & set(kernel.scratch)
        assert f"\n    {product.made[0].name} = product 1, " in text(kernel)


@pytest.mark.parametrize("overwritten", [True, False])
def test_a_product_is_not_computed_after_its_input_has_changed(overwritten):
    state, made, other = Array("s", "state"), Array("a0", "scratch"), Array("s1", "state")
    given, product, g = (
        Value("load", (), "f32", "element", array) for array in (state, made, GRADIENT)
    )
    call = Call("product", (View(given), View(given)), (made,), attr=1)
    between = Walk([Store(state if overwritten else other, g)])
    kernel = Kernel("decode", "set", type_check("powersgd", {})[0], 1024, scratch=[made])
    kernel.steps = [call, between, Walk([Store(GRADIENT, product)])]
    fusion.inline(kernel)
    assert (call in kernel.steps) == (made in kernel.scratch) == overwritten
