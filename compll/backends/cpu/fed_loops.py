"""The loops of cpu/fed.py: see [Note: fed products] there, and cpu/array_loops.py."""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends.cpu.declare import loop
from compll.backends.cpu.halves import held_value, kept_value
from compll.backends.cpu.memory import prefetch256
from compll.backends.cpu.rows import row_product
from compll.backends.cpu.runtime import fold, zero
from compll.numerics.numbers import LANES

f32, f64 = np.float32, np.float64
#: columns of a product at a time: their sums stay in the first-level cache
COLUMNS = 1024
#: rows that take turns in decode, elements between those at least, and columns in a turn
ROWS, APART, PART = 8, 4096, 256


@njit(nogil=True, cache=True, error_model="numpy")
def row(x, scale, residual, at, out):  # type: ignore[no-untyped-def]
    """The elements of g from `at` on, zeros behind the last."""
    count = max(0, min(len(out), len(x) - at))
    # slices, since an index that might be negative costs the vector loop
    given, kept = x[at : at + count], residual[at : at + count]
    for j in range(count):
        out[j] = f64(given[j] * scale + held_value(kept[j]))
    for j in range(count, len(out)):
        out[j] = 0.0


@loop("float32[::1], float32, {}[::1], int64, float64[:, ::1], int64, float64[:, ::1]")
def four(x, scale, residual, inner, right, c, out):  # type: ignore[no-untyped-def]
    """Four columns, from c on, of g @ right, for as many rows as come in fours."""
    rows = len(x) // inner
    for i in range(0, rows - rows % 4, 4):
        p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = 0.0
        r0 = r1 = r2 = r3 = s0 = s1 = s2 = s3 = 0.0
        o = i * inner
        a, b = x[o : o + inner], x[o + inner : o + 2 * inner]
        d, e = x[o + 2 * inner : o + 3 * inner], x[o + 3 * inner : o + 4 * inner]
        ra, rb = residual[o : o + inner], residual[o + inner : o + 2 * inner]
        rd, re = residual[o + 2 * inner : o + 3 * inner], residual[o + 3 * inner : o + 4 * inner]
        for j in range(inner):
            p, q = f64(a[j] * scale + held_value(ra[j])), f64(b[j] * scale + held_value(rb[j]))
            r, s = f64(d[j] * scale + held_value(rd[j])), f64(e[j] * scale + held_value(re[j]))
            y0, y1, y2, y3 = right[j, c], right[j, c + 1], right[j, c + 2], right[j, c + 3]
            p0, p1, p2, p3 = p0 + p * y0, p1 + p * y1, p2 + p * y2, p3 + p * y3
            q0, q1, q2, q3 = q0 + q * y0, q1 + q * y1, q2 + q * y2, q3 + q * y3
            r0, r1, r2, r3 = r0 + r * y0, r1 + r * y1, r2 + r * y2, r3 + r * y3
            s0, s1, s2, s3 = s0 + s * y0, s1 + s * y1, s2 + s * y2, s3 + s * y3
        out[i, c], out[i, c + 1], out[i, c + 2], out[i, c + 3] = p0, p1, p2, p3
        out[i + 1, c], out[i + 1, c + 1], out[i + 1, c + 2], out[i + 1, c + 3] = q0, q1, q2, q3
        out[i + 2, c], out[i + 2, c + 1], out[i + 2, c + 2], out[i + 2, c + 3] = r0, r1, r2, r3
        out[i + 3, c], out[i + 3, c + 1], out[i + 3, c + 2], out[i + 3, c + 3] = s0, s1, s2, s3


@loop("float32[::1], float32, {}[::1], int64, float64[:, ::1], int64, float64[:, ::1]")
def two(x, scale, residual, inner, right, c, out):  # type: ignore[no-untyped-def]
    """Two columns, as `four`."""
    rows = len(x) // inner
    for i in range(0, rows - rows % 4, 4):
        p0 = p1 = q0 = q1 = r0 = r1 = s0 = s1 = 0.0
        o = i * inner
        a, b = x[o : o + inner], x[o + inner : o + 2 * inner]
        d, e = x[o + 2 * inner : o + 3 * inner], x[o + 3 * inner : o + 4 * inner]
        ra, rb = residual[o : o + inner], residual[o + inner : o + 2 * inner]
        rd, re = residual[o + 2 * inner : o + 3 * inner], residual[o + 3 * inner : o + 4 * inner]
        for j in range(inner):
            p, q = f64(a[j] * scale + held_value(ra[j])), f64(b[j] * scale + held_value(rb[j]))
            r, s = f64(d[j] * scale + held_value(rd[j])), f64(e[j] * scale + held_value(re[j]))
            y0, y1 = right[j, c], right[j, c + 1]
            p0, p1, q0, q1 = p0 + p * y0, p1 + p * y1, q0 + q * y0, q1 + q * y1
            r0, r1, s0, s1 = r0 + r * y0, r1 + r * y1, s0 + s * y0, s1 + s * y1
        out[i, c], out[i, c + 1] = p0, p1
        out[i + 1, c], out[i + 1, c + 1] = q0, q1
        out[i + 2, c], out[i + 2, c + 1] = r0, r1
        out[i + 3, c], out[i + 3, c + 1] = s0, s1


