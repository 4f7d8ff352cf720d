"""The language of routines: a small subset of Python, which printers read as instructions.

A routine's statements are assignments (to names, elements and tuples of these), `if`, `while`,
`for`, calls, and a `return` at its end. If a condition or the items of a loop are known while the
routine is read, one branch is read, or the body once for each item. Expressions are Python's, of
Numbers (see numerics/traced.py), so operations and other routines are called by name; `&` and `|`
join conditions.

Integers have 64 bits and wrap around. An element of an array becomes such a number on a load, and
is truncated by a store. `array[i, 16]` is a vector of 16 elements from i on, each of at least 32
bits. `array + i` begins i elements later, and `array.of(I64)` has the same bytes.

Parameters behind `*` are known while the routine is read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from functools import cached_property
from textwrap import dedent
from typing import Any, NamedTuple, Protocol, cast

from compll.errors import UsageError
from compll.numerics import traced
from compll.numerics.traced import Number, convert


class Machine(traced.Machine, Protocol):
    """A printer's instructions, with variables and branches.

    It emits `load`, `store`, `moved`, `local`, `splat`, `clear` and `copy`, too, of the arguments
    that Array and Scope give.
    """

    def variable(self, kind: str, value: Any) -> Any:
        """A new variable with this value."""

    def get(self, variable: Any) -> Any:
        """A variable's value."""

    def set(self, variable: Any, value: Any) -> None:
        """Assign a value."""

    def branch(self, condition: Any, then: Callable[[], None], other: Callable[[], None]) -> None:
        """A branch, by a condition."""

    def repeat(self, condition: Callable[[], Any], body: Callable[[], None]) -> None:
        """A body as long as a condition holds."""

    def loop(self, start: Any, stop: Any, step: int, body: Callable[[Any], None]) -> None:
        """A body for start, start + step, ... below stop."""

    def call(self, routine: Routine, args: list[Any], constants: dict[str, Any]) -> Any:
        """A call of a routine that is a function."""


# ---- values -------------------------------------------------------------------------------------


def lifted(machine: traced.Machine, value: Any) -> Number:
    """A number, or one of Python as a constant."""
    if isinstance(value, Number):
        return value
    kind = "bool" if isinstance(value, bool) else "i64"
    return Number(machine, machine.const(kind, value, None), kind)


class Array:
    """Elements in memory."""

    def __init__(self, machine: Machine, base: Any, element: str) -> None:
        self.machine, self.base, self.element = machine, base, element

    def emit(self, op: str, index: Any, *more: Any) -> Any:
        """An instruction of the array, its elements' name and an index."""
        place = lifted(self.machine, index).value
        return self.machine.emit(op, "", self.base, self.element, place, *more)

    def __getitem__(self, index: Any) -> Any:
        i, lanes = index if isinstance(index, tuple) else (index, 0)
        small = lanes and self.element != "i64"
        kind = "f32" if self.element == "f32" else "i32" if small else "i64"
        return Number(self.machine, self.emit("load", i, lanes), kind)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.emit("store", index, lifted(self.machine, value).value)

    def __add__(self, index: Any) -> Any:
        return Array(self.machine, self.emit("moved", index), self.element)

    def of(self, kind: type[Array]) -> Any:
        """The same bytes as elements of another kind."""
        return Array(self.machine, self.base, kind.__name__.lower())

    def clear(self, count: Any) -> None:
        """Set elements to 0."""
        self.emit("clear", count)

    def copy(self, source: Array, count: Any) -> None:
        """Copy elements of an array of the same kind."""
        self.emit("copy", count, source.base)


class U8(Array):
    """Bytes."""


class U16(Array):
    """Integers of 16 bits that are not negative."""


class I32(Array):
    """Integers of 32 bits."""


class I64(Array):
    """Integers of 64 bits."""


class F32(Array):
    """float32."""


# a scope has these two, since they need its machine


def local(kind: type[Array], count: int) -> Any:
    """A local array."""
    raise NotImplementedError


def splat(x: Any, lanes: int) -> Any:
    """A vector of a number."""
    raise NotImplementedError


#: a range whose items are known
unrolled = range


def _operation(op: str, kind: str = "") -> Callable[..., Any]:
    return lambda x: x.emit(op, kind, x)


