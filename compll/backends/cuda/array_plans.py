"""The plans of a spec that is computed an array at a time (see [Note: arrays] in array_runs.py).

Plans: "encode" (no state), "feed" (with states), "set" and "add" (decode); of a spec with rounds
"round0", "round1" ... and "rounds" (what all ranks decode to), and those with "_feed".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from compll.backends.cuda import array_routines, programs
from compll.backends.cuda.array_printer import ArrayPrinter, Source
from compll.backends.cuda.body import state_params
from compll.backends.cuda.grids import Shape
from compll.backends.cuda.plan_builder import DECODE, ENCODE, PlanBuilder
from compll.backends.cuda.printer import Printer
from compll.ir.layout import TILE
from compll.ir.module import Module
from compll.ir.program import Unsupported
from compll.ir.rounds import rounds
from compll.ir.tile import Kernel, Store, Value, Walk
from compll.passes import selections


def array_plans(module: Module, shape: Shape) -> Iterator[tuple[str, PlanBuilder, Kernel]]:
    """All plans, by name. Raises Unsupported."""
    if module.group:
        what = "a grouped spec that is computed an array at a time"
        raise Unsupported(what, module.fields[0].name)
    made = ArrayPlans(module, shape)
    for fed in (False, True)[: 1 + bool(module.states)]:
        yield made.encode(fed)
        for number in range(len(module.rounds)):
            yield made.round(number, fed)
        if module.rounds:
            yield made.all_rounds(fed)
    for adds in (False, True):
        yield made.decode(adds)


class ArrayPlans:
    """Makes the plans of a module, one after the other."""

    def __init__(self, module: Module, shape: Shape) -> None:
        self.module, self.shape = module, shape
        self.fields = {f.name: f for f in module.fields}

    def begin(
        self, name: str, params: tuple[str, ...], fed: bool, *, decodes: bool = False
    ) -> tuple[Printer, Kernel]:
        """What prints a plan, and the kernel that it is of."""
        kernel = Kernel(name, self.module, TILE, states=list(self.module.states) if fed else [])
        given = (*params, *state_params(kernel.states))
        plan = PlanBuilder(name, kernel, self.shape, given, decodes=decodes)
        return Printer(plan), kernel

    def arrays(
        self, printer: Printer, kernel: Kernel, fields: dict[str, Source],
        sums: dict[str, Source], *, fed: bool = False, alone: bool = False,
    ) -> ArrayPrinter:  # fmt: skip
        """What makes its arrays."""
        made = ArrayPrinter(printer, kernel, fed=fed, alone=alone, fields=fields, sums=sums)
        kernel.limits = {s.name: selections.limit(made.values, s) for s in self.module.selections}
        printer.plan.limits = kernel.limits
        return made

    def payload(self, prefix: str) -> dict[str, Source]:
        """Fields in a payload."""
        return {
            name: Source(lambda b, f=f: b.fields[prefix].pointer(f))  # type: ignore[misc]
            for name, f in self.fields.items()
        }

    def summed(self, count: int) -> dict[str, Source]:
        """Where the first rounds' sums are read."""
        return {
            one.name: Source(lambda b, k=k: f"(r{k} + r{k}_at[p])", mean=one.op != "max")  # type: ignore[misc]
            for k, one in enumerate(rounds(self.module)[:count])
        }

    def round_params(self, count: int) -> tuple[str, ...]:
        """Of a kernel that is given the first rounds' sums."""
        pairs = ((f"const u8* r{k}", f"const i64* r{k}_at") for k in range(count))
        return (*ENCODE, "float workers", *(param for pair in pairs for param in pair))

    def encode(self, fed: bool) -> tuple[str, PlanBuilder, Kernel]:
        """Every payload field; with states, what the payload decodes to, and the states' values."""
        name, out = "feed" if fed else "encode", self.payload("out")
        printer, kernel = self.begin(name, ENCODE, fed)
        made = self.arrays(printer, kernel, out, out, fed=fed, alone=True)
        for field in self.fields:
            with blamed(field):
                made.store(field)
        if self.module.status:
            made.status()
        if fed:
            decoded = self.decoded(made)
            if self.module.status:
                decoded = programs.told_or(decoded, Value("told", (), "bool", "piece", "out"))
            with blamed(next(iter(self.module.updates), "")):
                made.settle(decoded, decoded if self.module.feedback else None, back=True)
        printer.end_phase()
        return name, printer.plan, kernel

    def decoded(self, made: ArrayPrinter) -> Value:
        """An element of what the payload decodes to."""
        with blamed("decode"):
            return made.values.lanes(made.values.of(self.module.decode))

    def decode(self, adds: bool) -> tuple[str, PlanBuilder, Kernel]:
        """From a payload to the gradient."""
        name, fields = "add" if adds else "set", self.payload("in")
        printer, kernel = self.begin(f"decode_{name}", DECODE, False, decodes=True)
        made = self.arrays(printer, kernel, fields, {})
        programs.check(printer, Kernel("check", self.module, TILE))
        printer.end_phase()
        with blamed("decode"):
            walk = self.write(made, adds)
        if self.module.decode.op == "scatter" and not adds:
            programs.fill(made.printer)
        if self.module.status:
            programs.telling(printer, walk)
        else:
            printer.walk(walk)
        printer.end_phase()
        return name, printer.plan, kernel

    def write(self, made: ArrayPrinter, adds: bool) -> Walk:
        """The walk that writes what is decoded."""
        v, decode = made.values, self.module.decode
        if decode.op == "scatter":
            array_routines.positions(made, decode)
            at, value = (v.lanes(v.of(a)) for a in decode.args)
            target = "scatter_add" if adds else "scatter"
            return Walk([Store(target, None, value, place=at)], of=decode.args[0].type.of)
        value = v.lanes(v.of(decode))
        if adds:
            value = v.make("add", [v.make("load", (), "f32", "lane", "g"), value], "f32", "lane")
        return Walk([Store("gradient", None, value)])

    def round(self, number: int, fed: bool) -> tuple[str, PlanBuilder, Kernel]:
        """What a round adds up."""
        field = self.fields[self.module.rounds[number][0]]
        name = f"round{number}{'_feed' * fed}"
        printer, kernel = self.begin(name, self.round_params(number), fed)
        printer.plan.module = replace(self.module, fields=(field,), status=False)
        made = self.arrays(printer, kernel, {}, self.summed(number), fed=fed)
        with blamed(field.name):
            made.store(field.name)
        printer.end_phase()
        return name, printer.plan, kernel

    def all_rounds(self, fed: bool) -> tuple[str, PlanBuilder, Kernel]:
        """What all rounds' sums decode to, into the gradient, and the states."""
        count, name = len(self.module.rounds), f"rounds{'_feed' * fed}"
        printer, kernel = self.begin(name, self.round_params(count), fed)
        sums = self.summed(count)
        left = self.own(printer, kernel, sums) if fed and self.module.own else None
        made = self.arrays(printer, kernel, sums, sums, fed=fed)
        decoded = self.decoded(made)
        if fed and self.module.feedback and left is None:
            left = decoded
        made.settle(decoded, left, back=False)
        printer.end_phase()
        return name, printer.plan, kernel

    def own(self, printer: Printer, kernel: Kernel, sums: dict[str, Source]) -> Value:
        """What this rank's own payload decodes to: by way of the plan's own memory."""
        fields = self.payload("own")
        printer.plan.targets = {name: source.pointer for name, source in fields.items()}
        made = self.arrays(printer, kernel, fields, sums, fed=True)
        for name in self.fields:
            if name in made.extremes:
                fields[name] = sums[name]
                continue
            with blamed(name):
                made.store(name)
        with blamed("decode"):
            view = made.materialize(self.module.decode)
        printer.end_phase()
        return made.load(self.module.decode, view)


@contextmanager
def blamed(name: str) -> Iterator[None]:
    """What is not supported is told at this field, state or section."""
    try:
        yield
    except Unsupported as why:
        raise why if why.name else Unsupported(str(why), name, why.expr, why.hint) from why
