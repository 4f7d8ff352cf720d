"""Parts of a payload: their types, and their sizes as formulas of n."""

from __future__ import annotations

from dataclasses import dataclass

from compll.ir.expr import FACTOR, Expr, formula
from compll.ir.layout import header, tile_of
from compll.ir.module import Field, Module


@dataclass(frozen=True)
class PayloadSlot:
    """A payload field and its size as a formula."""

    name: str
    type: str
    size: str


def places(module: Module) -> list[PayloadSlot]:
    """The payload's parts in order."""
    found = [
        PayloadSlot(f"count of {s.name}", "uint32", "4") for s in module.selections if s.dynamic
    ]
    found += [PayloadSlot(f"length of {name}", "uint32", "4") for name in header(module)[1]]
    found += [PayloadSlot(f.name, _type(f), _size(f, module)) for f in module.fields]
    if module.status:
        found.append(PayloadSlot("status", "uint8", "1"))
    return found


def _type(f: Field) -> str:
    base = f"uint{f.bits}" if f.storage in ("uint", "byte") else f.storage
    base += f"[{f.bits}]" if f.storage == "huffman" else ""
    if f.shape == "matrix":
        return base + f"[{', '.join(map(formula, f.dims))}]"
    return base + {"n": "[n]", "group": "[groups]", "kept": f"[{f.of}]", "table": f"[{f.of}]"}.get(
        f.shape, ""
    )


def factors(dims: tuple[Expr, ...]) -> str:
    """Rows times columns."""
    return " * ".join(formula(d, FACTOR) for d in dims)


def _size(f: Field, module: Module) -> str:
    if f.shape in ("scalar", "table"):
        return str(f.item_bits // 8 * int(f.of or 1))
    counts = {
        "n": "n", "group": f"ceil(n / {module.group})", "kept": f"count({f.of})",
        "matrix": factors(f.dims),
    }  # fmt: skip
    return f.layout.formula(counts[f.shape], tile_of(module))
