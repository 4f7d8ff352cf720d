"""Fields of several selections: every backend writes and reads them in the payload's order."""

import numpy as np
import pytest

import compll
from compll.runtime.batches import Encoding
from compll.runtime.library import type_check
from tests.compll.test_cuda import kernels

SPEC = """
name: ordered
GROUP
state: {r: "float32[n]"}
encode:
  acc: r + g
  large: LARGE
  small: filter(abs(acc) < 0.25)
  i: indices(large)
  j: indices(small)
  v: acc[large]
  w: acc[small]
  s: where(acc > 0, 1, 0)[small]
  b: where(acc > 0.125, 1, 0)
payload: {FIELDS}
decode: scatter(DECODED)
update: {r: "where(large, 0, acc)"}
"""
FIELDS = {
    "i": "gaps[large]",
    "j": "golomb[small]",
    "v": "float32[large]",
    "w": "float16[small]",
    "s": "uint1[small]",
    "b": "uint1[n]",
}
ORDERS = [tuple(FIELDS), tuple(FIELDS)[::-1], ("v", "b", "j", "i", "s", "w")]
LARGE = {"filter": "filter(abs(acc) > 1.5)", "top": "top(abs(acc), ceil(n / 10))"}


def spec(order, large, group="", decoded="i, v"):
    fields = ", ".join(f"{name}: '{FIELDS[name]}'" for name in order)
    text = SPEC.replace("FIELDS", fields).replace("LARGE", LARGE[large])
    return text.replace("GROUP", group).replace("DECODED", decoded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "order, large, group",
    [
        (ORDERS[0], "filter", "group: 32"),
        (ORDERS[1], "top", ""),
        (ORDERS[2], "filter", "group: 32"),
    ],
    ids=["as selected", "reversed", "in turns"],
)
def test_fields_stand_as_the_payload_orders_them(order, large, group, tmp_path):
    path = tmp_path / "ordered.yaml"
    path.write_text(spec(order, large, group, "j, w" if "j" in order[:2] else "i, v"))
    cpu, reference = (compll.compile(path, target) for target in ("cpu", "reference"))
    for n in (1, 40, 3000):
        states = [codec.init_state(n) for codec in (cpu, reference)]
        for step in range(2):
            x = np.random.default_rng((n, step)).standard_normal(n).astype(np.float32)
            one, two = (
                codec.encode(x, state=state, step=step)
                for codec, state in zip((cpu, reference), states, strict=True)
            )
            assert np.array_equal(one, two)
            assert np.array_equal(cpu.decode(one, n), reference.decode(two, n))
            assert np.array_equal(states[0]["r"], states[1]["r"])


@pytest.mark.parametrize("order", ORDERS[1:], ids="-".join)
def test_cuda_puts_them_there_too(order, tmp_path):
    path = tmp_path / "ordered.yaml"
    path.write_text(spec(order, "top"))
    reference = compll.compile(path, "reference")
    device = kernels(type_check(path, {}))
    n = 3000
    x = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    state, expected = reference.init_state(n), np.zeros(reference.payload_bytes(n), np.uint8)
    held = {name: one.copy() for name, one in state.items()}
    out, table, at = expected.copy(), np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    used = device.encode_batch(x.copy(), table, out, at, held, Encoding())
    wants = reference.encode_batch(x, table, expected, at, state=state)
    assert used.tolist() == wants.tolist()
    assert np.array_equal(out[: used[0]], expected[: used[0]])
