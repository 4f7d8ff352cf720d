"""Runs of bytes of ones, shortened: [Note: trits] in reference/trits.py.

See gap_stream.py for arguments and results of these functions; here `count` counts bytes.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Cursor, Variable, at, loop, repeat_while, routine
from compll.backends.cpu.types import I1, I8, I16, I64, PTR, c, number

ONES, FIRST, LONGEST = 121, 243, 14
CHUNK = 16


@routine(I64, PTR, I64, I64, PTR)
def store(b: Builder, data: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value) -> ir.Value:
    """Shorten `count` bytes of trits; the address behind them."""
    end, run = Cursor(b, out), Variable(b, c(0))
    few = b.and_(b.sub(count, c(2 * CHUNK)), c(-CHUNK))  # only the last is written past its end
    few = b.select(b.icmp_signed(">", few, c(0)), few, c(0))
    with loop(b, few, CHUNK) as i:
        _store_chunk(b, at(b, data, i), end, run)
    with loop(b, count, 1, few) as i:
        _store_byte(b, b.load(at(b, data, i), typ=I8), end, run)
    some = b.zext(b.icmp_unsigned("!=", run.get(), c(0)), I64)
    return b.add(end.get(), some)


def _code(b: Builder, run: ir.Value) -> ir.Value:
    """The byte that stands for a run of `run` bytes of ones."""
    longer = b.add(b.trunc(run, I8), number(I8, FIRST - 2))
    return b.select(b.icmp_unsigned("==", run, c(1)), number(I8, ONES), longer)


def _store_byte(b: Builder, byte: ir.Value, end: Cursor, run: Variable) -> None:
    """Store a byte without a branch: the byte for the run so far is written, and overwritten as the
    run grows."""
    is_one = b.icmp_unsigned("==", byte, number(I8, ONES))
    before, longer = run.get(), b.add(run.get(), c(1))
    some = b.zext(b.icmp_unsigned("!=", before, c(0)), I64)
    end.advance(b.select(is_one, c(0), some))
    end.store(b.select(is_one, _code(b, longer), byte))
    full = b.icmp_unsigned("==", longer, c(LONGEST))
    done = b.or_(b.not_(is_one), full)
    end.advance(b.zext(done, I64))
    run.set(b.select(done, c(0), longer))


def _store_chunk(b: Builder, place: ir.Value, end: Cursor, run: Variable) -> None:
    """Store CHUNK bytes. Only those that are not ones are handled one by one."""
    bytes_ = b.load(place, typ=ir.VectorType(I8, CHUNK), align=1)
    others = b.icmp_unsigned("!=", bytes_, ir.Constant(bytes_.type, [ONES] * CHUNK))
    left = Variable(b, b.zext(b.bitcast(others, ir.IntType(CHUNK)), I64))
    first = Variable(b, c(0))
    with repeat_while(b, lambda: b.icmp_unsigned("!=", left.get(), c(0))):
        here = b.cttz(left.get(), number(I1, 1))
        left.set(b.and_(left.get(), b.sub(left.get(), c(1))))
        run.set(b.add(run.get(), b.sub(here, first.get())))
        _end_runs(b, end, run)
        rest = run.get()
        end.store(_code(b, rest))
        end.advance(b.zext(b.icmp_unsigned("!=", rest, c(0)), I64))
        end.store(b.load(at(b, place, here), typ=I8))
        end.advance(c(1))
        run.set(c(0))
        first.set(b.add(here, c(1)))
    run.set(b.add(run.get(), b.sub(c(CHUNK), first.get())))
    _end_runs(b, end, run)
    end.store(_code(b, run.get()))


def _end_runs(b: Builder, end: Cursor, run: Variable) -> None:
    """Write the bytes for complete runs of the longest length, at most two."""
    end.store(number(I16, 0xFFFF))
    full = b.zext(b.icmp_unsigned(">=", run.get(), c(LONGEST)), I64)
    full = b.add(full, b.zext(b.icmp_unsigned(">=", run.get(), c(2 * LONGEST)), I64))
    end.advance(full)
    run.set(b.sub(run.get(), b.mul(full, c(LONGEST))))


@routine(I64, PTR, PTR, I64, I64, PTR)
def load(
    b: Builder, data: ir.Value, stop: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value
) -> ir.Value:
    """1 if the data up to `stop` stand for `count` bytes of trits, else 0."""
    length = b.sub(b.ptrtoint(stop, I64), b.ptrtoint(data, I64))
    done = Variable(b, c(0))
    too_many = b.add(count, c(1))
    with loop(b, length) as i:
        byte, to = b.load(at(b, data, i), typ=I8), done.get()
        is_run = b.icmp_unsigned(">=", byte, number(I8, FIRST))
        run = b.sub(b.zext(byte, I64), c(FIRST - 2))
        # a byte is written as a whole vector; the next one overwrites the surplus
        b.store(b.splat(b.select(is_run, number(I8, ONES), byte), CHUNK), at(b, out, to), align=1)
        to = b.add(to, b.select(is_run, run, c(1)))
        done.set(b.select(b.icmp_unsigned("<", to, too_many), to, too_many))
    return b.zext(b.icmp_unsigned("==", done.get(), count), I64)
