"""Fields of several selections: every backend writes and reads them in the payload's order."""

import pytest

from tests.compll.cuda_host.pieces import pieces_equal
from tests.tiers import first_fast

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


@pytest.mark.parametrize("on", first_fast(["cuda", "cpu"]))
@pytest.mark.parametrize(
    "order, large, group",
    first_fast([(ORDERS[1], "top", ""), (ORDERS[0], "filter", "group: 32"),
                (ORDERS[2], "filter", "group: 32"), (ORDERS[2], "top", "")]),
)  # fmt: skip
def test_fields_stand_as_the_payload_orders_them(order, large, group, on, tmp_path, rng):
    text = spec(order, large, group, "j, w" if "j" in order[:2] else "i, v")
    pieces_equal(text, tmp_path, rng.standard_normal, on=[on])