@loop("float32[::1], float32, {}[::1], int64, float64[:, ::1], int64, float64[:, ::1]")
def rest(x, scale, residual, inner, right, first, out):  # type: ignore[no-untyped-def]
    """Rows from `first` on; the last may be incomplete. Zeros times infinity are NaN, as always."""
    for i in range(first, len(out)):
        for c in range(out.shape[1]):
            total = 0.0
            for j in range(inner):
                at = i * inner + j
                g = x[at] * scale + held_value(residual[at]) if at < len(x) else f32(0)
                total += f64(g) * right[j, c]
            out[i, c] = total


@loop("float32[::1], float32, {}[::1], int64, float64[:, ::1], float64[:, ::1]")
def across(x, scale, residual, inner, b, total):  # type: ignore[no-untyped-def]
    """Add transpose(g) @ b to total [columns of b, columns of g], two rows of g at a time."""
    one, other = np.empty(inner, f64), np.empty(inner, f64)
    rows = len(b)
    for i in range(0, rows, 2):
        row(x, scale, residual, i * inner, one)
        row(x, scale, residual, (i + 1) * inner, other)
        for c in range(b.shape[1]):
            sums, y = total[c], b[i, c]
            if i + 1 < rows:
                z = b[i + 1, c]
                for j in range(inner):
                    sums[j] = sums[j] + one[j] * y + other[j] * z
            else:
                for j in range(inner):
                    sums[j] += one[j] * y


@loop("float32[::1], {f}[:, ::1], {f}[:, ::1], boolean")
def decode(x, a, b, add):  # type: ignore[no-untyped-def]
    """x = a @ b, or x + a @ b.

    Rows that are APART in memory take turns at each part of b, which stays in the cache; besides,
    memory takes several streams a third faster than one.
    """
    rows, cols = len(a), b.shape[1]
    apart = max(1, APART // cols)
    for start in range(0, rows, ROWS * apart):
        for near in range(start, min(start + apart, rows)):
            for at in range(0, cols, PART):
                for i in range(near, min(near + ROWS * apart, rows), apart):
                    first = i * cols + at
                    count = max(0, min(PART, cols - at, len(x) - first))
                    row_product(a, i, b, at, x, first, count, add)


@loop("float32[::1], float32, {}[::1], {f}[:, ::1], {f}[:, ::1], boolean")
def settle(x, scale, residual, a, b, write):  # type: ignore[no-untyped-def]
    """residual = g - a @ b, where that is finite, and x = a @ b, the decoded value, if `write`."""
    cols = b.shape[1]
    room = np.empty(COLUMNS, f32)
    ahead = 0
    for i in range(len(a)):
        for at in range(0, cols, COLUMNS):
            first = i * cols + at
            last = first + min(COLUMNS, cols - at)
            while ahead < last + COLUMNS:
                prefetch256(x, ahead)
                prefetch256(residual, ahead)
                ahead += 256
            given, kept = x[first:last], residual[first:last]
            row_product(a, i, b, at, room, 0, len(given), False)
            product = room[: len(given)]
            for j in range(len(given)):
                y = product[j]
                left = given[j] * scale + held_value(kept[j]) - y
                given[j] = y if write else given[j]
                kept[j] = kept_value(left, kept[j])


@loop("float32[::1], float32, {}[::1], int64, float32[::1]")
def sums(x, scale, residual, tile, out):  # type: ignore[no-untyped-def]
    """out = the sums of g's tiles."""
    acc, red = np.empty(LANES, f32), np.empty(tile, f32)
    for t in range(len(out)):
        given, kept = x[t * tile : (t + 1) * tile], residual[t * tile : (t + 1) * tile]
        for i in range(len(given)):
            red[i] = given[i] * scale + held_value(kept[i])
        red[len(given) :] = 0.0
        for i in range(LANES):
            acc[i] = red[i]
        for k in range(LANES, tile, LANES):
            lanes = red[k : k + LANES]
            for i in range(LANES):
                acc[i] += lanes[i]
        fold(acc)
        out[t] = acc[0]


@loop("float32[::1], float32, {}[::1], int64[::1], float32[::1]")
def gather(x, scale, residual, at, out):  # type: ignore[no-untyped-def]
    """out = the elements of g at these positions."""
    for k in range(len(at)):
        out[k] = x[at[k]] * scale + held_value(residual[at[k]])


@loop("float32[::1], int64[::1], float32[::1], boolean")
def place(x, at, values, add):  # type: ignore[no-untyped-def]
    """x = values at their positions and zero elsewhere, or x with them added."""
    if add:
        for k in range(len(at)):
            x[at[k]] += values[k]
    else:
        zero(x, len(at))
        for k in range(len(at)):
            x[at[k]] = values[k]


@loop("float32[::1], float32, {}[::1], int64[::1], float32[::1]")
def leave(x, scale, residual, at, values):  # type: ignore[no-untyped-def]
    """residual = g, less the values at their positions; where that is not finite, as it was."""
    before, given = np.empty(len(at), residual.dtype), np.empty(len(at), f32)
    for k in range(len(at)):
        before[k] = residual[at[k]]
        given[k] = x[at[k]] * scale + held_value(before[k])
    for i in range(len(x)):
        residual[i] = kept_value(x[i] * scale + held_value(residual[i]), residual[i])
    for k in range(len(at)):
        residual[at[k]] = kept_value(given[k] - values[k], before[k])
