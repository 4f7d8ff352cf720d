"""Typing rules of selections: thresholds, selections, and uses of selected elements."""

from __future__ import annotations

from dataclasses import replace

from compll.errors import RuleError
from compll.frontend.rule_conversions import ROWS
from compll.frontend.rule_elements import Rules
from compll.ir.expr import Expr, Type, walk
from compll.ir.static import depends


class SelectionRules:
    """Rules of thresholds and selections. The size of a selection may depend on data."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.pool = rules, rules.pool

    # thresholds

    def sample(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.rules.whole_tensor(op)
        x = self.rules.number(args[0], "float")
        if x.type.shape != "n":
            raise RuleError(f"sample takes elements, not {x.type}")
        return self.pool.make(
            "sample", (x, self.rules.static(op, args[1])), Type("float", "sample")
        )

    def kth_largest(self, op: str, args: tuple[Expr, ...]) -> Expr:
        self.rules.whole_tensor(op)
        x, k = self.rules.number(args[0], "float"), self.rules.number(args[1], "float")
        if x.type.shape not in ("n", "sample"):
            raise RuleError(f"kth_largest takes elements or a sample, not {x.type}")
        if k.type.shape not in ("static", "scalar"):
            raise RuleError(f"k is one number, not {k.type}")
        return self.pool.make(op, (x, k), Type("float", "scalar"))

    def search(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """adjust and bisect: elements first, then the numbers of the search."""
        self.rules.whole_tensor(op)
        x, *rest = (self.rules.number(a, "float") for a in args)
        if x.type.shape != "n" or any(a.type.shape not in ("static", "scalar") for a in rest):
            raise RuleError(f"{op} takes elements first, then {len(rest)} numbers")
        return self.pool.make(op, (x, *rest), Type("float", "scalar"))

    # selections

    def selection(self, op: str, args: tuple[Expr, ...], name: str) -> Expr:
        if op == "top" or not self.rules.encoding:
            self.rules.whole_tensor(op, ROWS)
        n = self.pool.make("param", (), Type("int", "static"), "n")
        limit = self.rules.static(op, args[1] if len(args) == 2 else n)
        if "step" in depends(limit):
            raise RuleError(
                f"{op}: the bound must hold at every step",
                "what varies is the threshold: filter(x >= kth_largest(x, k), bound)",
            )
        key = self.rules.number(args[0], "float") if op == "top" else self.rules.condition(args[0])
        if key.type.shape == "kept" and self.rules.is_drawn(key.type.of):
            limit = self.rules.arithmetic("min", (limit, self.rules.selections[key.type.of].limit))
        elif key.type.shape != "n":
            raise RuleError(*self.no_elements(op, args[0]))
        if any(e.op == "in" for e in walk(key)):
            raise RuleError("a selection cannot depend on another selection")
        return self.pool.make(op, (key, limit), replace(key.type, dtype="selection"), name)

    @staticmethod
    def no_elements(op: str, x: Expr) -> tuple[str, str]:
        """Message and hint for a value that a selection cannot choose from."""
        if x.type.shape == "kept":
            own = f"this has those of {x.type.of!r}"
            message = f"{op} selects among all elements or drawn ones, and {own} alone"
            hint = f"one filter with both conditions: what selects {x.type.of!r} and ..."
            return message, hint if op == "filter" else f"{hint}, of x >= kth_largest(x, k)"
        if x.type.shape == "matrix":
            return f"{op} selects among elements, not those of a matrix", ROWS
        kinds = {"group": "one number of a group", "table": "a table", "sample": "a sample"}
        message = (
            f"{op} selects among elements, and this is {kinds.get(x.type.shape, 'one number')}"
        )
        return message, "x >= kth_largest(x, k) has one truth value for each" * (op == "filter")

    def drawn(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """A selection of at least one element, so that a payload of them can show a NaN."""
        self.rules.whole_tensor(op)
        count = self.rules.arithmetic("max", (self.pool.const(1), self.rules.static(op, args[0])))
        if "step" in depends(count):
            raise RuleError(
                f"{op}: the number must hold at every step", "compute it from n and parameters"
            )
        return self.pool.make(op, (count, count), Type("selection", "n"))

    # selected elements

    def need_selection(self, op: str, x: Expr) -> str:
        if x.type.dtype != "selection":
            raise RuleError(f"{op} takes a selection, not {x.type}", "made by top() or filter()")
        return str(x.value)

    def indices(self, op: str, args: tuple[Expr, ...]) -> Expr:
        name = self.need_selection(op, args[0])
        return self.pool.make("indices", (), Type("int", "kept", name), name)

    def gather(self, op: str, args: tuple[Expr, ...]) -> Expr:
        name, x, made = self.need_selection("x[...]", args[1]), args[0].type, args[1].type
        if (x.shape, x.of) != (made.shape, made.of) or x.dtype == "selection":
            hint = f"of those of {made.of!r}: x[{made.of}][{name}]" if made.of else ""
            raise RuleError(f"{x} has no elements to select", hint)
        return self.pool.make("gather", (args[0],), Type(args[0].type.dtype, "kept", name), name)

    def scatter(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if self.rules.encoding:
            raise RuleError(
                "scatter belongs in decode", "where(selection, a, b) changes a state's elements"
            )
        index, value = args[0], self.rules.number(args[1], "float")
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
        lifted = self.rules.lift(value, "kept", index.type.of)
        known = self.rules.selections.get(index.type.of)
        within = known.of if known is not None else ""
        made = Type("float", "kept" if within else "n", within)
        return self.pool.make("scatter", (index, lifted), made)

    def spread(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """A spread. check_spread.py checks that the condition is that of the values' selection."""
        if self.rules.encoding:
            raise RuleError("spread belongs in decode")
        condition, values = self.rules.condition(args[0]), self.rules.number(args[1], "float")
        if condition.type.shape != "n":
            raise RuleError(f"spread takes a condition of every element first, not {args[0].type}")
        if values.type.shape != "kept":
            raise RuleError(
                f"spread takes values of selected elements, not {args[1].type}",
                "where(c, a, b) takes values of all elements",
            )
        return self.pool.make(op, (condition, values), Type("float", "n"), values.type.of)
