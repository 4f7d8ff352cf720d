"""Routines in a kernel (compll/routines has most of what they do): searches, payload fields."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from compll.backends.cpu.builder import (
    F32,
    F64,
    I16,
    I32,
    I64,
    Variable,
    at,
    c,
    loop,
    number,
    repeat_while,
)
from compll.backends.cpu.instructions import function, item_bytes, numbers, traced
from compll.backends.cpu.printer import Printer
from compll.backends.cpu.walks import WalkCalls
from compll.ir.tile import Array, Call, Compact, Value, Walk
from compll.numerics import draws
from compll.numerics.numbers import Tries
from compll.passes.arrays import counting, sampled
from compll.routines import streams, tables
from compll.routines.streams import STREAMS

# ---- searches -----------------------------------------------------------------------------------
# Searches of a piece: the k-th largest, thresholds by counts, quantiles.

#: elements of the sample
SAMPLE = 4096
LOWEST = number(I32, -(2**31))


class KthLargestSearch:
    """A search for the k-th largest of a piece's order keys, without an array of all of them.

    A sample gives a lower bound, and one walk compacts the keys above it. The answer is found among
    these, digit by digit. If the bound is too high, all keys are searched.
    """

    def __init__(self, printer: Printer, walks: WalkCalls, call: Call) -> None:
        self.printer, self.walks, self.b, self.call = printer, walks, printer.b, call
        (view,), (keys, *samples) = call.views, call.made
        self.keys, self.name = printer.pointers[keys], keys.name
        inputs = sampled(view)
        self.placed = not inputs
        #: arrays that a sample is collected from, each with that which it is collected in
        self.samples = list(zip(inputs or [keys], samples, strict=True))
        self.least = Value("least", (), "i32", "piece")
        enough = Value("ge", (view.value, self.least), "bool", "element")
        compact = Compact(self.name, [(keys, view.value)], always=enough)
        self.walk = Walk(compacts=[compact], domain=view.domain)

    def emit(self) -> None:
        """Compute the call's two results."""
        b, p, (k, *size) = self.b, self.printer, map(self.printer.value, self.call.numbers)
        p.local[self.least] = LOWEST
        self.walks.know(self.walk, [self.least])
        keys = self.keys
        if not size:
            self.all(k)
        elif self.placed:
            self.collect(LOWEST, self.elements())
            keys = p.pointers[self.samples[0][1]]
            self.gather(size[0], self.key())
        else:
            self.sample(size[0], self.key())
        both = function(tables.kth)(b, keys, size[0] if size else self.count(), k)
        for v, number_of in zip(
            self.call.results, (b.trunc(both, I32), b.lshr(both, c(32))), strict=True
        ):
            b.store(number_of, p.made(v))

    def elements(self) -> ir.Value:
        """Number of elements that have keys."""
        return self.printer.items(self.walk.domain)

    def all(self, k: ir.Value) -> None:
        """Collect all keys that can be the k-th largest."""
        b, n = self.b, self.elements()
        least = Variable(b, LOWEST)
        wanted = self.generous(k, 16)
        few = b.icmp_signed("<=", n, c(4 * SAMPLE))
        most = b.icmp_signed(">=", b.mul(wanted, c(2)), n)
        with b.if_then(b.not_(b.or_(few, most))):
            least.set(self.bracket(wanted))
        self.collect(least.get(), n)
        with b.if_then(b.icmp_signed("<", self.count(), k), likely=False):
            self.collect(LOWEST, n)

    def generous(self, k: ir.Value, more: int) -> ir.Value:
        """k plus four times its standard deviation."""
        b = self.b
        root = b.fptosi(b.intrinsic("sqrt", b.sitofp(k, F64)), I64)
        return b.add(b.add(k, b.mul(root, c(4))), c(more))

    def count(self) -> ir.Value:
        """The number of keys that the walk compacted."""
        return self.b.load(self.printer.counts[self.name], typ=I64)

    def collect(self, least: ir.Value, n: ir.Value) -> None:
        """Collect the keys of n elements that are at least `least`."""
        p = self.printer
        self.walks.open_counts(self.name, c(0))
        p.local[self.least] = least
        self.walks.run(self.walk, n)

    def bracket(self, wanted: ir.Value) -> ir.Value:
        """A key that is most likely below the k-th largest, from a sample."""
        b, size = self.b, c(SAMPLE)
        self.sample(size, number(I32, 0))
        rank = b.udiv(b.mul(wanted, size), self.elements())
        rank = self.generous(rank, 4)
        rank = b.select(b.icmp_signed("<", rank, size), rank, size)
        return b.trunc(function(tables.kth)(b, self.keys, size, rank), I32)

    # samples

    def key(self) -> ir.Value:
        """The key of the draws that choose a spec's own sample (see sample_positions)."""
        keys = self.printer.draw_keys(self.printer.given["seed"], -1, c(0))
        return self.b.trunc(self.b.lshr(keys, c(32)), I32)

    def sample(self, count: ir.Value, key: ir.Value) -> None:
        """Collect the keys of `count` elements, one from each of `count` equal stretches."""
        p, usual = self.printer, self.printer.pointers
        if self.placed:  # the first elements: any sample will do for a bracket
            return self.collect(LOWEST, count)
        self.gather(count, key)
        p.pointers = usual | {a: usual[sample] for a, sample in self.samples}
        self.collect(LOWEST, count)
        p.pointers = usual
        return None

    def gather(self, count: ir.Value, key: ir.Value) -> None:
        """Copy elements of arrays at the sample's positions."""
        b, n, pointers = self.b, self.printer.row["n"], self.printer.pointers
        step, more = (how(n, count) for how in (b.udiv, b.urem))
        low, over = Variable(b, c(0)), Variable(b, c(0))  # j * n / count, quotient and remainder
        with loop(b, count) as j:
            start, rest = low.get(), b.add(over.get(), more)
            carry = b.icmp_unsigned(">=", rest, count)
            width = b.add(step, b.zext(carry, I64))
            low.set(b.add(start, width))
            over.set(b.select(carry, b.sub(rest, count), rest))
            counter = traced(draws.counter)(b, b.trunc(j, I32), key)
            drawn = b.lshr(traced(draws.mixed)(b, counter, number(I32, 0)), number(I32, 8))
            i = b.add(start, b.zext(b.urem(drawn, b.trunc(width, I32)), I64))
            for array, sample in self.samples:
                kind = {2: I16, 4: I32}[item_bytes(array)]
                b.put(b.get(pointers[array], kind, i), pointers[sample], j)