#: of an integer: set bits, zeros above the highest, and below the lowest; its bytes in reverse
popcount, clz, ctz, swapped = map(_operation, ("popcount", "clz", "ctz", "swapped"))
#: conditions that mostly hold, and that mostly do not
likely, unlikely = map(_operation, ("likely", "unlikely"))
#: of a vector: all lanes joined by "or", their sum, running sums, the last one
any_bits, sum_of, running, last = map(_operation, ("any_bits", "sum_of", "running", "last"))
#: a vector of truths as bits
mask = _operation("mask", "i64")


def truth(x: Any) -> Any:
    """1 if a condition holds, else 0."""
    return convert(x, "i64")


# ---- routines -----------------------------------------------------------------------------------


class Routine:
    """A function that printers read. inline: printed where it is called, else as a function."""

    def __init__(self, of: Callable[..., Any], *, inline: bool) -> None:
        self.of, self.inline, self.name = of, inline, of.__name__
        self.params = of.__code__.co_varnames[: of.__code__.co_argcount]
        #: of each parameter: "int", or the name of an array's class
        kinds = (of.__annotations__[name] for name in self.params)
        self.kinds = [str(getattr(kind, "__name__", kind)) for kind in kinds]
        self.result = of.__annotations__["return"] not in (None, "None")

    @cached_property
    def body(self) -> list[ast.stmt]:
        """The statements. Raises UsageError if the source is missing."""
        try:
            (tree,) = ast.parse(dedent(inspect.getsource(self.of))).body
        except OSError as why:
            place = f"{self.of.__module__}.{self.name}"
            raise UsageError(f"{place} is read from its source: install compll with it") from why
        assert isinstance(tree, ast.FunctionDef)
        return tree.body

    @cached_property
    def assigned(self) -> set[str]:
        """The names that statements assign to."""
        names = (n for s in self.body for n in ast.walk(s) if isinstance(n, ast.Name))
        return {n.id for n in names if isinstance(n.ctx, ast.Store)}

    def __call__(self, *args: Any, **constants: Any) -> Any:
        machine = next(a.machine for a in args if hasattr(a, "machine"))
        if self.inline:
            return self.read(machine, args, constants)
        values = [a.base if isinstance(a, Array) else lifted(machine, a).value for a in args]
        return Number(machine, machine.call(self, values, constants), "i64")

    def printed(self, machine: Machine, values: Iterable[Any], constants: dict[str, Any]) -> Any:
        """Print the body of a function with these parameters; its result."""
        args = [
            Number(machine, value, "i64") if kind == "int" else Array(machine, value, kind.lower())
            for value, kind in zip(values, self.kinds, strict=True)
        ]
        result = self.read(machine, args, constants)
        return lifted(machine, result).value if self.result else None

    def read(self, machine: Machine, args: Iterable[Any], constants: dict[str, Any]) -> Any:
        """Print the body; its result."""
        scope = Scope(machine, self.of.__globals__, constants)
        for name, value in zip(self.params, args, strict=True):
            (scope.assign if name in self.assigned else scope.bind)(name, value)
        *body, end = self.body
        if not isinstance(end, ast.Return):
            return scope.block(self.body)
        scope.block(body)
        return end.value and scope.value(end.value)


def routine(of: Callable[..., Any]) -> Any:
    """A routine that is a function."""
    return Routine(of, inline=False)


def inlined(of: Callable[..., Any]) -> Any:
    """A routine that is expanded where it is called."""
    return Routine(of, inline=True)


class Variable(NamedTuple):
    """A machine's variable."""

    place: Any
    kind: str


