"""The CUDA C++ of a spec that is computed an array at a time; see [Note: CUDA arrays].

Plans: "encode" (no state), "feed" (with states), "set" and "add" (decode); of a spec with rounds
"round0", "round1" ... and "rounds" (what all rounds decode to), and those with "_feed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compll.backends.cuda.domains import ArrayPlan, Domain
from compll.backends.cuda.grids import shape_of
from compll.backends.cuda.halves import Kept
from compll.backends.cuda.outputs import Outputs
from compll.backends.cuda.plans import Source, header
from compll.backends.cuda.reads import Bytes
from compll.ir.layout import tile_of
from compll.ir.module import Module
from compll.ir.program import Unsupported
from compll.ir.rounds import rounds

ENCODE = ("XT* x", "u8* out", "const i64* at", "float scale", "int writeback")
DECODE = ("const u8* data", "const i64* at", "const i64* used", "u32* errors", "XT* y")
ROUND = ("XT* x", "u8* out", "const i64* at", "float scale", "float workers")
ROUNDS = ("XT* x", "float scale", "float workers")


def array_source(module: Module, threads: int) -> Source[ArrayPlan]:
    """The kernels of a module for blocks of `threads`. Raises Unsupported."""
    if module.group:
        raise Unsupported(
            "a grouped spec that is computed an array at a time", module.fields[0].name
        )
    made = Builder(module, threads)
    made.encode(False)
    for add in (False, True):
        made.decode(add)
    for number in range(len(module.rounds)):
        made.round(number, False)
    if module.rounds:
        made.rounds(False)
    if module.states:
        made.encode(True)
        for number in range(len(module.rounds)):
            made.round(number, True)
        if module.rounds:
            made.rounds(True)
    return made.source


class Builder:
    """Makes the plans of a module, one after the other."""

    def __init__(self, module: Module, threads: int) -> None:
        self.module, self.threads = module, threads
        text = header("arrays") + header("spectra")
        self.source: Source[ArrayPlan] = Source(text, shape_of(tile_of(module), threads))
        self.states = tuple(s.name for s in module.states)

    def add(
        self, name: str, given: tuple[str, ...], fed: bool, emit: Callable[[Outputs], None]
    ) -> None:
        """A plan whose kernels `emit` makes."""
        states = self.states if fed else ()
        name = f"{name}_feed" if fed and name != "encode" else "feed" if fed else name
        params = (*given, *Kept(self.module).params(states))
        made = Outputs(self.module, name, params, self.threads)
        made.fed = fed
        with blamed("decode"):
            emit(made)
        self.source.text += made.finished()
        self.source.plans[name] = made.plan(states)

    def all_fields(self, where: Bytes) -> dict[str, Bytes]:
        return {f.name: where for f in self.module.fields}

    def encode(self, fed: bool) -> None:
        """Every payload field; with states, what the payload decodes to, and the states' values."""

        def emit(made: Outputs) -> None:
            made.target = Bytes("out + at[p]")
            made.alone, made.sums = True, self.all_fields(made.target)
            for f in self.module.fields:
                with blamed(f.name):
                    made.store(f.name)
            if self.module.status:
                made.store_status()
            if fed:
                self.update(made)

        self.add("encode", ENCODE, fed, emit)

    def update(self, made: Outputs) -> None:
        """The states, by what the own payload decodes to."""
        made.fields = self.all_fields(made.target)
        made.told = "out" if self.module.status else ""
        made.need(self.module.decode)
        with blamed(next(iter(self.module.updates), "")):
            made.prepare_updates()
        made.settle(fed=True, when="if (writeback) ")

    def decode(self, add: bool) -> None:
        """From a payload to y."""

        def emit(made: Outputs) -> None:
            made.fields = self.all_fields(Bytes("data + at[p]"))
            made.told = "data" if self.module.status else ""
            made.look()
            made.write(add)

        self.add("add" if add else "set", DECODE, False, emit)

    def summed(self, count: int) -> dict[str, Bytes]:
        """Where the first rounds' sums are read."""
        found = {}
        for number, one in enumerate(rounds(self.module)[:count]):
            begin = f"r{number} + r{number}_at[p]"
            found[one.name] = Bytes(begin, whole=False, mean=one.op != "max")
        return found

    def given(self, count: int) -> tuple[str, ...]:
        """The first rounds' sums, as parameters."""
        pairs = ((f"const u8* r{k}", f"const i64* r{k}_at") for k in range(count))
        return tuple(param for pair in pairs for param in pair)

    def round(self, number: int, fed: bool) -> None:
        """What a round adds up."""
        name = self.module.rounds[number][0]

        def emit(made: Outputs) -> None:
            made.sums = self.summed(number)
            made.target = Bytes("out + at[p]", whole=False)
            with blamed(name):
                made.store(name)

        self.add(f"round{number}", (*ROUND, *self.given(number)), fed, emit)

    def rounds(self, fed: bool) -> None:
        """What all rounds' sums decode to, into x, and the states."""
        count = len(self.module.rounds)

        def emit(made: Outputs) -> None:
            made.sums = self.summed(count)
            if fed and self.module.own:
                self.own(made)
            made.fields = self.summed(count)
            made.need(self.module.decode)
            if fed:
                made.prepare_updates()
            made.settle(fed=fed)

        self.add("rounds", (*ROUNDS, *self.given(count)), fed, emit)

    def own(self, made: Outputs) -> None:
        """What this rank's own payload decodes to, in scratch memory."""
        made.target = Bytes(made.memory("own_bytes", "uint8", Domain("payload")))
        made.fields = self.all_fields(made.target)
        for name in made.extremes:
            made.fields[name] = made.sums[name]
        for f in self.module.fields:
            if f.name not in made.extremes:
                with blamed(f.name):
                    made.store(f.name)
        made.keep_own()


@contextmanager
def blamed(name: str) -> Iterator[None]:
    """What is not supported is told at this field, state or section."""
    try:
        yield
    except Unsupported as why:
        raise why if why.name else Unsupported(str(why), name, why.expr, why.hint) from why
