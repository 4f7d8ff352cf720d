"""Stage 3, declarations: storage and shape of payload fields and states."""

from __future__ import annotations

from collections.abc import Mapping

from compll.errors import Problems, RuleError, Span, closest, nearest
from compll.frontend import check_arrays, recovery
from compll.frontend.check_exprs import Expressions
from compll.frontend.check_spread import values
from compll.frontend.rule_elements import Rules
from compll.frontend.spec import Declared
from compll.frontend.syntax import Name, names
from compll.ir import matrices
from compll.ir.expr import Expr, Type
from compll.ir.module import HALVES, PACKED, POSITIONS, WHOLE, Field
from compll.ir.storage import STORAGES


class Declarations:
    """Gives each declared tensor its storage and shape."""

    #: states whose size uses a name of encode that depends on data or is wrong
    unsized: list[tuple[Span, set[str]]]
    #: stand-ins, for decode, of payload fields whose declaration or value is wrong
    assumed: dict[str, Field]

    def __init__(self, exprs: Expressions, group: int) -> None:
        self.exprs, self.spec, self.pool = exprs, exprs.spec, exprs.pool
        self.group = group

    def leaf(self, op: str, item: Field) -> Expr:
        codes = item.packed and item.name not in {b.name for b in self.spec.rounds}
        dtype = "int" if codes or item.storage in (*WHOLE, *POSITIONS) else "float"
        return self.pool.make(op, (), Type(dtype, item.shape, item.of, item.dims), item.name)

    def states(self) -> tuple[Field, ...]:
        found, self.unsized = [], []
        sizes = self.sizes() if any(item.second for item in self.spec.state) else {}
        for item in self.spec.state:
            if item.second is not None and item.base == "float32":
                dims = self.dims(item, sizes)
                if dims is None:
                    self.exprs.poisoned.add(item.name)
                else:
                    found.append(Field(item.name, "float32", 32, "matrix", dims=dims))
                continue
            per_element = isinstance(item.dim, Name) and item.dim.name == "n"
            half = item.base in HALVES and per_element
            whole = item.base == "float32" and (item.dim is None or per_element)
            if not (half or whole):
                message = f"state {item.name!r} is float32, float32[n] or float32[rows, columns]"
                hint = "bfloat16[n] and float16[n] keep 16 bits per element"
                self.exprs.problems.add(item.span, message, hint)
                self.exprs.poisoned.add(item.name)
                continue
            if self.group and not per_element:
                self.exprs.problems.add(
                    item.span, "a grouped spec keeps states per element", "float32[n]"
                )
                self.exprs.poisoned.add(item.name)
                continue
            found.append(Field(item.name, item.base, 32, "n" if per_element else "scalar"))
        return tuple(found)

    def sized_by_data(self, env: Mapping[str, Expr]) -> None:
        """Refuse states whose size depends on data, unless a mistake in encode explains it."""
        guessed = {name for name, value in env.items() if recovery.touched(value)}
        for span, taken in self.unsized:
            if not (self.exprs.problems.found and taken & (self.exprs.poisoned | guessed)):
                hint = f"{min(taken)!r} depends on data"
                self.exprs.problems.add(span, matrices.WHOLE_SIZES, hint)

    def sizes(self) -> dict[str, Expr]:
        """Names that sizes of states may use: values that encode computes from n and parameters."""
        env, held = self.exprs.globals(), (self.exprs.problems, self.exprs.rules)
        self.exprs.problems, self.exprs.rules = Problems(""), Rules(self.pool, False, encoding=True)
        for b in self.spec.encode:
            known = names(b.value) <= set(env)
            value = self.exprs.expr(b.value, env, b.name) if known else None
            if value is not None and self.exprs.constant_of_params(value):
                env[b.name] = value
        self.exprs.problems, self.exprs.rules = held
        return env

    def dims(self, item: Declared, env: Mapping[str, Expr]) -> tuple[Expr, ...] | None:
        """The rows and columns that a declaration gives to a matrix."""
        found = []
        made = {b.name for b in self.spec.encode} - set(env)
        for tree in (item.dim, item.second):
            if tree is not None and (taken := names(tree) & made):
                self.unsized.append((tree.span, taken))
                return None
            value = None if tree is None else self.exprs.expr(tree, env, "")
            if tree is None or value is None or recovery.wrong(value):
                return None
            try:
                found.append(matrices.dimension(self.exprs.settled(value)))
            except RuleError as error:
                self.exprs.problems.add(tree.span, str(error), error.hint)
        return tuple(found) if len(found) == 2 else None

    def payload(self, env: Mapping[str, Expr]) -> tuple[Field, ...]:
        """The fields whose declaration and value fit; stand-ins for others go to `self.assumed`."""
        fields, self.assumed = [], dict[str, Field]()
        unread = {b.name for b in self.spec.encode} & set(self.spec.broken) & set(env)
        for name in (u for u in unread if not recovery.wrong(env[u])):  # of unread type
            made = env[name].type
            self.assumed[name] = Field(name, "float32", 32, made.shape, made.of, dims=made.dims)
        for item in self.spec.payload:
            storage, bits = self.storage(item)
            value = env.get(item.name)
            sound = value is not None and not recovery.wrong(value)
            found = self.field(item, storage, bits, env) if sound else None
            if not sound:
                self.unvalued(item)
            if found is not None:
                fields.append(found)
                continue
            lengths = [*self.exprs.selections, *self.exprs.poisoned]
            known = recovery.shape(item, value, self.exprs.rules.whole, lengths)
            if known is not None:
                self.assumed[item.name] = Field(item.name, storage, bits, known.shape, known.of)
        return tuple(fields)

    def unvalued(self, item: Declared) -> None:
        """Report a field without a value; for a wrong value report mistakes in the declaration."""
        if item.name not in {b.name for b in self.spec.encode} and not self.exprs.excused(
            item.name
        ):
            self.undefined(item)
        name = item.dim.name if isinstance(item.dim, Name) else "n"
        known = {"n", "groups", *self.exprs.selections, *(p.name for p in self.spec.params)}
        if name not in known and item.second is None and not self.exprs.excused(name):
            self.exprs.problems.add(item.span, *self.unknown_length(item.name, name))

    def field(
        self, item: Declared, storage: str, bits: int, env: Mapping[str, Expr]
    ) -> Field | None:
        expr = env[item.name]
        if item.second is not None or expr.type.shape == "matrix":
            dims = self.dims(item, env) if item.second is not None else None
            if item.second is None or dims is not None:
                added = item.name in {b.name for b in self.spec.rounds}
                return check_arrays.field(
                    item, storage, bits, expr, dims, self.exprs.problems, added=added
                )
            return None
        shape, of = self.dimension(item, expr)
        if expr.type.dtype in ("selection", "str") or shape == "":
            if expr.type.dtype in ("selection", "str"):
                self.exprs.problems.add(
                    item.span,
                    f"{item.name!r} is a {expr.type.dtype}, not numbers",
                    "store indices(selection) and x[selection]",
                )
            return None
        if (storage, bits) == ("uint", 8) and shape in ("scalar", "group"):
            storage = "byte"
        if storage in PACKED and shape in ("scalar", "group"):
            self.exprs.problems.add(
                item.span,
                f"{item.name!r} is one number{' per group' * (shape == 'group')}, and "
                f"{self.written(item)} holds elements",
                "use uint8, uint16, int32 or uint32 for a whole number, float32, float16, "
                f"bfloat16 or float8_e4m3 for another, or {self.written(item)}[n] to repeat it for "
                "every element",
            )
            return None
        if storage in POSITIONS and expr.op != "indices":
            self.exprs.problems.add(
                item.span,
                f"{item.name!r}: {storage} holds the positions of a selection",
                "store indices(selection)",
            )
            return None
        if storage in ("trit", "runs", "huffman") and not self.of_all(item, storage, shape):
            return None
        expr = self.exprs.rules.lift(expr, shape, of)
        if storage in WHOLE and expr.op != "indices":
            expr = self.whole(expr, storage)
        if storage in ("trit", "runs"):
            expr = self.exprs.rules.trit(expr)
        if storage in check_arrays.FLOATS:
            expr = self.exprs.rules.number(expr, "float")
        return Field(item.name, storage, bits, shape, of, expr)

    @staticmethod
    def written(item: Declared) -> str:
        """The declared type, without its length."""
        return f"{item.base}[...]" if item.bits is not None else item.base

    def whole(self, expr: Expr, storage: str) -> Expr:
        """The integer that a type of integers stores for an expression; feedback must know it."""
        held = STORAGES[storage].whole
        assert held is not None
        low, high = held
        if storage in ("uint16", "byte") or expr.type.shape == "scalar":
            return self.exprs.rules.whole_number(expr, low, high)
        expr = self.exprs.rules.whole_element(expr)  # an int32, so uint32 has half its range
        return (
            expr
            if values(expr)[0] >= low
            else self.exprs.rules.arithmetic("max", (expr, self.pool.const(low)))
        )

    def of_all(self, item: Declared, storage: str, shape: str) -> bool:
        """Report trits and Huffman codes of selected elements, and those of varying length in a
        spec with selections."""
        if shape == "n" and not (storage != "trit" and self.exprs.selections):
            return True
        message = f"{item.name!r}: {storage} holds a value of every element"
        hint = "use trit[n], or uint2 for selected elements"
        what = storage
        if storage == "huffman":
            hint, what = "use uint[bits], of which a code has a fixed length", "Huffman codes"
        if shape == "n":
            message = f"{item.name!r}: {what} do not go together with selections"
        self.exprs.problems.add(item.span, message, hint)
        return False

    def undefined(self, item: Declared) -> None:
        """Report a payload field that encode does not define; decode may misspell its name."""
        defined = {b.name for b in self.spec.encode} | {"g"}
        used = set[str]().union(*(names(b.value) for b in self.spec.decode))
        lacking = (used & defined) - {d.name for d in self.spec.payload}
        self.exprs.problems.add(
            item.span,
            f"{item.name!r} is in the payload but encode does not define it",
            nearest(item.name, lacking or defined),
        )
        # The misspelled name in decode is not a second error.
        self.exprs.poisoned |= {closest(item.name, lacking) or min(lacking)} if lacking else set()

    def storage(self, item: Declared) -> tuple[str, int]:
        if item.base == "bool":
            return "uint", 1
        if item.base in ("float", "bfloat"):
            return self.sized(item, {16: f"{item.base}16", 32: "float32"}, "float32"), 32
        if item.base in ("trit", "runs"):
            return item.base, 2
        if item.base == "huffman":
            return item.base, self.bits(item, 8)
        if not item.base.startswith("uint") or item.base in WHOLE:
            return item.base, 32
        bits = int(item.base[4:]) if item.bits is None and item.base != "uint" else None
        return "uint", bits or self.bits(item, 15)

    def bits(self, item: Declared, most: int) -> int:
        """The bits in brackets, from 1 to `most`; 8 in place of wrong ones."""
        value = None if item.bits is None else self.exprs.constant(item.bits)
        if isinstance(value, int | float) and value in range(1, most + 1):
            return int(value)
        if value is not None:
            message = f"{item.base} has 1 to {most} bits, not {value}"
            self.exprs.problems.add(item.span, message)
        return 8

    def sized(self, item: Declared, known: Mapping[int, str], default: str) -> str:
        """The storage for a width in brackets."""
        assert item.bits is not None
        value = self.exprs.constant(item.bits)
        storage = next((s for bits, s in known.items() if bits == value), None)
        if storage is None and value is not None:
            widths = " or ".join(map(str, known))
            self.exprs.problems.add(item.span, f"{item.base} has {widths} bits, not {value}")
        return storage or default

    def dimension(self, item: Declared, expr: Expr) -> tuple[str, str]:
        """The level that a declaration gives a field, checked against its expression."""
        whole = "group" if self.group else "scalar"
        declared = {None: (whole, ""), "n": ("n", ""), "groups": ("group", "")}
        name = item.dim.name if isinstance(item.dim, Name) else None
        if expr.type.shape == "table":
            return self.table_dimension(item, expr)
        if item.dim is None and expr.type.shape == "scalar":
            return "scalar", ""
        if (
            item.dim is not None
            and name not in ("n", "groups")
            and name not in self.exprs.selections
        ):
            if not self.exprs.excused(name or ""):
                self.exprs.problems.add(item.dim.span, *self.unknown_length(item.name, name))
            return "", ""
        shape, of = declared.get(name, ("kept", name or ""))
        level = expr.type.shape
        fits = (
            (level, expr.type.of) == (shape, of)
            or level == "static"
            or (level in ("scalar", "group") and shape in ("n", "group"))
        )
        if not fits:
            self.exprs.problems.add(
                item.span,
                f"{item.name!r} is declared {self.named(shape, of)} but is "
                f"{self.named(level, expr.type.of)}",
                self.advice(level, expr.type.of),
            )
            return "", ""
        return shape, of

    def unknown_length(self, field: str, name: str | None) -> tuple[str, str]:
        """Message and hint for an unknown length, or for the name of something without a length."""
        lengths = ["n", "groups", *self.exprs.selections]
        if name is not None:
            return f"{field!r} has an unknown length {name!r}", nearest(name, lengths)
        hint = f"{', '.join(lengths)}; a matrix has rows and columns, like float32[n, 1]"
        return f"the length of {field!r} is no name", hint

    def table_dimension(self, item: Declared, expr: Expr) -> tuple[str, str]:
        """The level of a table, checked against its declared size."""
        if expr.op == "literal":
            hint = "decode knows it by its name"
            self.exprs.problems.add(item.span, f"{item.name!r} does not depend on data", hint)
            return "", ""
        size = self.exprs.constant(item.dim) if item.dim is not None else 1
        if item.base == "float32" and size == int(expr.type.of):
            return "table", expr.type.of
        if size is not None:
            message = f"{item.name!r} is a table of {expr.type.of} numbers"
            self.exprs.problems.add(
                item.span, message, f"write float32[{expr.type.of}] or its parameter"
            )
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
