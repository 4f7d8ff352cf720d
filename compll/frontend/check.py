"""Stage 3: a Spec becomes a typed Module; every error is collected and raised once.

Goals: each name resolved, each operator typed, each payload field given a storage and a bound. Not
here: the order of computation (passes).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from compll.errors import Diagnostic, Problems, Span, nearest
from compll.frontend import check_arrays, check_exprs, check_fields, feedback
from compll.frontend.check_exprs import ERROR, Expressions, Scope
from compll.frontend.operators import MIXING, SELECTING
from compll.frontend.rule_context import Context
from compll.frontend.rules import integer, whole_number
from compll.frontend.spec import ANY, Binding, Declared, ParamValue, Spec, as_float
from compll.ir.expr import Expr, Pool, Type, walk
from compll.ir.module import Field, Module, Selection

# ---- planes -------------------------------------------------------------------------------------
# Codes of 3, 5, 6 or 7 bits: they travel as fields of 8, 4, 2 and 1 bits.
# `q: uint3[n]` is `q_0: uint2[n]` of `q & 3` and `q_2: uint1[n]` of `q >> 2`. Encode and decode
# see `q`, so backends do not know of planes. Codes of 0 bits do not travel at all, and are 0 in
# decode.

#: a field, and the bits that its codes are shifted by
Plane = tuple[Field, int]


def split_planes(
    c: Context, fields: Iterable[Field], taken: Container[str], added: Container[str]
) -> dict[str, list[Plane]]:
    """The planes of every field, lowest first; the field itself if it needs no others.

    taken: names that planes cannot have; added: fields that ranks add as they are.
    """
    return {f.name: list(_planes(c, f, taken)) if f.name not in added else [(f, 0)] for f in fields}


def _planes(c: Context, field: Field, taken: Container[str]) -> Iterator[Plane]:
    widths = [bits for bits in (8, 4, 2, 1) if field.bits & bits]
    if field.storage != "uint" or len(widths) == 1 or field.expr is None:
        yield field, 0
        return
    code, shift = whole_number(c, field.expr, 0, (1 << field.bits) - 1), 0
    for bits in widths:
        name = f"{field.name}_{shift}"
        while name in taken:
            name += "_"
        part = integer(c, "bitand", code, c.pool.const((1 << bits) - 1))
        yield replace(field, name=name, bits=bits, expr=part), shift
        code, shift = integer(c, "shr", code, c.pool.const(bits)), shift + bits


def joined_planes(c: Context, codes: Sequence[tuple[Expr, int]]) -> Expr:
    """The codes, put together from their planes, of which the lowest is not shifted."""
    (whole, _), *others = codes or [(c.pool.const(0), 0)]
    for code, shift in others:
        moved = integer(c, "shl", code, c.pool.const(shift))
        whole = integer(c, "bitor", whole, moved)
    return whole


# ---- check --------------------------------------------------------------------------------------

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
    declared = {p.name: p for p in feedback.accepted(spec)}
    for name, value in passed.items():
        if name in declared and (wrong := declared[name].check(value)):
            problems.diagnostics.append(
                Diagnostic("", Span(), wrong)
            )  # of the call, not of the file
        elif name not in declared and not spec.broken & {name, ANY}:
            hint = nearest(name, declared) or "it has no parameters"
            unknown = f"{spec.name} has no parameter {name!r}"
            problems.diagnostics.append(Diagnostic("", Span(), unknown, hint))
    chosen = {p.name: passed.get(p.name, p.default) for p in spec.params}
    legal = {n: declared[n].default if declared[n].check(v) else v for n, v in chosen.items()}
    return {name: _exact(declared[name].type, value) for name, value in legal.items()}


def _exact(kind: str, value: object) -> ParamValue:
    return as_float(value) if kind == "float" else value  # type: ignore[return-value]


class Checked(NamedTuple):
    """A module and the values of its parameters."""

    module: Module
    params: dict[str, ParamValue]


class _Checker(Expressions):
    """Checks the sections of a spec, in order."""

    def __init__(
        self,
        spec: Spec,
        params: Mapping[str, ParamValue],
        passed: Mapping[str, object],
        problems: Problems,
    ) -> None:
        super().__init__(spec, params, problems, Pool())
        self.passed = passed
        self.group, self.decay = 0, 1.0
        self.feedback = self.unbiased = ""
        #: derived parameters, as they were passed
        self.kept_as: dict[str, str] = {}
        self.when: Expr | None = None
        #: the payload's fields by their declared names
        self.planes: dict[str, list[Plane]] = {}
        self.spec = replace(
            spec,
            payload=tuple(map(self.declared, spec.payload)),
            state=tuple(map(self.declared, spec.state)),
        )

    def module(self) -> Module:
        spec = self.spec
        check_exprs.unique(spec, self.problems)
        self.group = self.group_size()
        self.feedback, self.unbiased = self.settle(spec.feedback), self.settle(spec.unbiased)
        feeds, self.decay = self.feedback in ("error", "own"), self.factor()
        self.kept_as = feedback.kept_as(spec, self.passed, feeds=feeds, problems=self.problems)
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
        payload_fields = check_arrays.widened(spec, check_fields.payload(self, env))
        self.planes = split_planes(
            self.context, payload_fields, set(env), {b.name for b in spec.rounds}
        )
        fields = tuple(f for parts in self.planes.values() for f, _ in parts)
        # Fixed-size fields first: then their places do not depend on selections.
        fields = tuple(sorted(fields, key=lambda f: (f.shape == "kept", f.layout.recoded)))
        decode = self.decode(fields, {k: env[k] for k in bound if self.decode_knows(env[k])})
        updates = check_fields.updates(self, states, env)
        states = check_fields.owed(self, states)
        check_arrays.combinations(spec, self.problems)
        self.merge_fits(fields, decode)
        if not fields and not self.problems.diagnostics:
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
        carried = feedback.carries(fields, self.selections, decode)
        rounds = check_arrays.rounds(spec, fields, self.selections, carried, self.problems)
        self.problems.raise_if_any()
        if feed:
            states = (*states, *feedback.feedback_states(self.kept_as, differences=differences))
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
        result = dict(spec.spans)
        for section, bindings in (("encode", spec.encode), ("update", spec.update)):
            result |= {f"{section}.{b.name}": b.span for b in bindings}
        for turn in self.turns:
            result[f"encode.{turn}"] = result.get(f"encode.{turn.split()[0]}", Span())
        return result | {f"payload.{d.name}": d.span for d in spec.payload}

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
        constant = all(e.op in alike and e.value != "step" for e in leaves)
        return self.constant_of_params(value) or (drawn and constant)

    def decode(self, fields: tuple[Field, ...], known_too: Mapping[str, Expr]) -> Expr:
        self.fields = {f.name: f for f in fields}
        context = self.new_context(grouped=self.group > 0, encoding=False)
        env = self.globals() | dict(known_too)
        del env["step"]
        env |= {d.name: ERROR for d in self.spec.payload}
        for name, parts in self.planes.items():
            codes = [(check_fields.leaf(self, "field", f), shift) for f, shift in parts]
            env[name] = joined_planes(context, codes)
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
