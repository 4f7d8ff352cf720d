"""The context of typing rules, and conversions of their arguments: numbers, lifts to a common
level, conditions, values that follow from the parameters.

A rule inserts the conversions (int to float, scalar to element), so that backends need not guess
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from compll.errors import RuleError
from compll.ir.expr import LEVELS, Expr, Pool, Type, rebuild, walk
from compll.ir.module import Selection
from compll.ir.static import Number, covers, depends, evaluate

LEAST, LARGEST = -(2**31), 2**31 - 1  # range of an integer element
#: hint for selections in a grouped spec
ROWS = (
    "without `group:`, the k largest of every row of `m: matrix(g, 256)` are at "
    "top_columns(abs(m), k), and meet numbers of their rows in encode and decode"
)
WHOLE_SIZES = "rows and columns are whole numbers that follow from n and parameters"
#: operators that are exact on integers below 2**53
EXACT = ("float", "add", "sub", "mul", "neg", "abs", "min", "max", "pow")


class Context:
    """Makes arguments fit each other, in a grouped or ungrouped spec, in encode or decode.

    selections: those so far. params: values of the spec's parameters. reduced: the level of
    reductions, "group" or "scalar".
    """

    def __init__(
        self, pool: Pool, selections: Mapping[str, Selection], params: Mapping[str, Number], *,
        grouped: bool, encoding: bool,
    ) -> None:  # fmt: skip
        self.pool, self.grouped, self.encoding = pool, grouped, encoding
        self.selections, self.params = selections, params
        #: numbers of draws: a rank's own, and those that are the same on all ranks
        self.draws, self.shared_draws = count(), count()
        self.reduced = "group" if grouped else "scalar"

    @property
    def n(self) -> Expr:
        """The number of elements."""
        return self.pool.make("param", (), Type("int", "static"), "n")

    def number(self, x: Expr, dtype: str = "float") -> Expr:
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
            result = Type(dtype or args[-1].type.dtype, shape, of, _joint_dims(args))
            return self.pool.make(op, args, result)
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

    # values known before any data

    def constant(self, x: Expr) -> bool:
        """True if x depends on the parameters alone."""
        return x.type.shape == "static" and not depends(x) & {"n", "step"}

    def folded(self, x: Expr) -> Expr:
        """A value that depends on the parameters alone, as a literal."""
        return self.pool.const(evaluate(x, self.params)) if self.constant(x) else x

    def settled(self, x: Expr) -> Expr:
        """A static value with the parameters replaced by their values."""

        def change(e: Expr) -> Expr | None:
            constant = e.op == "param" and e.value in self.params
            return self.pool.const(self.params[e.value]) if constant else None

        return rebuild(self.pool, x, change) if x.type.shape == "static" else x

    def exact(self, x: Expr) -> Expr:
        """An integer literal for a value of integers and parameters, including powers, if it is an
        integer.

        Elsewhere a power is a float: with elements, `q * 2**20` would overflow as an integer.
        """
        if x.type.dtype != "float" or not self.constant(x):
            return x
        if not all(e.op in EXACT or (not e.args and e.type.dtype == "int") for e in walk(x)):
            return x
        number = float(evaluate(x, self.params))
        return self.pool.const(int(number)) if abs(number) < 2**53 and number % 1 == 0 else x

    def dimension(self, x: Expr) -> Expr:
        """x as rows or columns of a matrix. Raises RuleError."""
        x = self.settled(self.exact(x))
        if x.type.shape != "static" or x.type.dtype != "int" or depends(x) - {"n"}:
            raise RuleError(WHOLE_SIZES, "round with ceil() or floor()")
        if x.op == "const" and float(x.value) < 1:
            raise RuleError(
                f"a matrix has at least one row and column, not {x.value}",
                "a parameter with `from:` keeps its default if the shape is unknown: "
                "`width: columns if columns > 0 else ceil(sqrt(n))`",
            )
        return x

    def refuse_share(self, op: str, number: Expr) -> None:
        """Refuse a number of elements between 0 and 1: the writer means a share of all elements."""
        value = evaluate(number, self.params) if self.constant(number) else 0
        if not isinstance(value, str) and 0 < value < 1:
            hint = "a share of all is like max(1, floor(n * ratio))"
            raise RuleError(f"{op} takes a number of elements, not {value:g}", hint)

    def static(self, op: str, x: Expr, what: str = "the size") -> Expr:
        if x.type.shape != "static":
            raise RuleError(
                f"{op}: {what} must be known before any data, and {x.type} is not",
                "compute it from n and parameters",
            )
        return self.number(x)


def matrix_type(rows: Expr, columns: Expr, dtype: str = "float") -> Type:
    """The type of a matrix."""
    return Type(dtype, "matrix", dims=(rows, columns))


def is_row(x: Expr) -> bool:
    """True if x is a matrix of one row."""
    return x.type.shape == "matrix" and _is_one(x.type.dims[0])


def _is_one(dim: Expr) -> bool:
    return dim.op == "const" and bool(dim.value == 1)


def _joint_dims(args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Rows and columns of an elementwise operator's result. A single row or column repeats."""
    dims: list[Expr] = []
    for side in (0, 1):
        sizes = [a.type.dims[side] for a in args if a.type.shape == "matrix"]
        longer = [d for d in sizes if not _is_one(d)]
        if any(d is not longer[0] for d in longer):
            both = " and ".join(str(a.type) for a in args if a.type.shape == "matrix")
            raise RuleError(f"{both} do not go together", "write rows and columns the same way")
        dims.append((longer or sizes)[0])
    return tuple(dims)
