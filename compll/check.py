"""Stage 3: a Spec becomes a typed Module; every error is collected and raised once.

Goals: each name resolved, each operator typed, each payload field given a storage and a bound.
Not here: any order of computation (passes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from compll import check_arrays, check_spread, feedback, matrices, strict
from compll.errors import Problems, RuleError, Span, closest, nearest
from compll.ir import (
    PACKED,
    POSITIONS,
    WHOLE,
    Expr,
    Field,
    Module,
    Pool,
    Selection,
    Type,
    rebuild,
    walk,
)
from compll.operators import (
    CALLABLE,
    CONSTANTS,
    OPERATORS,
    REDUCTIONS,
    RESERVED,
    SELECTING,
    SYNONYMS,
)
from compll.rules import Rules
from compll.spec import ANY, Chosen, Declared, ParamValue, Spec, as_float
from compll.static import depends, evaluate
from compll.syntax import SYMBOLS, Call, Name, Number, Syntax, names

GROUPS: tuple[int, ...] = tuple(1 << i for i in range(3, 15))
#: of an expression with the names in it replaced by what they stand for
LIMIT_DEPTH, LIMIT_SIZE = 100, 50_000
#: the same, also through reductions and rounds of `iterate`
LIMIT_CHAIN = 1000
#: of one `iterate`, each a copy of its expression
MOST_ROUNDS = 32


def check(spec: Spec, given: Mapping[str, object], problems: Problems) -> Checked:
    """The typed module of `spec`, and all its parameters: `given`, the others at their defaults.

    Raises SpecError with every problem found, those already in `problems` too.
    """
    params = parameters(spec, given, problems)
    return Checked(_Checker(spec, params, problems).module(), params)


class Checked(NamedTuple):
    """A module and the values of its parameters."""

    module: Module
    params: dict[str, ParamValue]


def parameters(
    spec: Spec, given: Mapping[str, object], problems: Problems
) -> dict[str, ParamValue]:
    """All parameters of the spec, `given` ones checked, the others at their defaults."""
    known = {p.name: p for p in spec.params}
    for name, value in given.items():
        if name in known and (wrong := known[name].check(value)):
            problems.add(known[name].span, wrong)
        elif name not in known and not spec.broken & {name, ANY}:
            hint = nearest(name, known) or "it has no parameters"
            problems.add(Span(), f"{spec.name} has no parameter {name!r}", hint)
    chosen = {p.name: given.get(p.name, p.default) for p in spec.params}
    legal = {n: known[n].default if known[n].check(v) else v for n, v in chosen.items()}
    return {name: _exact(known[name].type, value) for name, value in legal.items()}


def _exact(kind: str, value: object) -> ParamValue:
    return as_float(value) if kind == "float" else value  # type: ignore[return-value]


class _Checker:
    def __init__(self, spec: Spec, params: Mapping[str, ParamValue], problems: Problems) -> None:
        self.spec, self.params, self.problems = spec, params, problems
        self.pool = Pool()
        self.poisoned: set[str] = set(spec.broken)
        self.selections: dict[str, Selection] = {}
        self.measures: dict[int, tuple[int, int, int]] = {}
        #: the values of `iterate` between its rounds, by a name for people
        self.turns: dict[str, Expr] = {}

    def module(self) -> Module:
        spec = self.spec
        self.unique()
        self.group = self.group_size()
        self.feedback, self.unbiased = self.settle(spec.feedback), self.settle(spec.unbiased)
        self.rules = Rules(self.pool, self.group > 0, encoding=True)
        states = self.states()
        env = self.globals() | {"g": self.pool.make("input", (), Type("float", "n"), "g")}
        env |= {s.name: self.leaf("state", s) for s in states}
        bound = self.bind(spec.encode, env)
        self.static = {name for name in bound if env[name].type.shape == "static"}
        self.when = self.condition(env)
        fields = tuple(f for d in spec.payload if (f := self.field(d, env)) is not None)
        self.rules = Rules(self.pool, self.group > 0, encoding=False)
        # Fixed-size fields first: their place is then known before a selection is made.
        fields = tuple(sorted(fields, key=lambda f: (f.shape == "kept", f.storage == "runs")))
        fields = check_arrays.widened(spec, fields)
        decode = self.decode(fields, {k: env[k] for k in bound if self.decode_knows(env[k])})
        updates = self.updates(states, env)
        self.problems.raise_if_any()
        if decode is None:
            raise AssertionError("a spec without a decode has problems")
        return self.finish(fields, states, decode, updates, {k: env[k] for k in bound} | self.turns)

    def finish(
        self,
        fields: tuple[Field, ...],
        states: tuple[Field, ...],
        decode: Expr,
        updates: dict[str, Expr],
        bindings: dict[str, Expr],
    ) -> Module:
        spec = self.spec
        roots = [e for f in fields for e in (f.expr,) if e is not None]
        drawn = any(s.kind == "drawn" for s in self.selections.values())
        arrays = drawn or bool(spec.rounds) or matrices.uses(decode, *roots, *updates.values())
        decoded = None if arrays else feedback.decoded(self.pool, decode, fields)
        feed = self.feedback != "none"
        if feed and decoded is None and not arrays:
            self.problems.add(
                spec.feedback.span,
                "this spec cannot have error feedback: its decode is no "
                "function of single elements and selections",
                "remove `feedback:`",
            )
        self.merge_fits(fields, decode)
        carried = strict.carries(fields, self.selections, decode)
        rounds = check_arrays.rounds(spec, fields, self.selections, carried, self.problems)
        self.problems.raise_if_any()
        if feed:
            states = (*states, Field("residual", "float32", 32, "n"))
        return Module(
            name=spec.name,
            group=self.group,
            fields=fields,
            states=states,
            selections=tuple(self.selections.values()),
            decode=decode,
            updates=updates,
            feedback=feed,
            own=self.feedback == "own",
            status=not carried,
            bindings=bindings,
            pool=self.pool,
            decoded=decoded,
            merge=spec.merge,
            arrays=arrays,
            rounds=rounds,
            when=self.when,
            optimizers=spec.optimizers,
            unbiased=self.unbiased == "true",
            about=spec.about,
            source=spec.source,
            path=spec.path,
            spans=self.spans(),
        )

    def spans(self) -> dict[str, Span]:
        """The place of every name, as "section.name", and of the sections."""
        spec = self.spec
        found = dict(spec.spans)
        for section, bindings in (("encode", spec.encode), ("update", spec.update)):
            found |= {f"{section}.{b.name}": b.span for b in bindings}
        for turn in self.turns:
            found[f"encode.{turn}"] = found.get(f"encode.{turn.split()[0]}", Span())
        return found | {f"payload.{d.name}": d.span for d in spec.payload}

    # names

    def unique(self) -> None:
        """Every name means one thing."""
        spec = self.spec
        seen: dict[str, Span] = {}
        declared = [(p.name, p.span) for p in spec.params] + [(s.name, s.span) for s in spec.state]
        for name, span in declared + [(b.name, b.span) for b in spec.encode]:
            if name in RESERVED:
                self.problems.add(
                    span, f"{name!r} already has a meaning in the language", "choose another name"
                )
            elif name in seen:
                self.problems.add(
                    span, f"{name!r} is defined twice", f"first at line {seen[name].line}"
                )
            seen.setdefault(name, span)
        chosen = {spec.feedback.value, spec.feedback.other}
        if chosen & {"error", "own"} and "residual" in {s.name for s in spec.state}:
            self.problems.add(
                spec.feedback.span,
                "`feedback: error` makes the state 'residual' itself",
                "remove it from `state:`",
            )

    def globals(self) -> dict[str, Expr]:
        env = {name: self.pool.const(value) for name, value in CONSTANTS.items()}
        for name in ("n", "step"):
            env[name] = self.pool.make("param", (), Type("int", "static"), name)
        kinds = {p.name: p.type for p in self.spec.params}
        for name, kind in kinds.items():
            env[name] = self.pool.make("param", (), Type(kind, "static"), name)
        return env

    def leaf(self, op: str, item: Field) -> Expr:
        codes = item.packed and item.name not in {b.name for b in self.spec.rounds}
        dtype = "int" if codes or item.storage in (*WHOLE, *POSITIONS) else "float"
        return self.pool.make(op, (), Type(dtype, item.shape, item.of, item.dims), item.name)

    def bind(self, bindings: Iterable[object], env: dict[str, Expr]) -> list[str]:
        bound = []
        for binding in self.spec.encode:
            value = self.expr(binding.value, env, binding.name)
            if value is None:
                self.poisoned.add(binding.name)
                continue
            if value.type.dtype == "selection" and value.op in SELECTING:
                value = self.select(binding.name, value)
            env[binding.name] = value
            bound.append(binding.name)
        return bound

    def select(self, name: str, value: Expr) -> Expr:
        """Register a selection; what the name then means is a reference to it."""
        key, limit = value.args
        threshold = None
        if value.op == "top":
            threshold = self.pool.make("kth_largest", (key, limit), Type("float", "scalar"))
        self.selections[name] = Selection(name, value.op, key, limit, threshold)
        return self.pool.make("selection", (), Type("selection", "n"), name)

    # sections

    def group_size(self) -> int:
        if self.spec.group is None:
            return 0
        value = self.constant(self.spec.group)
        if value == 0:
            return 0
        if value is not None and value not in GROUPS:
            self.problems.add(
                self.spec.group.span,
                f"a group has {value} elements",
                f"a power of two from {GROUPS[0]} to {GROUPS[-1]}",
            )
        return next((g for g in GROUPS if g == value), GROUPS[0])

    def constant(self, syntax: Syntax) -> ParamValue | None:
        """A value that must follow from the parameters alone."""
        rules = getattr(self, "rules", None) or Rules(self.pool, False, encoding=True)
        self.rules = rules
        return self.known(syntax, self.globals())

    def settle(self, choice: Chosen) -> str:
        """The value of a section that parameters may choose."""
        holds = True if choice.condition is None else self.constant(choice.condition)
        return choice.value if holds else choice.other

    def known(self, syntax: Syntax, env: Mapping[str, Expr]) -> ParamValue | None:
        """A value of the names in `env` that must follow from the parameters alone."""
        expr = self.expr(syntax, env, "")
        if expr is None:
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

    def states(self) -> tuple[Field, ...]:
        found = []
        sizes = self.sizes() if any(item.second for item in self.spec.state) else {}
        for item in self.spec.state:
            if item.second is not None and item.base == "float32":
                dims = self.dims(item, sizes)
                if dims is None:
                    self.poisoned.add(item.name)
                else:
                    found.append(Field(item.name, "float32", 32, "matrix", dims=dims))
                continue
            per_element = isinstance(item.dim, Name) and item.dim.name == "n"
            if item.base != "float32" or (item.dim is not None and not per_element):
                message = f"state {item.name!r} is float32, float32[n] or float32[rows, columns]"
                self.problems.add(item.span, message)
                self.poisoned.add(item.name)
                continue
            if self.group and not per_element:
                self.problems.add(
                    item.span, "a grouped spec keeps states per element", "float32[n]"
                )
                self.poisoned.add(item.name)
                continue
            found.append(Field(item.name, "float32", 32, "n" if per_element else "scalar"))
        return tuple(found)

    def sizes(self) -> dict[str, Expr]:
        """What encode computes from n and parameters: names that states' sizes may use."""
        env, held = self.globals(), (self.problems, self.rules)
        self.problems, self.rules = Problems(""), Rules(self.pool, False, encoding=True)
        for b in self.spec.encode:
            known = names(b.value) <= set(env)
            value = self.expr(b.value, env, b.name) if known else None
            if value is not None and self.constant_of_params(value):
                env[b.name] = value
        self.problems, self.rules = held
        return env

    def dims(self, item: Declared, env: Mapping[str, Expr]) -> tuple[Expr, ...] | None:
        """The rows and columns that a declaration gives to a matrix."""
        found = []
        for tree in (item.dim, item.second):
            value = None if tree is None else self.expr(tree, env, "")
            if tree is None or value is None:
                return None
            try:
                found.append(matrices.dimension(self.settled(value)))
            except RuleError as error:
                self.problems.add(tree.span, str(error), error.hint)
        return tuple(found) if len(found) == 2 else None

    def settled(self, value: Expr) -> Expr:
        """A static value with the parameters in it replaced by theirs."""

        def change(e: Expr) -> Expr | None:
            known = e.op == "param" and e.value in self.params
            return self.pool.const(self.params[e.value]) if known else None

        return rebuild(self.pool, value, change) if value.type.shape == "static" else value

    def condition(self, env: Mapping[str, Expr]) -> Expr | None:
        """`when:`, a condition of n alone."""
        tree = self.spec.when
        value = None if tree is None else self.expr(tree, env, "")
        if tree is None or value is None:
            return None
        if not self.constant_of_params(value) or value.type.dtype not in ("bool", "int", "float"):
            self.problems.add(tree.span, "`when:` is a condition of n and parameters")
            return None
        return self.settled(self.rules.condition(value))

    def field(self, item: Declared, env: Mapping[str, Expr]) -> Field | None:
        if item.name not in env and not self.excused(item.name):
            self.undefined(item)
        expr = env.get(item.name)
        if expr is None:
            return None
        storage, bits = self.storage(item)
        if item.second is not None or expr.type.shape == "matrix":
            dims = self.dims(item, env) if item.second is not None else None
            if item.second is None or dims is not None:
                return check_arrays.field(item, storage, bits, expr, dims, self.problems)
            return None
        shape, of = self.dimension(item, expr)
        if expr.type.dtype in ("selection", "str") or shape == "":
            if expr.type.dtype in ("selection", "str"):
                self.problems.add(
                    item.span,
                    f"{item.name!r} is a {expr.type.dtype}, not numbers",
                    "store indices(selection) and x[selection]",
                )
            return None
        if storage in PACKED and shape in ("scalar", "group"):
            self.problems.add(
                item.span,
                f"{item.name!r} is one number; packed types hold elements",
                "use float32, float16, bfloat16 or int32",
            )
            return None
        if storage in POSITIONS and expr.op != "indices":
            self.problems.add(
                item.span,
                f"{item.name!r}: {storage} holds the positions of a selection",
                "store indices(selection)",
            )
            return None
        if storage in ("trit", "runs") and not self.trits_fit(item, storage, shape):
            return None
        expr = self.rules.lift(expr, shape, of)
        if storage == "uint16":
            expr = self.rules.whole_number(expr, 0, (1 << 16) - 1)
        if storage in ("trit", "runs"):
            expr = self.rules.trit(expr)
        return Field(item.name, storage, bits, shape, of, expr)

    def trits_fit(self, item: Declared, storage: str, shape: str) -> bool:
        """Trits are of all elements, and runs come after everything else."""
        if shape == "n" and not (storage == "runs" and self.selections):
            return True
        message = f"{item.name!r}: {storage} holds a value of every element"
        if shape == "n":
            message = f"{item.name!r}: runs do not go together with selections"
        self.problems.add(item.span, message, "use trit[n], or uint2 for selected elements")
        return False

    def undefined(self, item: Declared) -> None:
        """A payload field that encode lacks: perhaps a name that decode uses, misspelled."""
        defined = {b.name for b in self.spec.encode} | {"g"}
        used = set[str]().union(*(names(b.value) for b in self.spec.decode))
        lacking = (used & defined) - {d.name for d in self.spec.payload}
        self.problems.add(
            item.span,
            f"{item.name!r} is in the payload but encode does not define it",
            nearest(item.name, lacking or defined),
        )
        # What decode uses instead is no second error.
        self.poisoned |= {closest(item.name, lacking) or min(lacking)} if lacking else set()

    def excused(self, name: str) -> bool:
        """Whether using an unknown name is no error of its own, since its definition was wrong."""
        return bool(self.poisoned & {name, ANY})

    def storage(self, item: Declared) -> tuple[str, int]:
        if item.base == "bool":
            return "uint", 1
        if item.base == "float":
            return self.sized(item, {16: "float16", 32: "float32"}, "float32"), 32
        if item.base in ("trit", "runs"):
            return item.base, 2
        if not item.base.startswith("uint") or item.base in WHOLE:
            return item.base, 32
        bits = int(item.base[4:]) if item.bits is None and item.base != "uint" else None
        if item.bits is not None:
            value = self.constant(item.bits)
            bits = int(value) if isinstance(value, int | float) and value in (1, 2, 4, 8) else None
            if bits is None and value is not None:
                self.problems.add(item.span, f"uint has 1, 2, 4 or 8 bits, not {value}")
        return "uint", bits or 8

    def sized(self, item: Declared, known: Mapping[int, str], default: str) -> str:
        """The storage that a width in brackets chooses."""
        assert item.bits is not None
        value = self.constant(item.bits)
        storage = next((s for bits, s in known.items() if bits == value), None)
        if storage is None and value is not None:
            widths = " or ".join(map(str, known))
            self.problems.add(item.span, f"{item.base} has {widths} bits, not {value}")
        return storage or default

    def dimension(self, item: Declared, expr: Expr) -> tuple[str, str]:
        """The level a field has by its declaration, checked against its expression."""
        whole = "group" if self.group else "scalar"
        declared = {None: (whole, ""), "n": ("n", ""), "groups": ("group", "")}
        name = item.dim.name if isinstance(item.dim, Name) else None
        if expr.type.shape == "table":
            return self.table_dimension(item, expr)
        if item.dim is not None and name not in ("n", "groups") and name not in self.selections:
            if not self.excused(name or ""):
                self.problems.add(
                    item.dim.span,
                    f"{item.name!r} has an unknown length {name or ''!r}",
                    nearest(name or "?", ["n", "groups", *self.selections]),
                )
            return "", ""
        shape, of = declared.get(name, ("kept", name or ""))
        level = expr.type.shape
        fits = (
            (level, expr.type.of) == (shape, of)
            or level == "static"
            or (level in ("scalar", "group") and shape in ("n", "group"))
        )
        if not fits:
            self.problems.add(
                item.span,
                f"{item.name!r} is declared {self.named(shape, of)} but is "
                f"{self.named(level, expr.type.of)}",
                self.advice(level, expr.type.of),
            )
            return "", ""
        return shape, of

    def table_dimension(self, item: Declared, expr: Expr) -> tuple[str, str]:
        """A table is declared with its size."""
        size = self.constant(item.dim) if item.dim is not None else 1
        if item.base == "float32" and size == int(expr.type.of):
            return "table", expr.type.of
        if size is not None:
            message = f"{item.name!r} is a table of {expr.type.of} numbers"
            self.problems.add(item.span, message, f"write float32[{expr.type.of}] or its parameter")
        return "", ""

    @staticmethod
    def named(shape: str, of: str) -> str:
        words = {
            "n": "[n], one per element",
            "group": "[groups], one per group",
            "kept": f"[{of}], one per selected element",
            "sample": "a sample",
        }
        return words.get(shape, "one number")

    @staticmethod
    def advice(shape: str, of: str) -> str:
        return {"n": "write [n] after the type", "kept": f"write [{of}] after the type"}.get(
            shape, ""
        )

    @staticmethod
    def constant_of_params(value: Expr) -> bool:
        """Whether a binding of encode has a value that decode knows too."""
        return value.type.shape == "static" and "step" not in depends(value)

    def decode_knows(self, value: Expr) -> bool:
        """Whether decode has a binding of encode: what needs no data, and what all ranks draw."""
        if value.op == "selection":
            return self.selections[str(value.value)].kind == "drawn"
        leaves = [e for e in walk(value) if not e.args]
        drawn = any(e.op == "shared" for e in leaves)
        known = all(e.op in ("shared", "const", "param") and e.value != "step" for e in leaves)
        return self.constant_of_params(value) or (drawn and known)

    def decode(self, fields: tuple[Field, ...], known_too: Mapping[str, Expr]) -> Expr | None:
        env = self.globals() | dict(known_too) | {f.name: self.leaf("field", f) for f in fields}
        del env["step"]
        known = {f.name for f in fields}
        self.poisoned |= {d.name for d in self.spec.payload} - known
        result: Expr | None = None
        self.fields = {f.name: f for f in fields}
        for binding in self.spec.decode:
            result = self.expr(binding.value, env, binding.name, decoding=True)
            if result is None:
                self.poisoned.add(binding.name)
            else:
                env[binding.name] = result
        return None if result is None else self.result(result)

    def result(self, value: Expr) -> Expr | None:
        span = self.spec.decode[-1].value.span
        if value.type.shape in ("kept", "table", "matrix") or value.type.dtype in (
            "str",
            "selection",
        ):
            self.problems.add(
                span,
                f"decode gives {value.type}, not one number per element",
                "flat(m) has the elements of a matrix"
                if value.type.shape == "matrix"
                else "scatter(indices, values) puts values in their places",
            )
            return None
        if value.op != "scatter" and any(e.op == "scatter" for e in walk(value)):
            self.problems.add(
                span,
                "scatter must be the last step of decode",
                "compute on the values before scattering them",
            )
            return None
        return self.rules.lift(self.rules.number(value, "float"), "n")

    def updates(self, states: tuple[Field, ...], env: dict[str, Expr]) -> dict[str, Expr]:
        known = {s.name: s for s in states}
        self.rules.encoding = True
        named, meant = {b.name for b in self.spec.update}, set[str]()
        for binding in self.spec.update:
            if binding.name not in known and not self.excused(binding.name):
                hint = nearest(binding.name, known) or "states are declared in `state:`"
                self.problems.add(binding.span, f"{binding.name!r} is no state", hint)
                meant.add(closest(binding.name, known) or "")
        for name in known:
            if name not in named | meant and not self.excused(name):
                self.problems.add(
                    self.spec.spans.get("update", self.spec.spans.get("state", Span())),
                    f"state {name!r} is never updated",
                    f"add `update: {{{name}: ...}}`",
                )
        pairs = [(b, self.expr(b.value, env, b.name)) for b in self.spec.update if b.name in known]
        return {
            b.name: fitted
            for b, e in pairs
            if e is not None and (fitted := self.fit(b.value, known[b.name], e))
        }

    def fit(self, syntax: Syntax, state: Field, value: Expr) -> Expr | None:
        if state.shape == "matrix" and value.type.dims == state.dims:
            return value
        if value.type.shape == "matrix" or state.shape == "matrix":
            message = f"state {state.name!r} cannot hold {value.type}"
            self.problems.add(syntax.span, message, "rows and columns must be the declared ones")
            return None
        if value.type.dtype in ("selection", "str") or value.type.shape not in (
            "static",
            "scalar",
            state.shape,
        ):
            self.problems.add(syntax.span, f"state {state.name!r} cannot hold {value.type}")
            return None
        return self.rules.lift(self.rules.number(value, "float"), state.shape)

    def merge_fits(self, fields: tuple[Field, ...], decode: Expr) -> None:
        """`merge: sum` needs a payload of numbers per element, decoded as they are."""
        if self.spec.merge != "sum":
            return
        one = fields[0] if len(fields) == 1 else None
        plain = (
            one is not None
            and one.shape == "n"
            and one.storage in ("float32", "float16", "bfloat16")
        )
        if not plain or decode.op != "field":
            self.problems.add(
                self.spec.spans["merge"],
                "payloads add without decoding only when they are one "
                "float field [n] and decode returns it",
                "remove `merge: sum`",
            )

    # expressions

    def expr(
        self, tree: Syntax, env: Mapping[str, Expr], name: str, *, decoding: bool = False
    ) -> Expr | None:
        """The typed expression, or None with the reason recorded (once)."""
        if isinstance(tree, Number):
            return self.pool.const(tree.value)
        if isinstance(tree, Name):
            return self.name(tree, env, decoding)
        if tree.op == "iterate" and len(tree.args) == OPERATORS["iterate"].low:
            try:
                return self.iterate(tree, env, name, decoding)
            except RuleError as error:
                self.problems.add(tree.span, str(error), error.hint)
                return None
        if tree.op == "combined" and len(tree.args) == 1:
            return self.combined(tree, env, decoding)
        args = self.call_args(tree, env, name, decoding)
        if args is None:
            return None
        try:
            return self.bounded(self.apply(tree, args, name))
        except RuleError as error:
            self.problems.add(tree.span, str(error), error.hint)
            return None

    def bounded(self, value: Expr) -> Expr:
        """`value`, unless names that stand for names have made it too large for later stages."""
        depth, size, chain = self.measure(value)
        if depth > LIMIT_DEPTH or size > LIMIT_SIZE or chain > LIMIT_CHAIN:
            most = LIMIT_DEPTH if depth > LIMIT_DEPTH or size > LIMIT_SIZE else LIMIT_CHAIN
            raise RuleError(
                f"with the names in it replaced this has {size} parts, "
                f"{chain if most == LIMIT_CHAIN else depth} deep; "
                f"allowed are {LIMIT_SIZE}, {most} deep",
                "use fewer names that stand for names",
            )
        return value

    def measure(self, value: Expr) -> tuple[int, int, int]:
        """How deep an expression is and how many parts it has, repeated ones counted again.

        A reduction's value is computed once, whoever uses it: both begin anew there. Third: how
        deep it is without that.
        """
        if id(value) not in self.measures:
            parts = [self.measure(a) for a in value.args] or [(0, 0, 0)]
            chain = 1 + max(c for _, _, c in parts)
            if value.op.startswith("reduce_"):
                self.measures[id(value)] = 1, 1, chain
            else:
                depth = 1 + max(d for d, _, _ in parts)
                self.measures[id(value)] = depth, 1 + sum(s for _, s, _ in parts), chain
        return self.measures[id(value)]

    def iterate(
        self, tree: Call, env: Mapping[str, Expr], name: str, decoding: bool
    ) -> Expr | None:
        """The rounds of `iterate`, unrolled: next while more rounds are wanted, else the value."""
        found = self.rounds(tree, env)
        value, times = (self.expr(t, env, "?", decoding=decoding) for t in tree.args[1:4:2])
        if found is None or value is None or times is None:
            return None
        variable, most = found
        for turn in range(most):
            following = self.expr(tree.args[2], {**env, variable: value}, "?", decoding=decoding)
            if following is None:
                return None
            more = self.rules.apply("gt", (times, self.pool.const(turn)), name)
            value = self.choose((more, following, value))
            self.turns[f"{name} after {turn + 1}"] = value
            self.bounded(value)
            self.measures[id(value)] = 1, 1, self.measure(value)[2]
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

    def choose(self, args: tuple[Expr, ...]) -> Expr:
        """`args[1] if args[0] else args[2]`, decided here where the parameters alone do."""
        c = args[0]
        if c.type.shape == "static" and not depends(c) & {"n", "step"}:
            return args[1 if evaluate(c, self.params) else 2]
        return self.rules.apply("choose", args, "")

    def combined(self, tree: Call, env: Mapping[str, Expr], decoding: bool) -> Expr | None:
        """combined(p): a leaf, since its value comes from all ranks."""
        given = self.expr(tree.args[0], env, "?", decoding=decoding)
        if given is None:
            return None
        try:
            return check_arrays.combined(self.pool, self.spec, tree.args[0], given, decoding)
        except RuleError as error:
            self.problems.add(tree.span, str(error), error.hint)
            return None

    def apply(self, tree: Call, args: tuple[Expr, ...], name: str) -> Expr:
        if tree.op == "choose":
            return self.choose(args)
        op = tree.op
        if op == "reduce" and isinstance(tree.args[0], Name) and tree.args[0].name in REDUCTIONS:
            op = tree.args[0].name
        if tree.op in SELECTING and name in self.selections:
            raise RuleError("a binding holds one selection", "give each selection its own name")
        if op in ("quantiles", "mean_by", "hadamard"):
            args = (*args[:-1], self.folded(args[-1]))
        if op in ("matrix", "random_matrix", "drawn", "chosen"):
            args = tuple(map(self.settled, args))
        value = self.rules.apply(op, args, name)
        if op == "spread":
            check_spread.fits(self.pool, value, self.fields, self.selections)
        return value

    def folded(self, value: Expr) -> Expr:
        """A value that follows from the parameters alone, as a literal."""
        if value.type.shape != "static" or depends(value) & {"n", "step"}:
            return value
        return self.pool.const(evaluate(value, self.params))

    def call_args(
        self, tree: Call, env: Mapping[str, Expr], name: str, decoding: bool
    ) -> tuple[Expr, ...] | None:
        row = OPERATORS.get(tree.op)
        if row is None:
            self.unknown_operator(tree, env)
            return None
        if not row.low <= len(tree.args) <= row.high:
            self.problems.add(
                tree.span, f"{tree.op} takes {row.arity}, not {len(tree.args)}", row.about
            )
            return None
        trees = tree.args
        if tree.op == "reduce" and isinstance(trees[0], Name) and trees[0].name in REDUCTIONS:
            trees = trees[1:]
        elif tree.op == "reduce":
            self.problems.add(
                tree.span,
                "reduce takes the name of a reduction first",
                f"one of {', '.join(REDUCTIONS)}",
            )
            return None
        inner = "" if tree.named and tree.op in SELECTING else "?"
        args = [self.expr(t, env, name + inner, decoding=decoding) for t in trees]
        if any(a is not None and a.op in SELECTING for a in args):
            self.problems.add(tree.span, "a selection needs a name of its own", "kept: top(...)")
            return None
        return None if any(a is None for a in args) else tuple(a for a in args if a is not None)

    def name(self, tree: Name, env: Mapping[str, Expr], decoding: bool) -> Expr | None:
        found = env.get(tree.name)
        if found is None and not self.excused(tree.name):
            if decoding and (hint := self.beyond_decode(tree.name)):
                message = f"decode uses {tree.name!r}, which the payload lacks"
            elif tree.name in OPERATORS:
                row = OPERATORS[tree.name]
                message, hint = f"{tree.name!r} is an operator", f"call it with {row.arity}"
            else:
                message, hint = f"unknown name {tree.name!r}", nearest(tree.name, env)
            self.problems.add(tree.span, message, hint)
        return found

    def beyond_decode(self, name: str) -> str:
        """What to do about a name of encode that decode uses; "" when encode has no such name."""
        if name == "step":
            return "put what depends on the step into the payload"
        if name == "g" or name in {s.name for s in self.spec.state}:
            return "decode sees payload fields and parameters only"
        if name in self.selections:
            return f"store indices({name}) in the payload, and use that field"
        if name not in {b.name for b in self.spec.encode}:
            return ""
        if name in self.static:
            return "it depends on the step, which decode does not know"
        return "add it to `payload:`"

    def unknown_operator(self, tree: Call, env: Mapping[str, Expr]) -> None:
        symbol = SYMBOLS.get(tree.op, tree.op)
        if tree.op in env:
            message, hint = f"{tree.op!r} is a value, and only operators are called", ""
        elif tree.op in SYNONYMS:
            message, hint = f"unknown operator {symbol!r}", f"did you mean {SYNONYMS[tree.op]!r}?"
        else:
            message, hint = f"unknown operator {symbol!r}", nearest(tree.op, CALLABLE)
        self.problems.add(tree.span, message, hint)
