"""Stage 3: a Spec becomes a typed Module; every error is collected and raised once.

Goals: each name resolved, each operator typed, each payload field given a storage and a bound. Not
here: the order of computation (passes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from compll.errors import Diagnostic, Problems, Span, nearest
from compll.frontend import check_arrays, check_fields, check_names, derived, planes
from compll.frontend.check_exprs import ERROR, Expressions, Scope
from compll.frontend.operators import MIXING, SELECTING
from compll.frontend.rule_context import Context
from compll.frontend.spec import ANY, Binding, Declared, ParamValue, Spec, as_float
from compll.ir.expr import Expr, Pool, Type, walk
from compll.ir.module import Field, Module, Selection
from compll.passes import feedback, strict

GROUPS: tuple[int, ...] = tuple(1 << i for i in range(3, 15))


def check(spec: Spec, passed: Mapping[str, object], problems: Problems) -> Checked:
    """The typed module of `spec`, with the values of its parameters: those passed, or the defaults.

    Raises SpecError with every problem found, including those already in `problems`.
    """
    params = parameters(spec, passed, problems)
    return Checked(_Checker(spec, params, passed, problems).module(), params)


def parameters(
    spec: Spec, passed: Mapping[str, object], problems: Problems
) -> dict[str, ParamValue]:
    """Values of all parameters of the spec: those passed, checked, and defaults for the others."""
    known = {p.name: p for p in derived.accepted(spec)}
    for name, value in passed.items():
        if name in known and (wrong := known[name].check(value)):
            problems.found.append(Diagnostic("", Span(), wrong))  # of the call, not of the file
        elif name not in known and not spec.broken & {name, ANY}:
            hint = nearest(name, known) or "it has no parameters"
            unknown = f"{spec.name} has no parameter {name!r}"
            problems.found.append(Diagnostic("", Span(), unknown, hint))
    chosen = {p.name: passed.get(p.name, p.default) for p in spec.params}
    legal = {n: known[n].default if known[n].check(v) else v for n, v in chosen.items()}
    return {name: _exact(known[name].type, value) for name, value in legal.items()}


def _exact(kind: str, value: object) -> ParamValue:
    return as_float(value) if kind == "float" else value  # type: ignore[return-value]


class Checked(NamedTuple):
    """A module and the values of its parameters."""

    module: Module
    params: dict[str, ParamValue]


class _Checker(Expressions):
    """Checks the sections of a spec, in order."""

    #: the payload's fields by their declared names
    planes: dict[str, list[planes.Plane]]

    def __init__(
        self,
        spec: Spec,
        params: Mapping[str, ParamValue],
        passed: Mapping[str, object],
        problems: Problems,
    ) -> None:
        super().__init__(spec, params, problems, Pool())
        self.passed = passed
        self.spec = replace(
            spec,
            payload=tuple(map(self.declared, spec.payload)),
            state=tuple(map(self.declared, spec.state)),
        )

    def module(self) -> Module:
        spec = self.spec
        check_names.unique(spec, self.problems)
        self.group = self.group_size()
        self.feedback, self.unbiased = self.settle(spec.feedback), self.settle(spec.unbiased)
        feeds, self.decay = self.feedback in ("error", "own"), self.factor()
        self.kept_as = derived.kept_as(spec, self.passed, feeds=feeds, problems=self.problems)
        self.context = self.new_context(grouped=self.group > 0)
        unsized: list[check_fields.Unsized] = []
        states = check_fields.states(self, unsized)
        env = self.globals() | {"g": self.pool.make("input", (), Type("float", "n"), "g")}
        env |= {s.name: check_fields.leaf(self, "state", s) for s in states}
        self.bind(spec.encode, env, self.context)
        bound = [b.name for b in spec.encode]
        check_fields.sized_by_data(self, unsized, env)
        self.static = {name for name in bound if env[name].type.shape == "static"}
        self.when = self.condition(env)
        found = check_arrays.widened(spec, check_fields.payload(self, env))
        self.planes = planes.split(self.context, found, set(env), {b.name for b in spec.rounds})
        fields = tuple(f for parts in self.planes.values() for f, _ in parts)
        # Fixed-size fields first: then their places do not depend on selections.
        fields = tuple(sorted(fields, key=lambda f: (f.shape == "kept", f.layout.recoded)))
        decode = self.decode(fields, {k: env[k] for k in bound if self.decode_knows(env[k])})
        updates = check_fields.updates(self, states, env)
        states = check_fields.owed(self, states)
        check_arrays.combinations(spec, self.problems)
        self.merge_fits(fields, decode)
        if not fields and not self.problems.found:
            self.problems.add(spec.spans["payload"], "no field of the payload has any bits")
        self.problems.raise_if_any()
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
        chosen = self.selections.values()
        drawn = any(s.kind == "drawn" for s in chosen)
        keys = [s.key for s in chosen]
        nodes = walk(decode, *roots, *keys, *updates.values())
        matrices = any(e.type.shape == "matrix" or e.op in MIXING for e in nodes)
        arrays = drawn or bool(spec.rounds) or matrices
        decoded = None if arrays else feedback.decoded(self.pool, decode, fields)
        feed = self.feedback != "none"
        differences = self.feedback == "difference"
        if feed and decoded is None and (differences or not arrays):
            kind = "feedback of differences" if differences else "error feedback"
            self.problems.add(
                spec.feedback.span,
                f"this spec cannot have {kind}: its decode is no "
                "function of single elements and selections",
                "remove `feedback:`",
            )
        carried = strict.carries(fields, self.selections, decode)
        rounds = check_arrays.rounds(spec, fields, self.selections, carried, self.problems)
        self.problems.raise_if_any()
        if feed:
            states = (*states, *derived.states(self.kept_as, differences=differences))
        return Module(
            name=spec.name,
            group=self.group,
            fields=fields,
            states=states,
            selections=tuple(map(self.bounded, self.selections.values()) if arrays else chosen),
            decode=decode,
            updates=updates,
            feedback=feed,
            own=self.feedback == "own",
            differences=differences,
            decay=self.decay,
            status=not carried,
            bindings=bindings,
            pool=self.pool,
            decoded=decoded,
            merge=spec.merge,
            rounds=rounds,
            when=self.when,
            unbiased=self.unbiased == "true",
            kept_as=self.kept_as,
            about=spec.about,
            source=spec.source,
            path=spec.path,
            spans=self.spans(),
        )

    def spans(self) -> dict[str, Span]:
        """Places of all names, as "section.name", and of the sections."""
        spec = self.spec
        found = dict(spec.spans)
        for section, bindings in (("encode", spec.encode), ("update", spec.update)):
            found |= {f"{section}.{b.name}": b.span for b in bindings}
        for turn in self.turns:
            found[f"encode.{turn}"] = found.get(f"encode.{turn.split()[0]}", Span())
        return found | {f"payload.{d.name}": d.span for d in spec.payload}

    def declared(self, item: Declared) -> Declared:
        """The declaration that the parameters choose."""
        while item.condition is not None and item.other is not None:
            holds = self.constant(item.condition)
            item = replace(item, condition=None) if holds else item.other
        return item

    def bind(self, section: tuple[Binding, ...], env: dict[str, Expr], context: Context) -> Expr:
        """Add a section's bindings to `env`, in order; the value of the last."""
        value, order = ERROR, {b.name: b.span for b in section}
        for b in section:
            value = self.expr(b.value, Scope(env, context, b.name, order))
            if value.op in SELECTING:
                value = self.select(b.name, value)
            env[b.name] = value
        return value

    def select(self, name: str, value: Expr) -> Expr:
        """Register a selection. Returns the reference to it that its name stands for."""
        key, limit = value.args
        threshold = None
        if value.op == "top":
            threshold = self.pool.make("kth_largest", (key, limit), Type("float", "scalar"))
        self.selections[name] = Selection(name, value.op, key, limit, threshold, value.type.of)
        return self.pool.make("selection", (), value.type, name)

    def bounded(self, s: Selection) -> Selection:
        """A selection of which the parameters are in the bound."""
        return replace(s, limit=self.context.settled(s.limit))

    def factor(self) -> float:
        """The residual's decay, or the share of a difference that the reference takes up."""
        tree, key = self.spec.feedback.factor, "decay"
        if self.feedback == "difference":
            key = "difference"
        value = 1.0 if tree is None else self.constant(tree)
        if tree is not None and value is not None and not 0 <= float(value) <= 1:
            hint = f"like `feedback: {{{key}: 0.95}}`"
            self.problems.add(tree.span, f"a {key} is a factor from 0 to 1, not {value}", hint)
        return 1.0 if value is None else float(value)

    def group_size(self) -> int:
        if self.spec.group is None:
            return 0
        value = self.constant(self.spec.group)
        if value == 0:
            return 0
        if value is not None and value not in GROUPS:
            self.problems.add(
                self.spec.group.span,
                f"a group cannot have {value} elements",
                f"a power of two from {GROUPS[0]} to {GROUPS[-1]}, or 0 (the whole tensor)",
            )
        return next((g for g in GROUPS if g == value), GROUPS[0])

    def condition(self, env: Mapping[str, Expr]) -> Expr | None:
        """`when:`, a condition of n alone."""
        tree = self.spec.when
        value = ERROR if tree is None else self.expr(tree, self.scope(env))
        if tree is None or value is ERROR:
            return None
        if not self.constant_of_params(value) or value.type.dtype != "bool":
            hint = "like `n > 1000`"
            self.problems.add(tree.span, "`when:` is a condition of n and parameters", hint)
            return None
        return self.context.settled(value)

    def decode_knows(self, value: Expr) -> bool:
        """True if decode can use a binding of encode: it needs no data, or its draws are the same
        on all ranks."""
        if value is ERROR:
            return True  # it may
        if value.op == "selection":
            return self.context.is_drawn(str(value.value))
        leaves = [e for e in walk(value) if not e.args]
        drawn = any(e.op in ("shared", "random_matrix") for e in leaves)
        alike = ("shared", "random_matrix", "ones", "const", "param")
        known = all(e.op in alike and e.value != "step" for e in leaves)
        return self.constant_of_params(value) or (drawn and known)

    def decode(self, fields: tuple[Field, ...], known_too: Mapping[str, Expr]) -> Expr:
        self.fields = {f.name: f for f in fields}
        context = self.new_context(grouped=self.group > 0, encoding=False)
        env = self.globals() | dict(known_too)
        del env["step"]
        env |= {d.name: ERROR for d in self.spec.payload}
        for name, parts in self.planes.items():
            codes = [(check_fields.leaf(self, "field", f), shift) for f, shift in parts]
            env[name] = planes.joined(context, codes)
        value = self.bind(self.spec.decode, env, context)
        return value if value is ERROR else self.result(value)

    def result(self, value: Expr) -> Expr:
        span = self.spec.decode[-1].value.span
        of = value.type
        if of.shape in ("kept", "table", "matrix") or of.dtype in ("str", "selection"):
            self.problems.add(
                span,
                f"decode gives {of}, not one number per element",
                "flat(m) has the elements of a matrix"
                if of.shape == "matrix"
                else "scatter(indices, values) puts values in their places",
            )
            return ERROR
        if value.op != "scatter" and any(e.op == "scatter" for e in walk(value)):
            self.problems.add(
                span,
                "scatter must be the last step of decode",
                "compute on the values before scattering them",
            )
            return ERROR
        return self.context.lift(self.context.number(value), "n")

    def merge_fits(self, fields: tuple[Field, ...], decode: Expr) -> None:
        """Report `merge: sum` unless decode returns the payload's only field, a number per
        element."""
        if self.spec.merge != "sum":
            return
        alone = len(self.spec.payload) == 1 and all(
            f.shape == "n" and f.storage in check_arrays.ADDITIVE for f in fields
        )
        if not alone or decode.op not in ("field", "error"):
            self.problems.add(
                self.spec.spans["merge"],
                "payloads add without decoding only when they are one "
                "float field [n] and decode returns it",
                "remove `merge: sum`",
            )
