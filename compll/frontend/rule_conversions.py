"""Conversions of typed arguments: numbers, lifts to a common level, conditions.

All typing rules use these; a rule inserts the conversions (int to float, scalar to element), so
that backends need not guess them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compll.errors import RuleError
from compll.ir import matrices
from compll.ir.expr import LEVELS, Expr, Pool, Type
from compll.ir.module import Selection
from compll.ir.static import covers

LEAST, LARGEST = -(2**31), 2**31 - 1  # range of an integer element
#: hint for selections in a grouped spec
ROWS = (
    "without `group:`, the k largest of every row of `m: matrix(g, 256)` are at "
    "top_columns(abs(m), k), and meet numbers of their rows in encode and decode"
)


class Conversions:
    """Makes arguments fit each other, in a grouped or ungrouped spec, in encode or decode."""

    def __init__(
        self, pool: Pool, grouped: bool, *, encoding: bool,
        selections: Mapping[str, Selection] | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.grouped, self.encoding = pool, grouped, encoding
        #: selections so far
        self.selections = {} if selections is None else selections
        #: numbers of draws so far: a rank's own, and those that are the same on all ranks
        self.draws = self.alike = 0
        self.whole = "group" if grouped else "scalar"

    def number(self, x: Expr, dtype: str) -> Expr:
        """x as float or int."""
        if x.type.dtype == dtype or (dtype == "int" and x.type.dtype == "float"):
            return x
        if x.type.dtype in ("str", "selection"):
            hint = "compare it with a text: mode == 'fast'" if x.type.dtype == "str" else ""
            raise RuleError(f"a number is needed, not {x.type}", hint)
        return self.pool.make(dtype, (x,), replace(x.type, dtype=dtype))

    def same(self, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Numbers of one dtype: int when all are int or bool, else float."""
        dtype = "float" if any(a.type.dtype == "float" for a in args) else "int"
        return tuple(self.number(a, dtype) for a in args)

    def condition(self, x: Expr) -> Expr:
        """x as a bool; a selection means `is selected`."""
        if x.type.dtype == "selection":
            return self.pool.make("in", (), replace(x.type, dtype="bool"), x.value)
        if x.type.dtype == "bool":
            return x
        self.number(x, "int")  # raises unless x is a number
        zero = self.number(self.pool.const(0), "float" if x.type.dtype == "float" else "int")
        return self.elementwise("ne", (x, zero), "bool")

    def is_drawn(self, selection: str) -> bool:
        """True if a selection is drawn without data, so that decode knows it."""
        return selection in self.selections and self.selections[selection].kind == "drawn"

    # levels

    def lift(self, x: Expr, shape: str, of: str = "") -> Expr:
        """x, repeated for the elements of `shape`."""
        if x.type.shape == shape and x.type.of == of:
            return x
        if x.type.shape == "static" and shape == "scalar":
            return x
        if x.type.shape == "group" and shape == "kept":
            raise RuleError(
                "a value per group does not go together with selected elements",
                "compute with all elements first: (x / scale)[kept]" if self.encoding else ROWS,
            )
        return self.pool.make("lift", (self.saturated(x),), Type(x.type.dtype, shape, of))

    def saturated(self, x: Expr) -> Expr:
        """x within the range of int32, if it is an integer without bounds: a static value or a
        scalar."""
        if x.type.dtype != "int" or x.type.shape not in ("static", "scalar"):
            return x
        if x.op == "const":
            return self.pool.const(min(max(x.value, LEAST), LARGEST))
        above = self.pool.make("max", (x, self.pool.const(LEAST)), x.type)
        return self.pool.make("min", (above, self.pool.const(LARGEST)), x.type)

    def elementwise(self, op: str, args: tuple[Expr, ...], dtype: str = "") -> Expr:
        shape, of = self.shape(args)
        if shape == "matrix":
            made = Type(dtype or args[-1].type.dtype, shape, of, matrices.meet(args))
            return self.pool.make(op, args, made)
        if shape == "static" and not covers(op):
            raise RuleError(f"{op} needs data", "it cannot apply to constants")
        lifted = tuple(self.lift(a, shape, of) for a in args)
        return self.pool.make(op, lifted, Type(dtype or args[-1].type.dtype, shape, of))

    def shape(self, args: tuple[Expr, ...]) -> tuple[str, str]:
        """The common level of these arguments."""
        if any(a.type.shape == "table" for a in args):
            raise RuleError(
                "a table is no number", "bucket(x, table) and lookup(table, i) read it by element"
            )
        if any(a.type.shape == "matrix" for a in args):
            return self.shape_of_matrix(args)
        top = max(args, key=lambda a: (LEVELS[a.type.shape], a.type.shape == "group")).type
        for a in args:
            if LEVELS[a.type.shape] == 2 and (a.type.shape, a.type.of) != (top.shape, top.of):
                raise RuleError(
                    f"{a.type} and {top} do not go together",
                    "x[selection] picks the selected elements of x",
                )
        if top.shape == "sample":
            raise RuleError(
                "a sample only goes into kth_largest", "apply the operator before sampling"
            )
        return top.shape, top.of

    def shape_of_matrix(self, args: tuple[Expr, ...]) -> tuple[str, str]:
        """The common level, a matrix. Matrices go together with matrices and single numbers."""
        for a in args:
            if a.type.shape not in ("matrix", "static", "scalar"):
                raise RuleError(
                    f"{a.type} does not go together with a matrix",
                    "matrix(x, columns) makes one, flat(m) has the elements of one",
                )
        return "matrix", ""

    # requirements of rules

    def no_selection(self, op: str, args: tuple[Expr, ...]) -> None:
        if any(a.type.dtype == "selection" for a in args):
            raise RuleError(
                f"{op} takes numbers, not a selection",
                "write x[selection], count(selection) or where(selection, a, b)",
            )

    def need_one_number(self, op: str, args: tuple[Expr, ...]) -> None:
        for a in args:
            if a.type.shape not in ("static", "scalar"):
                raise RuleError(f"{op} takes numbers of the whole tensor, not {a.type}")

    def whole_tensor(self, op: str, instead: str = "remove `group:`, or use reductions") -> None:
        if self.grouped:
            raise RuleError(
                f"{op} looks at the whole tensor, which a grouped spec does not", instead
            )
        if not self.encoding:
            raise RuleError(f"{op} belongs in encode", "decode sees the payload only")

    def static(self, op: str, x: Expr, what: str = "the size") -> Expr:
        if x.type.shape != "static":
            raise RuleError(
                f"{op}: {what} must be known before any data, and {x.type} is not",
                "compute it from n and parameters",
            )
        return self.number(x, "float")
