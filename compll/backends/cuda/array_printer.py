"""Arrays of a piece as launches: steps over their elements are walks, and what mixes elements are
routines (array_routines.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from compll.backends.cuda import array_routines as routines
from compll.backends.cuda import programs, spectra
from compll.backends.cuda.array_values import ArrayValues, element
from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import Domain, domain_of
from compll.backends.cuda.lane_arrays import own_name
from compll.backends.cuda.printer import Printer
from compll.backends.cuda.views import View
from compll.backends.cuda.walk_kernel import Region
from compll.ir.expr import Expr, Type, walk
from compll.ir.matrices import short
from compll.ir.module import WHOLE, Field
from compll.ir.program import Unsupported
from compll.ir.tile import SCRATCH, Kernel, Store, Value, Walk
from compll.passes.element_steps import gradient


@dataclass(frozen=True)
class Source:
    """Where a payload field is read, as text. mean: whether there is a sum over `workers`."""

    pointer: Callable[[Body], str]
    mean: bool = False


class ArrayPrinter:
    """Makes arrays when they are asked for. fed: whether states are at hand.

    fields, sums: where operators `field` and `combined` are read; alone: whether this rank combines
    with itself, so that what is combined is read back from its own payload.
    """

    def __init__(
        self, printer: Printer, kernel: Kernel, *, fed: bool, alone: bool,
        fields: dict[str, Source], sums: dict[str, Source],
    ) -> None:  # fmt: skip
        self.printer, self.plan, self.kernel = printer, printer.plan, kernel
        self.module = kernel.module
        self.fed, self.alone, self.fields, self.sums = fed, alone, fields, sums
        self.values = ArrayValues(self, kernel)
        self.views: dict[int, View] = {}
        self.spectra: dict[int, spectra.Spectrum] = {}
        self.stored: set[str] = set()
        self.drawn: set[str] = set()
        self.extremes = {name for name, how in self.module.rounds if how == "max"}

    # walks

    def region(self, domain: Domain) -> Region:
        """What a walk over a domain goes over."""
        return Region(self.plan.tiles(domain), lambda b: b.count(domain))

    def walk(self, what: str, stores: list[Store], domain: Domain) -> None:
        self.printer.walk_kernel(what, Walk(stores), {}, self.region(domain))

    def total(self, e: Expr) -> Value:
        """The sum or an extreme of an array."""
        (x,) = e.args
        if x.type.shape not in ("n", "kept", "matrix"):
            raise Unsupported(f"reductions over groups or samples in {routines.ALONE}", "", e)
        fold = self.values.fold(e)
        self.printer.fold(Walk(folds=[fold]), self.region(domain_of(x.type)))
        return self.values.make("total", [fold], "f64", "piece", fold.attr)

    def new_array(self, type_: Type) -> View:
        """Memory for the elements of an array."""
        storage = "float32" if type_.dtype == "float" else "int32"
        f = Field(self.plan.fresh("b"), storage, 0, SCRATCH)
        domain = domain_of(type_)
        self.plan.placed[f.name] = self.region(domain).grid
        tile = self.plan.shape.tile
        return View(
            lambda b: b.memory(own_name(f), storage, self.plan.placed[f.name], tile),
            "float" if storage == "float32" else "i32", type_.dims, domain, memory=f,
        )  # fmt: skip

    def materialize(self, e: Expr) -> View:
        """An array of the elements of an expression."""
        value = self.values.lanes(self.values.of(e))
        if value.kind == "bool":
            value = self.values.whole(value)
        made = self.new_array(e.type)
        assert made.memory is not None
        self.walk("step", [Store(SCRATCH, made.memory, value)], domain_of(e.type))
        return self.keep(e, made)

    def keep(self, e: Expr, made: View) -> View:
        """Have elements of an expression be those of an array from now on."""
        self.views[id(e)] = made
        self.values.known[domain_of(e.type), id(e)] = self.load(e, made)
        return made

    def load(self, e: Expr, made: View) -> Value:
        kind = "f32" if made.kind == "float" else "i32"
        found = self.values.make("load", (), kind, "lane", made.memory)
        return self.values.truth(found) if e.type.dtype == "bool" else found

    def array(self, e: Expr) -> View:
        """An array, made if need be."""
        if id(e) in self.views:
            return self.views[id(e)]
        if e.op == "matrix":
            self.plan.rooms[("matrix", e.type.dims)] = None
            return replace(self.array(e.args[0]), dims=e.type.dims, domain=Domain("n"), memory=None)
        if e.op == "flat" and self.array(e.args[0]).memory is not None:
            self.plan.rooms[("flat", e.args[0].type.dims)] = None
            return replace(self.array(e.args[0]), dims=(), domain=Domain("n"))
        if e.op == "transpose":
            before = self.array(e.args[0])
            return replace(before, dims=e.type.dims, turned=not before.turned, memory=None)
        if e.op == "state" and e.type.shape == "matrix" and self.fed:
            return self.state(e)
        make = routines.MAKERS.get(e.op)
        if make is None or (e.op == "matmul" and short(e)):
            return self.materialize(e)
        return self.keep(e, make(self, e))

    def state(self, e: Expr) -> View:
        """A state that is a matrix; zeros where its piece has no room for it."""
        f, domain = self.values.states[str(e.value)], domain_of(e.type)
        room = Domain("room", "", e.type.dims)
        return View(lambda b: b.state(f), "float", e.type.dims, replace(domain, kind=room.kind))

    # elements

    def lane(self, e: Expr) -> Value:
        """An element of what is no elementwise expression."""
        if e.op in ("field", "combined"):
            return self.read(e)
        if e.op == "state" and not self.fed:
            return self.values.lanes(self.values.make("const", (), "f32", "piece", 0.0))
        if e.op == "flat":
            self.plan.rooms[("flat", e.args[0].type.dims)] = None
            return self.values.of(e.args[0])
        place = routines.PLACES.get(e.op)
        if place is not None and (e.op != "matmul" or short(e)):
            found: Value = place(self, e)
            return found
        view = self.array(e)
        if view.memory is not None:
            return self.load(e, view)
        return element(e, lambda b, i, args: f"{view.text(b)}.get({i})")

    def repeated(self, e: Expr, dims: tuple[Expr, ...]) -> Value:
        """An element of a row, column or number that repeats in a matrix."""
        view = self.array(e)
        found = element(e, lambda b, i, args: f"{view.text(b, dims)}.get({i})")
        return self.values.truth(found) if e.type.dtype == "bool" else found

    def read(self, e: Expr) -> Value:
        """A payload field's value, or the mean of what ranks sum up."""
        name, v = str(e.value), self.values
        f = v.fields[name]
        if e.op == "combined" and self.alone:
            self.store(name)
        source = (self.fields if e.op == "field" else self.sums)[name]
        self.check(f)
        label = self.plan.fresh(f"{name}_")
        own = replace(f, name=label)
        self.plan.sources[label] = source.pointer
        scalar = e.type.shape not in ("n", "kept", "matrix")
        level, whole = ("piece" if scalar else "lane"), f.packed or f.storage in WHOLE
        kinds = ("i64" if whole else "f64") if scalar else "i32" if whole else "f32"
        found = v.make("unpack" if f.packed else "load", (), kinds, level, own)
        if source.mean:
            single = v.make("convert", [found], "f32", level)
            workers = v.make("workers", (), "f32", "piece")
            found = v.make("div", [single, workers], "f32", level)
        wanted = {"float": "f64" if scalar else "f32", "int": "i64" if scalar else "i32"}
        kind = wanted.get(e.type.dtype, "bool")
        if kind == "bool":
            return v.truth(found)
        return found if found.kind == kind else v.make("convert", [found], kind, level)

    # what leaves

    def check(self, f: Field) -> None:
        """Raise Unsupported for fields that these kernels do not access."""
        known = f.storage in ("uint", "float32", "float16", "bfloat16", *WHOLE)
        if f.shape not in ("n", "kept", "matrix", "scalar") or not known:
            raise Unsupported(f"{f.storage} in {routines.ALONE}", f.name)

    def store(self, name: str) -> None:
        """A payload field, once."""
        f, v = self.values.fields[name], self.values
        if name in self.stored or f.expr is None:
            return
        self.stored.add(name)
        self.check(f)
        value = v.of(f.expr)
        if f.packed:
            most = f.most or (1 << f.bits) - 1
            value = v.make("code", [v.narrow(value, "lane")], "i32", value.level, most.bit_length())
        elif f.storage in WHOLE:
            value = v.whole(value) if value.kind == "bool" else value
        elif value.kind not in ("f32", "f64"):
            value = v.make("convert", [value], "f32", value.level)
        if name in self.extremes:
            # The all-reduce of a maximum may lose a NaN: see [Note: combined].
            infinite = v.make("const", (), value.kind, "piece", float("inf"))
            finite = v.make("isfinite", [value], "bool", value.level)
            value = v.make("where", [finite, value, infinite], value.kind, value.level)
        if f.shape == "scalar":
            self.printer.store(Store("payload", f, value))
        else:
            self.walk("store", [Store("payload", f, v.lanes(value))], domain_of(f.expr.type))

    def status(self) -> None:
        """The last byte: whether an element of the input is not finite."""
        v = self.values
        size = v.make("magnitude_bits", [self.input()], "i32", "lane")
        fold = v.make("fold", [size], "i32", "tile", "max")
        self.printer.fold(Walk(folds=[fold]), self.region(Domain("n")))
        self.kernel.bad = v.make("total", [fold], "i32", "piece", "max")
        programs.close(self.printer, self.kernel)

    def input(self) -> Value:
        """The gradient, with the residual."""
        return self.values.of(gradient(self.module))

    def settle(self, decoded: Value, left: Value | None, *, back: bool) -> None:
        """Decoded values into the gradient, and new values of the states.

        left: what a residual has taken away. back: whether only where that is wanted.
        """
        v, n = self.values, Domain("n")
        updates = self.module.updates if self.fed else {}
        for e in updates.values():
            whole = e.type.shape == "matrix" or (e.type.shape == "n" and moves(e))
            if whole and self.array(e).memory is None:
                self.materialize(e)
        stores = [
            Store("state", v.states[name], v.lanes(v.of(e)))
            for name, e in updates.items() if e.type.shape == "n"
        ]  # fmt: skip
        numbers = [
            (v.states[name], v.of(e)) for name, e in updates.items() if e.type.shape == "scalar"
        ]
        if left is not None:
            rest = v.make("sub", [self.input(), left], "f32", "lane")
            stores.append(Store("state", v.states["residual"], rest))
        self.walk("settle", [*stores, Store("gradient", None, decoded, back=back)], n)
        for name, e in updates.items():
            if e.type.shape == "matrix":
                region = self.region(domain_of(e.type))
                room = Domain("room", "", e.type.dims)
                store = Store("state", v.states[name], v.of(e))
                only = replace(region, size=partial(Body.count, domain=room))
                self.printer.walk_kernel("settle", Walk([store]), {}, only)
        for f, value in numbers:
            self.printer.store_state(f, value)


def moves(e: Expr) -> bool:
    """Whether an element depends on inputs or states at other places."""
    return any(a.op in ("flat", "lookup", "gather") for a in walk(e))
