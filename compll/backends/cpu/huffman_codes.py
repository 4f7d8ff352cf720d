"""Lengths and windows of Huffman codes: see [Note: huffman] in reference/huffman.py.

Arrays hold an int64 for each number. A length of -1 is that of a number that does not occur.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Variable, loop, repeat_while, routine
from compll.backends.cpu.types import I64, PTR, VOID, c
from compll.ir.storage import HUFFMAN_LONGEST as LONGEST

NUMBERS, LANES = 256, 8
#: weight to sort a number by that does not occur: above all others
LAST = 1 << 54


@routine(VOID, PTR, I64, PTR)
def lengths(b: Builder, counts: ir.Value, bits: ir.Value, found: ir.Value) -> None:
    """Fill `found` with the lengths of 2**bits numbers."""
    numbers, weights = b.shl(c(1), bits), b.room(I64, NUMBERS)
    b.copy(weights, counts, b.mul(numbers, c(8)))
    longest = Variable(b, depths(b, weights, numbers, found))
    with repeat_while(b, lambda: b.icmp_signed(">", longest.get(), c(LONGEST))):
        with loop(b, numbers) as i:
            b.put(b.lshr(b.add(b.get(weights, I64, i), c(1)), c(1)), weights, i)
        longest.set(depths(b, weights, numbers, found))
    longer = Variable(b, c(0))
    with loop(b, numbers) as i:
        more = b.sub(b.get(found, I64, i), bits)
        longer.set(b.add(longer.get(), b.mul(b.get(counts, I64, i), more)))
    with b.if_then(b.icmp_signed(">", longer.get(), c(0))), loop(b, numbers) as i:
        b.put(bits, found, i)


@routine(I64, PTR, I64, PTR)
def depths(b: Builder, weights: ir.Value, numbers: ir.Value, found: ir.Value) -> ir.Value:
    """Depths in the tree, as lengths; that of the lightest leaf, the largest. A weight is not 0."""
    order, tree, parents = b.room(I64, NUMBERS), b.room(I64, 2 * NUMBERS), b.room(I64, 2 * NUMBERS)
    leaves = _sort(b, weights, numbers, order, tree)
    last = b.sub(b.add(leaves, leaves), c(2))
    _join(b, leaves, last, tree, parents)
    b.put(c(0), tree, last)
    with loop(b, last) as i:
        node = b.sub(b.sub(last, c(1)), i)
        b.put(b.add(b.get(tree, I64, b.get(parents, I64, node)), c(1)), tree, node)
    with loop(b, numbers) as i:
        b.put(c(-1), found, i)
    with loop(b, leaves) as i:
        b.put(b.get(tree, I64, i), found, b.get(order, I64, i))
    return b.get(tree, I64, c(0))


def _sort(
    b: Builder, weights: ir.Value, numbers: ir.Value, order: ir.Value, tree: ir.Value
) -> ir.Value:
    """Fill `order` with the numbers by ascending weight, and `tree` with their weights; the number
    of weights that are not 0. Those that are come last."""
    keys, leaves = b.room(I64, NUMBERS + LANES), Variable(b, c(0))
    vector = ir.VectorType(I64, LANES)
    b.put(ir.Constant(vector, [LAST << 8] * LANES), keys, numbers)  # behind the last one
    with loop(b, numbers) as i:
        weight = b.get(weights, I64, i)
        some = b.icmp_signed(">", weight, c(0))
        b.put(b.or_(b.shl(b.select(some, weight, c(LAST)), c(8)), i), keys, i)
        leaves.set(b.add(leaves.get(), b.zext(some, I64)))
    with loop(b, numbers) as i:
        key = b.splat(b.get(keys, I64, i), LANES)
        ranks = Variable(b, ir.Constant(vector, [0] * LANES))
        with loop(b, numbers, LANES) as j:
            below = b.icmp_signed("<", b.get(keys, I64, j, LANES), key)
            ranks.set(b.add(ranks.get(), b.zext(below, vector)))
        rank = b.intrinsic("vector.reduce.add", ranks.get())
        b.put(i, order, rank)
        b.put(b.get(weights, I64, i), tree, rank)
    return leaves.get()


def _join(b: Builder, leaves: ir.Value, last: ir.Value, tree: ir.Value, parents: ir.Value) -> None:
    """Join the two lightest nodes until one is left. Pairs become ever heavier, so the lightest
    node is the next leaf or the next pair."""
    leaf, pair = Variable(b, c(0)), Variable(b, leaves)
    with loop(b, b.add(last, c(1)), 1, leaves) as node:
        total: ir.Value = c(0)
        for _ in range(2):
            i, j = leaf.get(), pair.get()
            own, other = b.get(tree, I64, i), b.get(tree, I64, j)
            lighter = b.or_(b.icmp_signed(">=", j, node), b.icmp_signed("<=", own, other))
            taken = b.and_(b.icmp_signed("<", i, leaves), lighter)
            b.put(node, parents, b.select(taken, i, j))
            total = b.add(total, b.select(taken, own, other))
            leaf.set(b.add(i, b.zext(taken, I64)))
            pair.set(b.add(j, b.zext(b.not_(taken), I64)))
        b.put(total, tree, node)


@routine(I64, PTR, I64, PTR)
def windows(b: Builder, lengths: ir.Value, numbers: ir.Value, found: ir.Value) -> ir.Value:
    """Fill `found` with the first window of each code; the number of windows that all codes
    fill."""
    filled = Variable(b, c(0))
    with loop(b, c(LONGEST + 1)) as length, loop(b, numbers) as i:
        with b.if_then(b.icmp_signed("==", b.get(lengths, I64, i), length)):
            b.put(filled.get(), found, i)
            filled.set(b.add(filled.get(), b.lshr(c(1 << LONGEST), length)))
    return filled.get()
