"""Stage 3, expressions: names resolved, operators typed, `iterate` unrolled.

[Note: errors] A wrong expression is reported once, where it stands, and has the value ERROR. A call
with such an argument is another, without a report, so all mistakes that do not depend on one
another are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from compll.errors import Problems, RuleError, Span
from compll.frontend import check_arrays, check_names, check_spread
from compll.frontend.check_sizes import Sizes
from compll.frontend.operators import CONSTANTS, OPERATORS, RESERVED, SELECTING
from compll.frontend.rule_elements import Rules
from compll.frontend.rules import apply
from compll.frontend.spec import ANY, Chosen, ParamValue, Spec
from compll.frontend.syntax import Call, Name, Number, Syntax, Word
from compll.ir.expr import Expr, Pool, Type, rebuild, walk
from compll.ir.module import Field, Selection
from compll.ir.static import depends, evaluate

ERROR = Expr("error", (), Type("error", "error"))
#: operators with arguments that must be integers
TAKES_WHOLE = (
    "quantiles", "sum_by", "hadamard", "matrix", "random_matrix", "ones",
    "top_columns", "place_columns", "exp2",
    "bitand", "bitor", "bitxor", "shl", "shr",
)  # fmt: skip
#: operators whose last argument is a number of elements, with their number of arguments
COUNTS = {"top": 2, "filter": 2, "drawn": 1, "sample": 2, "kth_largest": 2, "top_columns": 2}
EXACT = ("float", "add", "sub", "mul", "neg", "abs", "min", "max", "pow")
#: operators on rows of a matrix whose last argument is a number of columns
ROWWISE = ("top_columns", "place_columns")
#: rounds of an `iterate`; each copies its expression
MOST_ROUNDS = 32


class Expressions:
    """Types expressions of one spec; problems are recorded, each once."""

    def __init__(
        self, spec: Spec, params: Mapping[str, ParamValue], problems: Problems, pool: Pool
    ) -> None:
        self.spec, self.params, self.problems, self.pool = spec, params, problems, pool
        #: names whose definition was wrong, so that an unknown one is no second mistake
        self.broken: set[str] = set(spec.broken)
        self.selections: dict[str, Selection] = {}
        self.sizes = Sizes(params)
        #: values of `iterate` after each round, by names for people
        self.turns: dict[str, Expr] = {}
        self.rules = Rules(self.pool, False, encoding=True)
        #: names of encode that need no data
        self.static: set[str] = set()
        #: the payload fields that decode sees, but for wrong ones
        self.fields: dict[str, Field] = {}
        #: names that the current section defines
        self.order: dict[str, Span] = {}
        #: the name whose definition is read
        self.current = ""

    def globals(self) -> dict[str, Expr]:
        env = {name: self.pool.const(value) for name, value in CONSTANTS.items()}
        for name in ("n", "step"):
            env[name] = self.pool.make("param", (), Type("int", "static"), name)
        kinds = {p.name: p.type for p in self.spec.params}
        for name, kind in kinds.items():
            env[name] = self.pool.make("param", (), Type(kind, "static"), name)
        return env

    def excused(self, name: str) -> bool:
        """True if an unknown name is not reported, because its definition was wrong."""
        return bool(self.broken & {name, ANY})

    def constant(self, syntax: Syntax) -> ParamValue | None:
        """A value that must depend on the parameters alone."""
        return self.known(syntax, self.globals())

    def settle(self, choice: Chosen) -> str:
        """The choice of a section, decided by the parameters."""
        holds = True if choice.condition is None else self.constant(choice.condition)
        return choice.value if holds else choice.other

    def known(self, syntax: Syntax, env: Mapping[str, Expr]) -> ParamValue | None:
        """A value of the names in `env` that must depend on the parameters alone."""
        expr = self.expr(syntax, env, "")
        if expr is ERROR:
            return None
        if expr.type.shape != "static" or depends(expr) & {"n", "step"}:
            self.problems.add(
                syntax.span,
                "this must follow from the parameters alone",
                "n, step and data are not known yet",
            )
            return None
        value: int | float | bool | str = evaluate(expr, self.params)
        return value

    def settled(self, value: Expr) -> Expr:
        """A static value with the parameters replaced by their values."""

        def change(e: Expr) -> Expr | None:
            known = e.op == "param" and e.value in self.params
            return self.pool.const(self.params[e.value]) if known else None

        return rebuild(self.pool, value, change) if value.type.shape == "static" else value

    @staticmethod
    def constant_of_params(value: Expr) -> bool:
        """True if a binding of encode is static and does not depend on the step, so that decode
        knows it too."""
        return value.op == "literal" or (
            value.type.shape == "static" and "step" not in depends(value)
        )

    def expr(
        self, tree: Syntax, env: Mapping[str, Expr], name: str, *, decoding: bool = False
    ) -> Expr:
        """The typed expression, or ERROR with the reason recorded (once)."""
        if isinstance(tree, Number):
            return self.pool.const(tree.value)
        if isinstance(tree, Name):
            return self.name(tree, env, decoding)
        assert isinstance(tree, Call), "texts stand in comparisons only"
        try:
            value = self.call(tree, env, name, decoding)
            return value if value is ERROR else self.sizes.bounded(value)
        except RuleError as error:
            self.problems.add(tree.span, str(error), error.hint)
            return ERROR

    def call(self, tree: Call, env: Mapping[str, Expr], name: str, decoding: bool) -> Expr:
        """The value of a call; ERROR if an argument is wrong. Raises RuleError."""
        if any(isinstance(a, Word) for a in tree.args):
            sides = [self.expr(a, env, name) for a in tree.args if not isinstance(a, Word)]
            if ERROR in sides:
                return ERROR
            found = check_names.equal(tree, self.spec, self.params, self.problems)
            return ERROR if found is None else self.pool.const(found)
        if tree.op == "iterate" and len(tree.args) == OPERATORS["iterate"].low:
            return self.iterate(tree, env, name, decoding)
        if tree.op == "whole" and len(tree.args) == 1:
            return self.whole(tree, env, name, decoding)
        if tree.op == "combined" and len(tree.args) == 1:
            return self.combined(tree, env, decoding)
        args = self.call_args(tree, env, name, decoding)
        row = OPERATORS.get(tree.op)
        if row is None:
            raise RuleError(*check_names.unknown_operator(tree.op, env))
        if not row.low <= len(args) <= row.high:
            raise RuleError(f"{tree.op} takes {row.arity}, not {len(args)}", row.about)
        if ERROR in args:
            # a wrong selection has a name and a length all the same
            selects = tree.op in SELECTING and name not in self.selections
            made, limit = Type("selection", "n"), self.pool.const(1)
            return self.pool.make(tree.op, (ERROR, limit), made, name) if selects else ERROR
        value = self.apply(tree, args, name)
        # a decode puts values at the places from which encode took them
        if tree.op == "spread" and value.value in self.selections:
            check_spread.fits(self.pool, value, self.fields, self.selections)
        elif tree.op == "scatter":
            check_spread.places(value, self.fields)
        return value

    def iterate(self, tree: Call, env: Mapping[str, Expr], name: str, decoding: bool) -> Expr:
        """The rounds of `iterate`, unrolled: the next round's value if the condition holds, else
        the last."""
        found = self.rounds(tree, env)
        value, times = (self.expr(t, env, "?", decoding=decoding) for t in tree.args[1:4:2])
        if found is None or ERROR in (value, times):
            named = tree.args[0].name if isinstance(tree.args[0], Name) else ""
            self.expr(tree.args[2], {**env, named: ERROR}, "?", decoding=decoding)
            return ERROR
        variable, most = found
        for turn in range(most):
            following = self.expr(tree.args[2], {**env, variable: value}, "?", decoding=decoding)
            if following is ERROR:
                return ERROR
            more = apply(self.rules, "gt", (times, self.pool.const(turn)), name)
            value = self.choose((more, following, value))
            self.turns[f"{name} after {turn + 1}"] = value
            self.sizes.begin_anew(value)
        return value

    def rounds(self, tree: Call, env: Mapping[str, Expr]) -> tuple[str, int] | None:
        """The name that `iterate` gives to its value, and the most rounds."""
        variable, most = tree.args[0], self.known(tree.args[4], env)
        if not isinstance(variable, Name) or variable.name in {*env, *RESERVED}:
            self.problems.add(
                tree.args[0].span, "iterate first takes a name that nothing else has", "like t"
            )
            return None
        if most is None:
            return None
        if isinstance(most, str) or not 0 <= most <= MOST_ROUNDS:
            self.problems.add(tree.args[4].span, f"from 0 to {MOST_ROUNDS} rounds, not {most}")
            return None
        return variable.name, int(most)

    def whole(self, tree: Call, env: Mapping[str, Expr], name: str, decoding: bool) -> Expr:
        """whole(e): e, its reductions over the tensor, also where others are over groups."""
        held, self.rules.whole = self.rules.whole, "scalar"
        value = self.expr(tree.args[0], env, f"{name}?", decoding=decoding)
        self.rules.whole = held
        if value is ERROR:
            return ERROR
        if decoding:
            raise RuleError("whole belongs in encode")
        if value.type.shape not in ("scalar", "static"):
            hint = "reductions stand within it: whole(max(abs(g)))"
            raise RuleError(f"whole gives one number of the tensor, and this is {value.type}", hint)
        return value

    def choose(self, args: tuple[Expr, ...]) -> Expr:
        """`args[1] if args[0] else args[2]`, decided now if the parameters alone decide it."""
        c = args[0]
        if c.type.dtype == "str":
            self.rules.number(c, "int")  # raises: Python takes any text for true
        if c.type.shape == "static" and not depends(c) & {"n", "step"}:
            return args[1 if evaluate(c, self.params) else 2]
        return apply(self.rules, "choose", args, "")

    def combined(self, tree: Call, env: Mapping[str, Expr], decoding: bool) -> Expr:
        """combined(p): a leaf, since its value comes from all ranks."""
        value = self.expr(tree.args[0], env, "?", decoding=decoding)
        if value is ERROR or self.excused(getattr(tree.args[0], "name", "")):
            return ERROR
        return check_arrays.combined(self.pool, self.spec, tree.args[0], value, decoding)

    def apply(self, tree: Call, args: tuple[Expr, ...], name: str) -> Expr:
        if tree.op == "choose":
            return self.choose(args)
        op = tree.op
        if tree.op in SELECTING and name in self.selections:
            raise RuleError("a binding holds one selection", "give each selection its own name")
        if op in TAKES_WHOLE:
            args = tuple(map(self.exact, args))
        if op == "literal":
            args = tuple(map(self.folded, args))
        if op in ("quantiles", "hadamard"):
            args = (*args[:-1], self.folded(args[-1]))
        if op in ("matrix", "random_matrix", "ones", "drawn", "chosen", "sum_by", *ROWWISE):
            args = tuple(map(self.settled, args))
        if len(args) == COUNTS.get(op):
            self.no_share(op, args[-1])
        return apply(self.rules, op, args, name)

    def no_share(self, op: str, count: Expr) -> None:
        """Refuse a number of elements between 0 and 1: the writer means a share of all elements."""
        if count.type.shape == "static" and not depends(count) & {"n", "step"}:
            number = evaluate(count, self.params)
            if not isinstance(number, str) and 0 < number < 1:
                hint = "a share of all is like max(1, floor(n * ratio))"
                raise RuleError(f"{op} takes a number of elements, not {number:g}", hint)

    def folded(self, value: Expr) -> Expr:
        """A value that depends on the parameters alone, as a literal."""
        if value.type.shape != "static" or depends(value) & {"n", "step"}:
            return value
        return self.pool.const(evaluate(value, self.params))

    def exact(self, value: Expr) -> Expr:
        """An integer literal for a value of integers and parameters, including powers, if it is an
        integer.

        Elsewhere a power is a float: with elements, `q * 2**20` would overflow as an integer.
        """
        if value.type != Type("float", "static") or depends(value) & {"n", "step"}:
            return value
        if not all(e.op in EXACT or (not e.args and e.type.dtype == "int") for e in walk(value)):
            return value
        number = float(evaluate(value, self.params))
        return self.pool.const(int(number)) if abs(number) < 2**53 and number % 1 == 0 else value

    def call_args(
        self, tree: Call, env: Mapping[str, Expr], name: str, decoding: bool
    ) -> tuple[Expr, ...]:
        """The arguments; ERROR for each that is wrong."""
        inner = "" if tree.named and tree.op in SELECTING else "?"
        args = [self.expr(t, env, name + inner, decoding=decoding) for t in tree.args]
        if any(a.op in SELECTING for a in args):
            self.problems.add(tree.span, "a selection needs a name of its own", "kept: top(...)")
        return tuple(ERROR if a.op in SELECTING else a for a in args)

    def name(self, tree: Name, env: Mapping[str, Expr], decoding: bool) -> Expr:
        found = env.get(tree.name)
        if found is None and not self.excused(tree.name):
            self.problems.add(tree.span, *self.unknown(tree, env, decoding))
            if tree.name in {b.name for b in self.spec.update}:
                self.broken.add(tree.name)  # a missing state is not a second error
        return ERROR if found is None else found

    def unknown(self, tree: Name, env: Mapping[str, Expr], decoding: bool) -> tuple[str, str]:
        """Message and hint for an unknown name."""
        name = tree.name
        hint = check_names.beyond_decode(name, self.spec, self.selections, self.static)
        if decoding and hint and name not in self.order:
            return f"decode uses {name!r}, which the payload lacks", hint
        return check_names.unknown(tree, env, self.order, self.current, self.spec)
