"""Typing rules: from an operator and typed arguments to a typed expression.

Each rule is a method named after the `rule` column of operators.py. A rule inserts the
conversions (int to float, scalar to element) that the backends then need not guess.
"""

from __future__ import annotations

from dataclasses import replace

from compll import matrices
from compll.errors import RuleError
from compll.ir import LEVELS, Expr, Pool, Type, walk
from compll.operators import OPERATORS, REDUCTIONS
from compll.static import covers, depends

#: elements of a run that hadamard mixes
MOST_BLOCK = 1 << 20


class Rules:
    """Applies typing rules in a grouped or ungrouped spec; counts random draws and selections."""

    def __init__(self, pool: Pool, grouped: bool, *, encoding: bool) -> None:
        self.pool, self.grouped, self.encoding = pool, grouped, encoding
        #: draws so far: of a rank alone, and alike on all
        self.draws = self.alike = 0
        self.whole = "group" if grouped else "scalar"

    def apply(self, op: str, args: tuple[Expr, ...], name: str) -> Expr:
        """The typed expression `op(args)`; `name` is the binding it stands in."""
        if op in ("top", "filter"):
            return self.selection(op, args, name)
        if op not in ("where", "and", "or", "not", "count", "gather", "indices"):
            self.no_selection(op, args)
        rule = getattr(self, OPERATORS[op].rule)
        return rule(op, args)  # type: ignore[no-any-return]

    # conversions

    def no_selection(self, op: str, args: tuple[Expr, ...]) -> None:
        if any(a.type.dtype == "selection" for a in args):
            raise RuleError(
                f"{op} takes numbers, not a selection", "write x[selection] or count(selection)"
            )

    def real(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, tuple(self.number(a, "float") for a in args))

    def power(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """Small whole powers of data are products, and the half power is the root."""
        a, b = (self.number(x, "float") for x in args)
        exponent = args[1].value if args[1].op == "const" else None
        if a.type.shape == "static" or exponent not in (1, 2, 3, 4, 0.5):
            return self.elementwise(op, (a, b))
        if exponent == 0.5:
            return self.elementwise("sqrt", (a,))
        square = self.elementwise("mul", (a, a)) if exponent > 1 else a
        other = {1: None, 2: None, 3: a, 4: square}[exponent]
        return square if other is None else self.elementwise("mul", (square, other))

    def arithmetic(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, self.same(args))

    def integer(self, op: str, args: tuple[Expr, ...]) -> Expr:
        for a in args:
            if a.type.dtype not in ("int", "bool"):
                hint = "a power is written **" if op == "bitxor" else ""
                raise RuleError(f"{OPERATORS[op].infix or op} takes integers, not {a.type}", hint)
        return self.elementwise(op, tuple(self.number(a, "int") for a in args))

    def rounding(self, op: str, args: tuple[Expr, ...]) -> Expr:
        (x,) = args
        if x.type.dtype in ("int", "bool"):
            return self.number(x, "int")
        out = self.elementwise(op, (x,))
        return self.retyped(out, "int") if out.type.shape == "static" else out

    def cast(self, op: str, args: tuple[Expr, ...]) -> Expr:
        (x,) = (self.number(a, "float") for a in args)
        if x.type.shape == "static":
            x = self.lift(x, self.whole)
        return self.elementwise(op, (x,))

    def exponent(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """Bits of a float32, so a number known before any data is rounded to one."""
        return self.elementwise(op, (self.number(args[0], "float"),), "int")

    def exp2(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if args[0].type.dtype not in ("int", "bool"):
            raise RuleError(f"exp2 takes an integer, not {args[0].type}", "2**x takes any number")
        return self.elementwise(op, (self.number(args[0], "int"),), "float")

    def trit(self, x: Expr) -> Expr:
        """x, over elements, as 0, 1 or 2: truncated; NaN becomes 0."""
        return self.pool.make("trit", (self.number(x, "float"),), Type("int", "n"))

    def whole_number(self, x: Expr, low: int, high: int) -> Expr:
        """x as an integer from low to high: clamped, then truncated; NaN becomes `low`."""
        low_, high_ = self.pool.const(low), self.pool.const(high)
        inside = self.arithmetic("min", (self.arithmetic("max", (x, low_)), high_))
        if inside.type.dtype != "float":
            return inside
        return self.pool.make("trunc", (inside,), Type("int", inside.type.shape, inside.type.of))

    def number(self, x: Expr, dtype: str) -> Expr:
        """x as float or int."""
        if x.type.dtype == dtype or (dtype == "int" and x.type.dtype == "float"):
            return x
        if x.type.dtype in ("str", "selection"):
            raise RuleError(f"a number is needed, not {x.type}")
        return self.pool.make(dtype, (x,), replace(x.type, dtype=dtype))

    def same(self, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Numbers of one dtype: int when all are int or bool, else float."""
        dtype = "float" if any(a.type.dtype == "float" for a in args) else "int"
        return tuple(self.number(a, dtype) for a in args)

    def retyped(self, x: Expr, dtype: str) -> Expr:
        return self.pool.make(x.op, x.args, replace(x.type, dtype=dtype), x.value)

    def lift(self, x: Expr, shape: str, of: str = "") -> Expr:
        """x, constant over the elements of `shape`."""
        if x.type.shape == shape and x.type.of == of:
            return x
        if x.type.shape == "static" and shape == "scalar":
            return x
        if x.type.shape == "group" and shape == "kept":
            raise RuleError(
                "a value per group does not go together with selected elements",
                "compute with all elements first: (x / scale)[kept]",
            )
        return self.pool.make("lift", (x,), Type(x.type.dtype, shape, of))

    def shape(self, args: tuple[Expr, ...]) -> tuple[str, str]:
        """The level at which these arguments meet."""
        if any(a.type.shape == "table" for a in args):
            raise RuleError(
                "a table is no number", "bucket(x, table) and lookup(table, i) read it by element"
            )
        if any(a.type.shape == "matrix" for a in args):
            return self.shape_of_matrix(args)
        top = max(args, key=lambda a: LEVELS[a.type.shape]).type
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
        """Matrices meet matrices and single numbers."""
        for a in args:
            if a.type.shape not in ("matrix", "static", "scalar"):
                raise RuleError(
                    f"{a.type} does not go together with a matrix",
                    "matrix(x, columns) makes one, flat(m) has the elements of one",
                )
        return "matrix", ""

    def elementwise(self, op: str, args: tuple[Expr, ...], dtype: str = "") -> Expr:
        shape, of = self.shape(args)
        if shape == "matrix":
            made = Type(dtype or args[-1].type.dtype, shape, of, matrices.meet(args))
            return self.pool.make(op, args, made)
        if shape == "static" and not covers(op):
            raise RuleError(f"{op} needs data", "it cannot apply to constants")
        lifted = tuple(self.lift(a, shape, of) for a in args)
        return self.pool.make(op, lifted, Type(dtype or args[-1].type.dtype, shape, of))

    def condition(self, x: Expr) -> Expr:
        """x as a bool; a selection stands for `is selected`."""
        if x.type.dtype == "selection":
            return self.pool.make("in", (), Type("bool", "n"), x.value)
        if x.type.dtype == "bool":
            return x
        zero = self.number(self.pool.const(0), "float" if x.type.dtype == "float" else "int")
        return self.elementwise("ne", (x, zero), "bool")

    # conditions

    def compare(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if all(a.type.dtype == "str" for a in args):
            return self.elementwise(op, args, "bool")
        return self.elementwise(op, self.same(args), "bool")

    def logic(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, tuple(self.condition(a) for a in args), "bool")

    def test(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, (self.number(args[0], "float"),), "bool")

    def where(self, op: str, args: tuple[Expr, ...]) -> Expr:
        c, (a, b) = self.condition(args[0]), self.same(args[1:])
        self.no_selection(op, args[1:])
        return self.elementwise("where", (c, a, b))

    def choose(self, op: str, args: tuple[Expr, ...]) -> Expr:
        c = self.condition(args[0])
        a, b = self.same(args[1:])
        shape, _ = self.shape((c, a, b))
        if shape not in ("static", "scalar"):
            return self.elementwise("where", (c, a, b))
        return self.elementwise("choose", (c, a, b))

    def clip(self, op: str, args: tuple[Expr, ...]) -> Expr:
        x, low, high = args
        return self.arithmetic("min", (self.arithmetic("max", (x, low)), high))

    # tables

    def table(self, op: str, args: tuple[Expr, ...], size: Expr, less: int) -> Expr:
        """A table over elements `args`, of as many values as `size` says, less a few."""
        self.whole_tensor(op)
        if size.op != "const" or not isinstance(size.value, int) or not 2 <= size.value <= 4096:
            raise RuleError(
                f"{op}: the size of a table is a whole number from 2 to 4096",
                "it must follow from the parameters alone",
            )
        if any(a.type.shape != "n" for a in args):
            raise RuleError(f"{op} takes elements first, not {args[0].type}")
        made = Type("float", "table", str(size.value - less))
        return self.pool.make(op, args, made, size.value)

    def quantiles(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.table(op, (self.number(args[0], "float"),), args[1], 1)

    def mean_by(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if args[0].type.dtype != "int":
            raise RuleError(f"mean_by takes integers first, not {args[0].type}", "made by bucket()")
        return self.table(op, (args[0], self.number(args[1], "float")), args[2], 0)

    def need_table(self, op: str, x: Expr) -> None:
        if x.type.shape != "table":
            raise RuleError(f"{op} takes a table, not {x.type}", "quantiles and mean_by make one")

    def bucket(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.need_table(op, args[1])
        x = self.lift(self.elements(op, self.number(args[0], "float")), "n")
        return self.pool.make(op, (x, args[1]), Type("int", "n"))

    def lookup(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.need_table(op, args[0])
        if args[1].type.dtype != "int":
            raise RuleError(f"lookup takes an integer, not {args[1].type}")
        index = self.lift(self.elements(op, args[1]), "n")
        return self.pool.make(op, (args[0], index), Type("float", "n"))

    def elements(self, op: str, x: Expr) -> Expr:
        if x.type.shape not in ("n", "scalar", "static"):
            raise RuleError(f"{op} reads a table for every element, not for {x.type}")
        return x

    # matrices

    def matrices(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if self.grouped:
            raise RuleError("a grouped spec has no matrices", "remove `group:`")
        if op == "matrix":
            x, cols = self.number(args[0], "float"), args[1]
            size = self.pool.make("param", (), Type("int", "static"), "n")
            rows = self.rounding("ceil", (self.real("div", (size, cols)),))
            return matrices.matrix(self.pool, x, rows, cols)
        whole = [self.number(a, "float") if a.type.shape == "matrix" else a for a in args]
        if op == "take_columns":
            whole[1] = args[1]
        return matrices.RULES[op](self.pool, *whole)

    def chosen(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if not self.encoding:
            raise RuleError("positions are chosen in encode", "put the columns into the payload")
        self.draws += 1
        return matrices.chosen(self.pool, args[0], args[1], self.draws - 1)

    # reductions

    def reduce(self, op: str, args: tuple[Expr, ...]) -> Expr:
        raise RuleError(
            "reduce takes the name of a reduction first", f"one of {', '.join(REDUCTIONS)}"
        )

    def extreme(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if len(args) == 2:
            return self.arithmetic(op, args)
        return self.reduction(op, args)

    def reduction(self, op: str, args: tuple[Expr, ...]) -> Expr:
        x = self.number(args[0], "float")
        self.need_elements(op, x)
        if op in ("min", "max"):
            return self.total(op, x)
        if len(args) == 2:
            return self.moments(op, *self.masked(x, self.condition(args[1])))
        return self.moments(op, x, self.size(x))

    def masked(self, x: Expr, c: Expr) -> tuple[Expr, Expr]:
        """x where c holds and zero elsewhere, and for how many elements it holds."""
        zero = self.number(self.pool.const(0), "float")
        held = self.elementwise("where", (c, x, zero))
        if held.type.shape == "matrix":
            raise RuleError("a condition chooses elements, not those of a matrix")
        return held, self.count("count", (self.lift(c, held.type.shape, held.type.of),))

    def moments(self, op: str, x: Expr, size: Expr) -> Expr:
        """sum, mean, std or norm2 of x, of which `size` elements count."""
        if op == "sum":
            return self.total(op, x)
        if op == "mean":
            return self.elementwise("div", (self.total("sum", x), size))
        squares = self.total("sum", self.elementwise("mul", (x, x)))
        if op == "norm2":
            return self.elementwise("sqrt", (squares,))
        mean = self.elementwise("div", (self.total("sum", x), size))
        spread = self.elementwise(
            "sub", (self.elementwise("div", (squares, size)), self.elementwise("mul", (mean, mean)))
        )
        zero = self.number(self.pool.const(0), "float")
        return self.elementwise("sqrt", (self.elementwise("max", (spread, zero)),))

    def total(self, op: str, x: Expr) -> Expr:
        if x.type.shape == "kept":
            self.whole_tensor(f"{op} of selected elements")
        shape = self.whole if x.type.shape == "n" else "scalar"
        return self.pool.make(f"reduce_{op}", (x,), Type("float", shape))

    def size(self, x: Expr) -> Expr:
        """Number of elements that a reduction of x runs over, as a float."""
        if x.type.shape == "kept":
            return self.number(
                self.pool.make("count_kept", (), Type("int", "scalar"), x.type.of), "float"
            )
        if x.type.shape == "matrix":
            return self.number(self.arithmetic("mul", x.type.dims), "float")
        if self.grouped:
            return self.pool.make("group_size", (), Type("float", "group"))
        return self.number(self.pool.make("param", (), Type("int", "static"), "n"), "float")

    def need_elements(self, op: str, x: Expr) -> None:
        if x.type.shape not in ("n", "kept", "matrix"):
            raise RuleError(f"{op} of {x.type}: it reduces elements, and this is one value already")

    def count(self, op: str, args: tuple[Expr, ...]) -> Expr:
        (x,) = args
        if x.type.dtype == "selection":
            self.whole_tensor("count of a selection")
            return self.pool.make("count_kept", (), Type("int", "scalar"), x.value)
        self.need_elements(op, x)
        if x.op == "ge" and x.args[1].op == "lift" and x.args[1].args[0].op == "adjust":
            adjusted = x.args[1].args[0]
            if adjusted.args[0] is x.args[0]:
                # adjust has counted just these elements
                return self.pool.make("adjusted_count", (adjusted,), Type("float", "scalar"))
        ones = self.number(self.number(self.condition(x), "int"), "float")
        return self.total("sum", ones)

    # quantiles

    def probit(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.real(op, (self.static(op, args[0]),))

    def gamma_above(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.need_one_number(op, args)
        return self.real(op, args)

    def pareto_above(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """With q = (mean / std)**2: shape (q - 1) / 2, scale mean * (q + 1) / 2 by moments."""
        self.need_one_number(op, args)
        mean, std, p = (self.number(a, "float") for a in args)
        ratio = self.real("div", (mean, std))
        q = self.real("mul", (ratio, ratio))
        one, two = (self.pool.const(c) for c in (1.0, 2.0))
        less, more = self.real("sub", (q, one)), self.real("add", (q, one))
        rest = self.real("sub", (one, self.real("pow", (p, self.real("div", (less, two))))))
        return self.real("mul", (mean, self.real("mul", (rest, self.real("div", (more, less))))))

    def need_one_number(self, op: str, args: tuple[Expr, ...]) -> None:
        for a in args:
            if a.type.shape not in ("static", "scalar"):
                raise RuleError(f"{op} takes numbers of the whole tensor, not {a.type}")

    def iterate(self, op: str, args: tuple[Expr, ...]) -> Expr:
        raise AssertionError("check.py unrolls iterate")

    # random numbers and selection

    def random(self, op: str, args: tuple[Expr, ...]) -> Expr:
        low, high = (self.number(a, "float") for a in args)
        if not self.encoding:
            raise RuleError(
                "random numbers are drawn in encode", "put what was drawn into the payload"
            )
        u = self.pool.make("uniform", (), Type("float", "n"), self.draws)
        self.draws += 1
        return self.stretched(u, low, high)

    def stretched(self, u: Expr, low: Expr, high: Expr) -> Expr:
        """A draw in [0, 1) as one in [low, high)."""
        if (
            low.op == "float"
            and low.args[0].value == 0
            and high.op == "float"
            and high.args[0].value == 1
        ):
            return u
        width = self.elementwise("sub", (high, low))
        return self.elementwise("add", (low, self.elementwise("mul", (width, u))))

    def shared(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if self.grouped:
            raise RuleError("a grouped spec has no draws that ranks share", "remove `group:`")
        if not self.encoding:
            raise RuleError("shared draws are made in encode", "decode knows them by their names")
        low, high = (self.number(a, "float") for a in args)
        u = self.pool.make("shared", (), Type("float", "n"), self.alike)
        self.alike += 1
        return self.stretched(u, low, high)

    def hadamard(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if self.grouped:
            raise RuleError("a grouped spec has no transforms", "remove `group:`")
        x, block = self.number(args[0], "float"), args[1].value
        if x.type.shape != "n":
            raise RuleError(f"hadamard takes elements, not {x.type}")
        if type(block) is not int or block & (block - 1) or not 2 <= block <= MOST_BLOCK:
            raise RuleError(
                f"hadamard: a block is a power of two from 2 to {MOST_BLOCK}",
                "it must follow from the parameters alone",
            )
        return self.pool.make(op, (x,), Type("float", "n"), block)

    def whole_tensor(self, op: str) -> None:
        if self.grouped:
            raise RuleError(
                f"{op} looks at the whole tensor, which a grouped spec does not",
                "remove `group:`, or use reductions",
            )
        if not self.encoding:
            raise RuleError(f"{op} belongs in encode", "decode sees the payload only")

    def static(self, op: str, x: Expr) -> Expr:
        if x.type.shape != "static":
            raise RuleError(
                f"{op}: the size must be known before any data, and {x.type} is not",
                "compute it from n and parameters",
            )
        return self.number(x, "float")

    def sample(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.whole_tensor(op)
        x = self.number(args[0], "float")
        if x.type.shape != "n":
            raise RuleError(f"sample takes elements, not {x.type}")
        return self.pool.make("sample", (x, self.static(op, args[1])), Type("float", "sample"))

    def kth_largest(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.whole_tensor(op)
        x, k = self.number(args[0], "float"), self.number(args[1], "float")
        if x.type.shape not in ("n", "sample"):
            raise RuleError(f"kth_largest takes elements or a sample, not {x.type}")
        if k.type.shape not in ("static", "scalar"):
            raise RuleError(f"k is one number, not {k.type}")
        return self.pool.make(op, (x, k), Type("float", "scalar"))

    def adjust(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.whole_tensor(op)
        x, *rest = (self.number(a, "float") for a in args)
        if x.type.shape != "n" or any(a.type.shape not in ("static", "scalar") for a in rest):
            raise RuleError("adjust takes elements first, then six numbers")
        return self.pool.make(op, (x, *rest), Type("float", "scalar"))

    def bisect(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.whole_tensor(op)
        x, *rest = (self.number(a, "float") for a in args)
        if x.type.shape != "n" or any(a.type.shape not in ("static", "scalar") for a in rest):
            raise RuleError("bisect takes elements first, then five numbers")
        return self.pool.make(op, (x, *rest), Type("float", "scalar"))

    def selection(self, op: str, args: tuple[Expr, ...], name: str) -> Expr:
        if op == "top" or not self.encoding:
            self.whole_tensor(op)
        n = self.pool.make("param", (), Type("int", "static"), "n")
        limit = self.static(op, args[1] if len(args) == 2 else n)
        if "step" in depends(limit):
            raise RuleError(
                f"{op}: the bound must hold at every step", "compute it from n and parameters"
            )
        key = self.number(args[0], "float") if op == "top" else self.condition(args[0])
        if key.type.shape != "n":
            raise RuleError(f"{op} selects among elements, and {key.type} is none")
        if any(e.op == "in" for e in walk(key)):
            raise RuleError("a selection cannot depend on another selection")
        return self.pool.make(op, (key, limit), Type("selection", "n"), name)

    def drawn(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """At least one element, so that a payload of them can tell what is not finite."""
        self.whole_tensor(op)
        count = self.extreme("max", (self.pool.const(1), self.static(op, args[0])))
        if "step" in depends(count):
            raise RuleError(
                f"{op}: the number must hold at every step", "compute it from n and parameters"
            )
        return self.pool.make(op, (count, count), Type("selection", "n"))

    def need_selection(self, op: str, x: Expr) -> str:
        if x.type.dtype != "selection":
            raise RuleError(f"{op} takes a selection, not {x.type}", "made by top() or filter()")
        return str(x.value)

    def indices(self, op: str, args: tuple[Expr, ...]) -> Expr:
        name = self.need_selection(op, args[0])
        return self.pool.make("indices", (), Type("int", "kept", name), name)

    def gather(self, op: str, args: tuple[Expr, ...]) -> Expr:
        name = self.need_selection("x[...]", args[1])
        if args[0].type.shape != "n" or args[0].type.dtype == "selection":
            raise RuleError(f"{args[0].type} has no elements to select")
        return self.pool.make("gather", (args[0],), Type(args[0].type.dtype, "kept", name), name)

    def scatter(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if self.encoding:
            raise RuleError("scatter belongs in decode")
        index, value = args[0], self.number(args[1], "float")
        if (
            index.op not in ("field", "indices")
            or index.type.dtype != "int"
            or index.type.shape != "kept"
        ):
            raise RuleError(
                "scatter takes a payload field of indices first, or those of a drawn selection"
            )
        if value.type.shape == "kept" and value.type.of != index.type.of:
            raise RuleError("indices and values belong to different selections")
        lifted = self.lift(value, "kept", index.type.of)
        return self.pool.make("scatter", (index, lifted), Type("float", "n"))

    def spread(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """check_spread.py sees to it that the condition is that of the values' selection."""
        if self.encoding:
            raise RuleError("spread belongs in decode")
        condition, values = self.condition(args[0]), self.number(args[1], "float")
        if condition.type.shape != "n":
            raise RuleError(f"spread takes a condition of every element first, not {args[0].type}")
        if values.type.shape != "kept":
            raise RuleError(
                f"spread takes values of selected elements, not {args[1].type}",
                "where(c, a, b) takes values of all elements",
            )
        return self.pool.make(op, (condition, values), Type("float", "n"), values.type.of)