def threshold_search(printer: Printer, walks: WalkCalls, call: Call) -> None:
    """adjust or bisect: walk until a count fits; see [Note: tries] in numerics/numbers.py."""
    p, b, (low, high, left) = printer, printer.b, range(3)
    rule = Tries(call.routine, numbers(b, *map(p.value, call.numbers)))
    tried, walk = counting(call.views[0])
    walks.know(walk, tried)
    state = [Variable(b, x.value) for x in rule.begin()]
    with repeat_while(b, lambda: b.fcmp_ordered(">=", state[left].get(), number(F64, 0))):
        now = numbers(b, *(variable.get() for variable in state))
        for v, t in zip(tried, rule.tree(now[low], now[high]), strict=True):
            p.local[v] = b.fptrunc(t.value, F32)
        walks.run(walk, p.row["n"])
        totals = [b.load(p.totals[f], typ=I64) for f in walk.folds]
        counts = numbers(b, *(b.sitofp(total, F64) for total in totals))
        result = [x.value for x in rule.decide(now, counts)]
        for v, value in zip(call.results, result[:2], strict=True):
            b.store(value, p.made(v))
        for variable, value in zip(state, result[2:], strict=True):
            variable.set(value)


def quantiles(printer: Printer, walks: WalkCalls, call: Call) -> None:
    """Find the quantiles in an array of keys, which it sorts."""
    keys, *spare = (printer.pointers[a] for a in (call.views[0].value.attr, *call.made))
    n, table = printer.row["n"], printer.value(call.results[0])
    function(tables.quantiles, parts=call.attr)(printer.b, keys, n, *spare, table)


SEARCHES: dict[str, Callable[[Printer, WalkCalls, Call], None]] = {
    "kth_largest": lambda *given: KthLargestSearch(*given).emit(),
    "adjust": threshold_search,
    "bisect": threshold_search,
    "quantiles": quantiles,
}


# ---- fields -------------------------------------------------------------------------------------
# Routines of payload fields: those of varying length are stored and loaded, positions checked.


def stream(printer: Printer, call: Call) -> ir.Value | None:
    """Store values of varying length in the payload, or load them from it. In a check: true if they
    are as they should be; None in other kernels."""
    b, f, coder = printer.b, call.attr, STREAMS[call.routine]
    values = call.made[0] if printer.kernel.decodes else call.views[0].value.attr
    array, count = printer.pointers[values], printer.items(values.domain)
    if f.layout.recoded:  # counted in bytes, not in positions
        count = printer.value(printer.kernel.sizes[values])
    among = c(f.bits) if f.storage == "huffman" else printer.among(f.of)
    b.store(number(I32, -1), at(b, array, c(-4)))
    if not printer.kernel.decodes:
        out = printer.pointers[call.made[0]]
        printer.sizes["length", f.name] = function(coder.store)(b, array, count, among, out)
        printer.fields()
        return None
    data = printer.pointers[Array.of(f, "incoming")]
    length = printer.value(printer.kernel.sizes[Array.of(f, "incoming")])
    given = [data, length, count, among, array]
    if printer.kernel.kind == "check":
        return b.icmp_signed("!=", function(coder.load)(b, *given), c(0))
    with b.if_then(b.icmp_signed("!=", printer.given["rows"], c(1))):
        function(coder.load)(b, *given)  # check loaded them for a single piece
    return None


def ascending(printer: Printer, call: Call) -> ir.Value:
    """True if positions ascend within the tensor."""
    b, f = printer.b, call.attr
    given = printer.pointers[Array.of(f, "incoming")], printer.kept(f.of), printer.among(f.of)
    return b.icmp_signed("!=", function(streams.ascending)(b, *given), c(0))


FIELDS: dict[str, Callable[[Printer, Call], ir.Value | None]] = {
    **dict.fromkeys(STREAMS, stream), "ascending": ascending,
}  # fmt: skip