class Scope:
    """The names of a routine that is being read."""

    def __init__(
        self, machine: Machine, outside: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        self.machine, self.outside = machine, outside
        self.names: dict[str, Any] = {"local": self.local, "splat": self.splat, **constants}

    def __getitem__(self, name: str) -> Any:
        value = self.names[name]
        if isinstance(value, Variable):
            return Number(self.machine, self.machine.get(value.place), value.kind)
        return value

    def local(self, kind: type[Array], count: int) -> Array:
        """A local array."""
        element = kind.__name__.lower()
        return Array(self.machine, self.machine.emit("local", "", element, count), element)

    def splat(self, x: Any, lanes: int) -> Number:
        """A vector of a number."""
        x = lifted(self.machine, x)
        return Number(self.machine, self.machine.emit("splat", x.kind, x.value, lanes), x.kind)

    def bind(self, name: str, value: Any) -> None:
        """Give a name to a value that does not change."""
        self.names[name] = value

    def assign(self, name: str, value: Any) -> None:
        """Assign a number to a variable, or bind what is none."""
        if not isinstance(value, int | Number):
            return self.bind(name, value)
        value, variable = lifted(self.machine, value), self.names.get(name)
        if not isinstance(variable, Variable):
            place = self.machine.variable(value.kind, value.value)
            return self.bind(name, Variable(place, value.kind))
        if variable.kind != value.kind:
            raise TypeError(f"{name} is {variable.kind}, not {value.kind}")
        return self.machine.set(variable.place, value.value)

    def value(self, node: ast.expr) -> Any:
        """An expression's value."""
        tree = compile(ast.Expression(node), self.outside["__name__"], "eval")
        return eval(tree, self.outside, cast(Any, self))

    def block(self, body: list[ast.stmt]) -> None:
        """Read statements. Raises TypeError for one that the language lacks."""
        for statement in body:
            ending = isinstance(statement, ast.For | ast.While) and statement.orelse
            if type(statement) not in STATEMENTS or ending:
                raise TypeError(f"routines have no such statement: {ast.unparse(statement)}")
            STATEMENTS[type(statement)](self, statement)

    def inner(self, body: list[ast.stmt]) -> None:
        """Read statements that may be skipped, or run again. New names but those of variables end
        with them. Raises TypeError if they bind a name from outside, which is no variable, to
        something else."""
        before = dict(self.names)
        self.block(body)
        for name, value in before.items():
            if self.names.get(name) is not value:
                raise TypeError(f"{name} is no variable: a branch or a loop cannot change it")
        for name in self.names.keys() - before.keys():
            if not isinstance(self.names[name], Variable):
                del self.names[name]

    def assignment(self, s: ast.Assign) -> None:
        """`x = y`, and `x = y = z`."""
        value = self.value(s.value)
        for target in s.targets:
            self.store(target, value, self.assign)

    def store(self, node: ast.expr, value: Any, name: Callable[[str, Any], None]) -> None:
        """Store a value in an element, give it a name, or both to parts of it."""
        if isinstance(node, ast.Tuple):
            for each, part in zip(node.elts, value, strict=True):
                self.store(each, part, name)
        elif isinstance(node, ast.Subscript):
            self.value(node.value)[self.value(node.slice)] = value
        else:
            assert isinstance(node, ast.Name)
            name(node.id, value)

    def change(self, s: ast.AugAssign) -> None:
        """`x += y` and its like."""
        before = ast.parse(ast.unparse(s.target), mode="eval").body
        after = ast.copy_location(ast.BinOp(before, s.op, s.value), s)
        self.store(s.target, self.value(after), self.assign)

    def branch(self, s: ast.If) -> None:
        """`if`."""
        condition = self.value(s.test)
        if not isinstance(condition, Number):
            return self.block(s.body if condition else s.orelse)
        then, other = (lambda: self.inner(s.body)), (lambda: self.inner(s.orelse))
        return self.machine.branch(condition.value, then, other)

    def repeat(self, s: ast.While) -> None:
        """`while`."""
        self.machine.repeat(lambda: self.value(s.test).value, lambda: self.inner(s.body))

    def loop(self, s: ast.For) -> None:
        """`for`: over a range, or once for each item that is known. Its index ends with it."""
        of = s.iter
        if isinstance(of, ast.Call) and ast.unparse(of.func) == "range":
            self.count(s, of)
        else:
            for item in self.value(of):
                self.store(s.target, item, self.bind)
                self.block(s.body)
        for node in ast.walk(s.target):
            if isinstance(node, ast.Name):
                self.names.pop(node.id, None)

    def count(self, s: ast.For, of: ast.Call) -> None:
        """`for` over a range."""
        given = [self.value(a) for a in of.args]
        start, stop, step = [0, *given, 1] if len(given) == 1 else [*given, 1][:3]

        def body(index: Any) -> None:
            self.store(s.target, Number(self.machine, index, "i64"), self.bind)
            self.inner(s.body)

        start, stop = (lifted(self.machine, x).value for x in (start, stop))
        self.machine.loop(start, stop, step, body)


STATEMENTS: dict[type[ast.stmt], Callable[[Scope, Any], None]] = {
    ast.Assign: Scope.assignment, ast.Expr: lambda scope, s: scope.value(s.value),
    ast.AugAssign: Scope.change, ast.If: Scope.branch, ast.While: Scope.repeat,
    ast.For: Scope.loop,
}  # fmt: skip
