"""Facts about a spec that need no run: its length, payload, passes and traffic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from compll.frontend.source import LIMIT_BYTES
from compll.ir import layout
from compll.ir.expr import Printer
from compll.ir.layout import header, tile_of
from compll.ir.module import Field, Module
from compll.ir.storage import HUFFMAN_TILE
from compll.runtime import library
from compll.tools import explain
from compll.tools.explain import factors

#: sections that hold no algorithm
PLAIN = {"name", "about", "source", "params", "group", "state", "feedback", "merge"}
#: lines of algorithm logic and of its functions that HiPress (SOSP'21) publishes, by our name
HIPRESS = {
    "onebit": ("onebit", 21, 9), "mxnet_2bit": ("TBQ", 13, 18),
    "terngrad_uniform": ("TernGrad", 23, 7), "dgc": ("DGC", 29, 15),
    "graddrop": ("GradDrop", 29, 21),
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """A spec, compiled with its defaults. moved, least: bytes per element of encode."""

    name: str
    lines: int
    payload: str
    limits: tuple[str, ...]
    bits: float
    walks: int
    walks_least: int
    moved: float
    least: float
    states: tuple[str, ...]


def facts(name: str) -> Facts:
    """All facts that follow from one spec."""
    codec = library.compile(name, "reference")
    module = codec.module
    traffic = explain.encode_traffic(module)
    return Facts(
        name=name,
        lines=logic_lines(library.locate(name).read_text("utf-8")[:LIMIT_BYTES]),
        payload=formula(module),
        limits=limits(module),
        bits=codec.payload_bytes(1 << 24) * 8 / (1 << 24),
        walks=len(traffic.walks),
        walks_least=traffic.chain,
        moved=traffic.moved,
        least=traffic.least,
        states=tuple(s.name for s in module.states),
    )


def logic_lines(text: str) -> int:
    """Lines of encode, payload, decode and update with content, as HiPress counts logic.

    Blank lines, comments and a section's bare name do not count.
    """
    count, section = 0, ""
    for line in text.splitlines():
        head = re.match(r"(\w+):(.*)", line)
        section = head[1] if head else section
        said = (head[2] if head else line).split(" #")[0].strip()
        count += bool(said) and not said.startswith("#") and section not in PLAIN
    return count


def formula(module: Module) -> str:
    """Bytes of the payload, from its layout, in the syntax of Python; `gaps` of a few elements.

    For a selection `kept`, count(kept) is its size, and gaps(kept) the bytes beyond the first that
    gaps above 127 take.
    """
    factors: dict[str, int] = {}
    for field in module.fields:
        for base, factor in sized(field, module):
            factors[base] = factors.get(base, 0) + factor
    counted, gaps = header(module)
    fixed = factors.pop("", 0) + 4 * (len(counted) + len(gaps)) + module.status
    terms = [base if factor == 1 else f"{factor} * {base}" for base, factor in factors.items()]
    return " + ".join([*terms, *([str(fixed)] if fixed else [])])


def sized(field: Field, module: Module) -> Iterator[tuple[str, int]]:
    """The terms of a field's size: the factor that is counted, and the bytes of each."""
    if field.shape == "matrix" and field.item_bits < 8:
        yield f"ceil({factors(field.dims)} / {8 // field.item_bits})", 1
        return
    if field.shape == "matrix":
        yield factors(field.dims), field.item_bits // 8
        return
    count = {
        "scalar": "", "table": "", "n": "n",
        "group": f"ceil(n / {module.group})", "kept": f"count({field.of})",
    }[field.shape]  # fmt: skip
    if field.storage == "golomb":
        yield f"{field.storage}({field.of})", 1
    elif field.storage == "gaps":
        yield count, 1
        yield f"gaps({field.of})", 1
    elif field.shape == "table":
        yield "", 4 * int(field.of)
    elif field.layout.trits:
        tile = tile_of(module)
        yield f"floor(n / {tile})", field.layout.tile_bytes(tile)
        yield f"ceil(n % {tile} / 5)", 1
    elif field.storage == "huffman":
        tiles = f"ceil(n / {HUFFMAN_TILE})"
        yield tiles, 2
        yield f"floor(({field.bits} * n + 7 * {tiles}) / 8)", 1
        yield "", (1 << field.bits) // 2
    elif field.item_bits < 8:
        yield f"ceil({count} / {8 // field.item_bits})", 1
    else:
        yield count, field.item_bits // 8


def limits(module: Module) -> tuple[str, ...]:
    """The largest number of elements of each selection."""
    text = Printer(module.bindings)
    together = [name for family in layout.families(module) for name in family]
    shared = [" + ".join(f"count({x})" for x in f) + " <= n" for f in layout.families(module)]
    alone = [s for s in module.selections if s.name not in together]
    return (
        *(f"count({s.name}) <= {bare(text(s.limit))}" for s in alone),
        *shared,
    )


def bare(text: str) -> str:
    """An expression as printed, without parentheses around the whole of it."""
    return text[1:-1] if text.startswith("(") else text
