"""The element by element steps of a spec that is computed an array at a time, as tile programs.

Such a spec (see [Note: arrays] in array_runs.py) is a few operators over whole arrays, and between
them expressions of single elements. Each of those, up to the next array, becomes a kernel of one
walk; so do the sums and extremes of such expressions, and what is stored as codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from compll.ir.expr import Expr, Type, walk
from compll.ir.layout import tile_of
from compll.ir.module import Field, Module
from compll.ir.tile import Kernel, Store, Value, Walk
from compll.passes.array_steps import arrays, elementwise, last_product, leaves, outcomes, taken
from compll.passes.values import FOLDS, Values

STORAGES = {"float": "float32", "int": "int32", "bool": "int32"}


@dataclass(frozen=True)
class Step:
    """A kernel, and the arrays that it reads besides the gradient and the residual."""

    kernel: Kernel
    leaves: tuple[Expr, ...]
    #: of what it makes; float64 is one number
    storage: str
    #: whether it reads the residual
    residual: bool

    @property
    def needs(self) -> list[Expr]:
        """What is computed before it."""
        return [e for e in (*self.leaves, *self.kernel.statics) if e.type.shape != "static"]


class Elements(Values):
    """Expressions up to the next array: that, and every number, is given to the kernel."""

    def __init__(self, module: Module, kernel: Kernel, *, feed: bool) -> None:
        super().__init__(module, kernel)
        self.feed = feed
        self.leaves: list[Expr] = []
        if feed:
            kernel.states.append(self.states["residual"])

    def of(self, expr: Expr) -> Value:
        for e in walk(expr, into=lambda e: elementwise(e) and id(e) not in self.done):
            if id(e) not in self.done:
                self.done[id(e)] = self.one(e) if elementwise(e) else self.given(e)
        return self.done[id(expr)]

    def given(self, e: Expr) -> Value:
        """The input, an array or a number."""
        if e.op == "input" and e.value == "g":
            return self.op_input(e, "f32", "lane")
        return self.array(e) if e.type.shape == "n" else self.static(e)

    def op_input(self, e: Expr, kind: str, level: str) -> Value:
        g = super().op_input(e, kind, level)
        return self.fed(g) if self.feed else g

    def array(self, e: Expr) -> Value:
        """An array that the kernel is given."""
        f = Field(f"x{len(self.leaves)}", STORAGES[e.type.dtype], 0, "n")
        self.leaves.append(e)
        self.kernel.states.append(f)
        if e.type.dtype != "bool":
            return self.make("load", (), "i32" if e.type.dtype == "int" else "f32", "lane", f)
        whole = self.make("load", (), "i32", "lane", f)
        return self.make("ne", [whole, self.make("const", (), "i32", "piece", 0)], "bool", "lane")


def step(module: Module, root: Expr, name: str, *, feed: bool, field: Field | None = None) -> Step:
    """The step that computes `root`: as codes where they are stored in a field.

    feed: whether the input has a residual.
    """
    storage = field.storage if field is not None else STORAGES[root.type.dtype]
    bits = field.bits if field is not None else 0
    total = root.op in FOLDS and root.type.shape == "scalar"
    out = Field("out", "float64" if total else storage, bits, "scalar" if total else "n")
    alone = replace(module, fields=(out,), states=(), selections=(), status=False)
    kernel = Kernel(name, alone, tile_of(module))
    values = Elements(module, kernel, feed=feed)
    if total:
        fold = values.make("fold", [values.of(root.args[0])], "f32", "tile", FOLDS[root.op])
        value = values.make("total", [fold], "f64", "piece", FOLDS[root.op])
        kernel.steps += [Walk(folds=[fold]), Store("payload", out, value)]
    else:
        value = values.of(root)
        if field is not None:
            value = values.make("code", [value], "i32", "lane", field.most.bit_length())
        elif value.kind == "bool":
            value = values.make("convert", [value], "i32", "lane")
        kernel.steps.append(Walk([Store("payload", out, values.lanes(value))]))
    return Step(kernel, tuple(values.leaves), out.storage, feed)


def kept(module: Module) -> Step:
    """The step that keeps the input in the residual, less what is decoded, if that is an array."""
    alone = replace(module, fields=(), states=(), selections=(), status=False)
    kernel = Kernel("kept", alone, tile_of(module))
    values = Elements(module, kernel, feed=True)
    rest, stores = values.of(gradient(module)), []
    if module.decode.op != "scatter":
        value = values.array(module.decode)
        rest = values.make("sub", [rest, value], "f32", "lane")
        stores = [Store("gradient", None, value, back=True)]
    kernel.steps.append(Walk([Store("state", values.states["residual"], rest), *stores]))
    return Step(kernel, tuple(values.leaves), "float32", True)


def gradient(module: Module) -> Expr:
    """The input of an encode."""
    return module.pool.make("input", (), Type("float", "n"), "g")


def roots(module: Module) -> Iterator[tuple[Expr, Field | None]]:
    """What becomes a step: codes of fields, arrays that others are made of, sums and extremes."""
    wanted = outcomes(module)
    coded = [f for f in module.fields if f.most and f.shape == "n" and f.expr is not None]
    codes = {id(f.expr) for f in coded}
    needed = {id(e) for e in taken(*wanted)} | {id(module.decode)}
    yield from ((f.expr, f) for f in coded if f.expr is not None)
    yield from ((e, None) for e in arrays(*wanted) if id(e) not in codes or id(e) in needed)
    yield from ((e, None) for e in walk(*wanted) if e.op in FOLDS and e.args[0].type.shape == "n")


def kernels(module: Module) -> list[Kernel]:
    """All of its steps' kernels."""
    return [s.kernel for part in parts(module).values() for s in part.values()]


def parts(module: Module) -> dict[str, dict[int | str, Step]]:
    """A module's steps, by what is compiled together, then by field or expression.

    free: those that do not read the input; plain, fed: those that do, without and with a residual.
    Of feedback besides: "input", the input as an array; "kept", which keeps the input in the
    residual, or what a decoded array leaves of it.
    """
    found: dict[str, dict[int | str, Step]] = {"free": {}, "plain": {}, "fed": {}, "input": {}}
    for number, (root, field) in enumerate(roots(module)):
        key = id(root) if field is None else field.name
        reads = any(e.op == "input" for e in (*leaves(root), root))
        for kind in ("plain", "fed")[: 1 + module.feedback] if reads else ("free",):
            name = f"{kind}{number}"
            found[kind][key] = step(module, root, name, feed=kind == "fed", field=field)
    if module.feedback:
        found["input"]["input"] = step(module, gradient(module), "input", feed=True)
        if last_product(module) is None:
            found["fed"]["kept"] = kept(module)
    return found
