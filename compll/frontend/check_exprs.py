"""Stage 3, expressions: names resolved, operators typed, `iterate` unrolled.

[Note: errors] A wrong expression is reported once, where it stands, and has the value ERROR. A call
with such an argument is another, without a report, so all mistakes that do not depend on one
another are told at once.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from compll.errors import Problems, RuleError, Span, nearest
from compll.frontend import check_arrays
from compll.frontend.check_arrays import Sizes
from compll.frontend.operators import (
    CALLABLE,
    CONSTANTS,
    MEANT,
    OPERATORS,
    RESERVED,
    SELECTING,
    SYNONYMS,
    apply,
)
from compll.frontend.rule_context import Context
from compll.frontend.spec import (
    ANY,
    SYMBOLS,
    Call,
    Chosen,
    Name,
    Number,
    Param,
    ParamValue,
    Spec,
    Syntax,
    Word,
    called,
    names,
)
from compll.ir.expr import Expr, Pool, Type
from compll.ir.module import MEAN, REFERENCE, RESIDUAL, Field, Selection
from compll.ir.static import depends, evaluate

# ---- check names --------------------------------------------------------------------------------
# Stage 3, names: each has one meaning. Messages for names without a meaning. Texts, with which
# names of parameters are compared.

Advice = tuple[str, str]
#: arguments of compll.compile besides a spec's parameters
TAKEN = ("name_or_path", "target")


def unknown(
    tree: Name, env: Iterable[str], order: Mapping[str, Span], current: str, spec: Spec
) -> Advice:
    """Message and hint for a name that `env` lacks, in the definition of `current`.

    order: all names of the section being read; those not in `env` are defined later.
    """
    name = tree.name
    if name in order and name == current:
        hint = "a state keeps a value between calls, iterate(...) repeats within one"
        return f"{name!r} is used in its own definition", hint
    if name in order:
        message = f"{name!r} is defined below, in line {order[name].line}"
        return message, "definitions are read in order: put it first"
    if name in {b.name for b in spec.update}:
        return f"{name!r} is no state", "declare it: `state: {" + name + ': "float32[n]"}`'
    if any(name in p.choices for p in spec.params):
        return f"unknown name {name!r}", f"a text is quoted: '{name}'"
    if name in OPERATORS:
        return f"{name!r} is an operator", f"call it with {OPERATORS[name].arity}"
    return f"unknown name {name!r}", nearest(name, env)


#: methods that need states at receivers, and how a spec has them
STATES = "for EF21 and DIANA, see `feedback: difference`"


def beyond_decode(name: str, spec: Spec, selections: Container[str], static: Container[str]) -> str:
    """Hint for a name of encode that decode uses; "" if encode has no such name."""
    if name == "step":
        return "put what depends on the step into the payload"
    if name == "g" or name in {s.name for s in spec.state}:
        hint = "decode sees payload fields and parameters only: receivers keep no states"
        held = name != "g"
        return f"{hint} ({STATES})" if held else hint
    if name in selections:
        return f"store indices({name}) in the payload, and use that field"
    if name not in {b.name for b in spec.encode}:
        return ""
    if name in static:
        return "it depends on the step, which decode does not know"
    if spec.group is None and _drawn_alone(name, spec):
        return "draw it by shared(a, b), which decode knows, too, or add it to `payload:`"
    return "add it to `payload:`"


def _drawn_alone(name: str, spec: Spec) -> bool:
    """True if a binding consists of random draws and parameters only."""
    tree = next(b.value for b in spec.encode if b.name == name)
    allowed = {"n", *CONSTANTS, *(p.name for p in spec.params)}
    return "random" in called(tree) and names(tree) <= allowed


def unknown_operator(op: str, env: Container[str]) -> Advice:
    """Message and hint for a call of an unknown operator."""
    symbol = SYMBOLS.get(op, op)
    if op in env:
        return f"{op!r} is a value, and only operators are called", ""
    if op in MEANT:
        return f"unknown operator {symbol!r}", MEANT[op]
    if op in SYNONYMS:
        return f"unknown operator {symbol!r}", f"did you mean {SYNONYMS[op]!r}?"
    return f"unknown operator {symbol!r}", nearest(op, CALLABLE)


def unique(spec: Spec, problems: Problems) -> None:
    """Report names that are defined twice or reserved."""
    seen: dict[str, Span] = {}
    declared = [(p.name, p.span) for p in spec.params] + [(s.name, s.span) for s in spec.state]
    for name, span in declared + [(b.name, b.span) for b in spec.encode]:
        if name in RESERVED:
            problems.add(
                span, f"{name!r} already has a meaning in the language", "choose another name"
            )
        elif name in seen:
            hint = f"first at line {seen[name].line}"
            if name in {s.name for s in spec.state}:
                hint += "; give its new value another name, and that to `update:`"
            problems.add(span, f"{name!r} is defined twice", hint)
        seen.setdefault(name, span)
    for p in spec.params:
        if p.name in TAKEN:
            message = f"{p.name!r} cannot be given: `compll.compile` has an argument of this name"
            problems.add(p.span, message, "choose another name")
    chosen = {spec.feedback.value, spec.feedback.other}
    kinds = {"error": (RESIDUAL,), "own": (RESIDUAL,), "difference": (REFERENCE, MEAN)}
    for kind in sorted(chosen & kinds.keys()):
        for name in {s.name for s in spec.state}.intersection(kinds[kind]):
            problems.add(
                spec.feedback.span,
                f"`feedback: {kind}` makes the state {name!r} itself",
                "remove it from `state:`",
            )


TEXT_HINT = "like `mode == 'nearest'` of `mode: {type: str, default: nearest, choices: [...]}`"


def equal(
    tree: Call, spec: Spec, params: Mapping[str, ParamValue], problems: Problems
) -> bool | None:
    """True if a parameter equals a text; None, with the reason in `problems`, if they do not
    compare."""
    left, right = tree.args
    other, word = (right, left) if isinstance(left, Word) else (left, right)
    param = _param(other, spec)
    if param is None or not isinstance(word, Word):
        problems.add(tree.span, "a text is compared with a parameter of type str", TEXT_HINT)
        return None
    if param.choices and word.value not in param.choices:
        choices = [str(c) for c in param.choices]
        problems.add(
            word.span, f"parameter {param.name!r} is never {word.value!r}",
            nearest(word.value, choices),
        )  # fmt: skip
        return None
    return (params[param.name] == word.value) == (tree.op == "eq")


def _param(tree: Syntax, spec: Spec) -> Param | None:
    named = (p for p in spec.params if isinstance(tree, Name) and p.name == tree.name)
    return next((p for p in named if p.type == "str"), None)


# ---- check exprs --------------------------------------------------------------------------------

ERROR = Expr("error", (), Type("error", "error"))
#: rounds of an `iterate`; each copies its expression
MOST_ROUNDS = 32


@dataclass(frozen=True)
class Scope:
    """The names that an expression may use, and the context of its rules.

    current: the name that it defines. order: the places of all names of its section, for messages.
    """

    names: Mapping[str, Expr]
    context: Context
    current: str = ""
    order: Mapping[str, Span] = field(default_factory=dict)

    def binding(self, name: str, value: Expr) -> Scope:
        """The scope with one more name."""
        return replace(self, names={**self.names, name: value})


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
        #: names of encode that need no data
        self.static: set[str] = set()
        #: the payload fields that decode sees, but for wrong ones
        self.fields: dict[str, Field] = {}
        #: the context of encode and update
        self.context = self.new_context()

    def new_context(self, *, grouped: bool = False, encoding: bool = True) -> Context:
        """A context in which nothing was drawn yet."""
        shared = self.selections, self.params
        return Context(self.pool, *shared, grouped=grouped, encoding=encoding)

    def scope(self, names: Mapping[str, Expr], current: str = "") -> Scope:
        """The scope of an expression of encode or update, or of a declaration."""
        return Scope(names, self.context, current)

    def globals(self) -> dict[str, Expr]:
        env = {name: self.pool.const(value) for name, value in CONSTANTS.items()}
        kinds = {"n": "int", "step": "int"} | {p.name: p.type for p in self.spec.params}
        for name, kind in kinds.items():
            env[name] = self.pool.make("param", (), Type(kind, "static"), name)
        return env

    def excused(self, name: str) -> bool:
        """True if an unknown name is not reported, because its definition was wrong."""
        return bool(self.broken & {name, ANY})

    def constant(self, syntax: Syntax) -> ParamValue | None:
        """A value that must depend on the parameters alone."""
        return self.number_of(syntax, self.scope(self.globals()))

    def settle(self, choice: Chosen) -> str:
        """The choice of a section, decided by the parameters."""
        holds = True if choice.condition is None else self.constant(choice.condition)
        return choice.value if holds else choice.other

    def number_of(self, syntax: Syntax, scope: Scope) -> ParamValue | None:
        """A value of the scope's names that must depend on the parameters alone."""
        expr = self.expr(syntax, scope)
        if expr is ERROR:
            return None
        if not self.context.constant(expr):
            self.problems.add(
                syntax.span,
                "this must follow from the parameters alone",
                "n, step and data are not known yet",
            )
            return None
        value: int | float | bool | str = evaluate(expr, self.params)
        return value

    @staticmethod
    def constant_of_params(value: Expr) -> bool:
        """True if a binding of encode is static and does not depend on the step, so that decode
        knows it too."""
        return value.op == "literal" or (
            value.type.shape == "static" and "step" not in depends(value)
        )

    def expr(self, tree: Syntax, scope: Scope) -> Expr:
        """The typed expression, or ERROR with the reason recorded (once)."""
        if isinstance(tree, Number):
            return self.pool.const(tree.value)
        if isinstance(tree, Name):
            return self.name(tree, scope)
        assert isinstance(tree, Call), "texts stand in comparisons only"
        try:
            value = self.call(tree, scope)
            return value if value is ERROR else self.sizes.bounded(value)
        except RuleError as error:
            self.problems.add(tree.span, str(error), error.hint)
            return ERROR

    def call(self, tree: Call, scope: Scope) -> Expr:
        """The value of a call; ERROR if an argument is wrong. Raises RuleError."""
        if any(isinstance(a, Word) for a in tree.args):
            return self.equal(tree, scope)
        special = {"iterate": self.iterate, "whole": self.whole, "combined": self.combined}
        row = OPERATORS.get(tree.op)
        if row is not None and row.rule is None and len(tree.args) == row.low:
            return special[tree.op](tree, scope)
        args = self.arguments(tree, scope)
        if row is None:
            raise RuleError(*unknown_operator(tree.op, scope.names))
        if not row.low <= len(args) <= row.high:
            raise RuleError(f"{tree.op} takes {row.arity}, not {len(args)}", row.about)
        if ERROR in args:
            # a wrong selection has a name and a length all the same
            if tree.op not in SELECTING or not scope.context.encoding:
                return ERROR
            wrong = ERROR, self.pool.const(1)
            return self.pool.make(tree.op, wrong, Type("selection", "n"))
        if tree.op == "choose":
            return self.choose(args, scope)
        value = apply(scope.context, tree.op, args)
        # a decode puts values at the places from which encode took them
        if tree.op == "spread" and value.value in self.selections:
            check_arrays.fits(self.pool, value, self.fields, self.selections)
        elif tree.op == "scatter":
            check_arrays.places(value, self.fields)
        return value

    def arguments(self, tree: Call, scope: Scope) -> tuple[Expr, ...]:
        """The arguments; ERROR for each that is wrong."""
        args = [self.expr(t, scope) for t in tree.args]
        if any(a.op in SELECTING for a in args):
            self.problems.add(tree.span, "a selection needs a name of its own", "kept: top(...)")
        return tuple(ERROR if a.op in SELECTING else a for a in args)

    def equal(self, tree: Call, scope: Scope) -> Expr:
        """The comparison of a parameter with a text."""
        if ERROR in [self.expr(a, scope) for a in tree.args if not isinstance(a, Word)]:
            return ERROR
        holds = equal(tree, self.spec, self.params, self.problems)
        return ERROR if holds is None else self.pool.const(holds)

    def iterate(self, tree: Call, scope: Scope) -> Expr:
        """The rounds of `iterate`, unrolled: the next round's value if the condition holds, else
        the last."""
        variable, first, following, times, _ = tree.args
        rounds = self.rounds(tree, scope)
        value, count = self.expr(first, scope), self.expr(times, scope)
        if rounds is None or ERROR in (value, count):
            named = variable.name if isinstance(variable, Name) else ""
            self.expr(following, scope.binding(named, ERROR))
            return ERROR
        assert isinstance(variable, Name)
        for turn in range(rounds):
            after = self.expr(following, scope.binding(variable.name, value))
            if after is ERROR:
                return ERROR
            more = apply(scope.context, "gt", (count, self.pool.const(turn)))
            value = self.choose((more, after, value), scope)
            self.turns[f"{scope.current} after {turn + 1}"] = value
            self.sizes.begin_anew(value)
        return value

    def rounds(self, tree: Call, scope: Scope) -> int | None:
        """The most rounds of `iterate`; None if they or the name of its value are wrong."""
        variable, most = tree.args[0], self.number_of(tree.args[4], scope)
        if not isinstance(variable, Name) or variable.name in {*scope.names, *RESERVED}:
            self.problems.add(
                variable.span, "iterate first takes a name that nothing else has", "like t"
            )
            return None
        if most is not None and (isinstance(most, str) or not 0 <= most <= MOST_ROUNDS):
            self.problems.add(tree.args[4].span, f"from 0 to {MOST_ROUNDS} rounds, not {most}")
            return None
        return None if most is None else int(most)

    def whole(self, tree: Call, scope: Scope) -> Expr:
        """whole(e): e, its reductions over the tensor, also where others are over groups."""
        context = copy.copy(scope.context)
        context.reduced = "scalar"
        value = self.expr(tree.args[0], replace(scope, context=context))
        if value is ERROR:
            return ERROR
        if not context.encoding:
            raise RuleError("whole belongs in encode")
        if value.type.shape not in ("scalar", "static"):
            hint = "reductions stand within it: whole(max(abs(g)))"
            raise RuleError(f"whole gives one number of the tensor, and this is {value.type}", hint)
        return value

    def choose(self, args: tuple[Expr, ...], scope: Scope) -> Expr:
        """`args[1] if args[0] else args[2]`, decided now if the parameters alone decide it."""
        c = args[0]
        if c.type.dtype == "str":
            scope.context.number(c, "int")  # raises: Python takes any text for true
        if scope.context.constant(c):
            return args[1 if evaluate(c, self.params) else 2]
        return apply(scope.context, "choose", args)

    def combined(self, tree: Call, scope: Scope) -> Expr:
        """combined(p): a leaf, since its value comes from all ranks."""
        (name,) = tree.args
        value = self.expr(name, scope)
        if value is ERROR or self.excused(getattr(name, "name", "")):
            return ERROR
        return check_arrays.combined(scope.context, self.spec, name, value)

    def name(self, tree: Name, scope: Scope) -> Expr:
        value = scope.names.get(tree.name)
        if value is None and not self.excused(tree.name):
            self.problems.add(tree.span, *self.unknown(tree, scope))
            if tree.name in {b.name for b in self.spec.update}:
                self.broken.add(tree.name)  # a missing state is not a second error
        return ERROR if value is None else value

    def unknown(self, tree: Name, scope: Scope) -> tuple[str, str]:
        """Message and hint for an unknown name."""
        name = tree.name
        hint = beyond_decode(name, self.spec, self.selections, self.static)
        if not scope.context.encoding and hint and name not in scope.order:
            return f"decode uses {name!r}, which the payload lacks", hint
        return unknown(tree, scope.names, scope.order, scope.current, self.spec)
