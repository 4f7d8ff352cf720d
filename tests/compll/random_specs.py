"""Random valid specs of many shapes, on which backends are compared."""

from __future__ import annotations

import random

UNARY = ("abs({})", "-{}", "sign({})", "floor({})", "ceil({})", "round({})", "sqrt(abs({}))")
ROUNDED = ("float16({})", "bfloat16({})", "bfloat16_up({})", "float8_e4m3({})",
           "exp2(exponent({}))",
           "lookup([0.5, -1, 3, 1e-3], bucket({}, [-1, 0, 0.25]))")  # fmt: skip
BINARY = ("({} + {})", "({} - {})", "({} * {})", "({} / {})", "min({}, {})", "max({}, {})")
INTEGER = ("({} + {})", "({} * {})", "({} // {})", "({} % {})", "({} & {})", "({} | {})",
           "({} ^ {})", "({} << {})", "({} >> {})", "max({}, {})")  # fmt: skip
WHOLE = ("0", "1", "3", "7", "-5", "31", "33", "255", "65537")
LOGIC = ("({} and {})", "({} or {})", "not ({})")
NUMBERS = ("0.5", "2", "-1", "0.25", "3", "1.5", "1e-3", "7", "100")
FOLDS = ("mean(abs({}))", "max(abs({}))", "max({})", "min({})", "sum({})", "std({})", "norm2({})")
COUNTED = ("count({})", "mean({1}, {0})", "sum(abs({1}), {0})", "norm2({1}, {0})")
#: thresholds of the whole tensor, with tries that may depend on data
TRIED = (
    "adjust(abs({}), 1, n * 0.1, n * 0.3, 0.7, 1.3, {})",
    "bisect({}, -4, 4, n / 8, n / 4, {})",
)
TRIES = ("3", "max(2, count({}))", "max(count({}), 1)", "int(max(1, max({})))")
CODES = ("uint1", "uint2", "uint4", "uint8")
FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3")
INDICES = ("uint32", "gaps", "golomb")


class Maker:
    """Random expressions of the names made so far, each with a level."""

    def __init__(self, source: random.Random, grouped: bool) -> None:
        self.source, self.grouped = source, grouped
        self.scalars: list[str] = []
        self.elements = ["g"]
        self.conditions: list[str] = []
        self.draws = source.random() < 0.4

    def one(self, *options):
        return self.source.choice(options)

    def chance(self, p):
        return self.source.random() < p

    def leaf(self):
        found = [*self.elements, *self.elements, self.one(*NUMBERS), *self.scalars]
        if self.draws:
            found.append("random(0, 1)")
        return self.one(*found)

    def element(self, depth):
        """A float per element."""
        if depth == 0:
            return self.leaf()
        kind = self.source.randrange(11)
        if kind < 3:
            return self.one(*UNARY).format(self.element(depth - 1))
        if kind < 7:
            return self.one(*BINARY).format(self.element(depth - 1), self.element(depth - 1))
        if kind == 7:
            condition = self.condition(depth - 1)
            return f"where({condition}, {self.element(depth - 1)}, {self.element(depth - 1)})"
        if kind == 8:
            return self.one(*ROUNDED).format(self.element(depth - 1))
        if kind == 9:
            return self.integer(depth)
        return f"clip({self.element(depth - 1)}, -2, {self.scalar_leaf()})"

    def integer(self, depth):
        """An integer per element; bounds of 32 bits, shifts by any number, divisions by 0."""
        if depth == 0:
            return self.one(*WHOLE, f"exponent({self.leaf()})", f"int({self.leaf()})")
        return self.one(*INTEGER).format(self.integer(depth - 1), self.integer(depth - 1))

    def of_g(self, depth):
        """A float per element, computed from the gradient."""
        found = self.element(depth)
        return found if any(name in found for name in self.elements) else f"({found} + g)"

    def condition(self, depth):
        if self.conditions and self.chance(0.3):
            return self.one(*self.conditions)
        if depth > 0 and self.chance(0.3):
            text = self.one(*LOGIC)
            return text.format(self.condition(depth - 1), self.condition(depth - 1))
        sign = self.one("<", "<=", ">", ">=", "==", "!=")
        return f"{self.of_g(max(0, depth - 1))} {sign} {self.one('0', self.scalar_leaf())}"

    def scalar_leaf(self):
        return self.one(*(self.scalars or ["1"]), self.one(*NUMBERS))

    def scalar(self):
        """A number of the tensor, or of a group."""
        if self.grouped and self.chance(0.25):
            return f"whole({self.fold()})"
        if not self.grouped and self.chance(0.15):
            tries = self.one(*TRIES).format(self.condition(0))
            return self.one(*TRIED).format(self.of_g(1), tries)
        kind = self.source.randrange(6)
        if kind < 3:
            return self.one(*FOLDS).format(self.of_g(self.source.randrange(3)))
        if kind == 3:
            return self.one(*COUNTED).format(self.condition(1), self.of_g(1))
        if kind == 4:
            return self.one(*BINARY).format(self.scalar_leaf(), self.fold())
        first, second = self.fold(), self.scalar_leaf()
        return f"({first} / {second} if {second} > 0 else {self.scalar_leaf()})"

    def fold(self):
        if self.chance(0.1):
            return f"lookup([0.5, 2, 8], bucket({self.one(*FOLDS).format(self.of_g(1))}, [0.1, 3]))"
        return self.one(*FOLDS).format(self.of_g(1))


def spec(source: random.Random) -> str:
    """A spec's text. Most are valid."""
    grouped = source.random() < 0.4
    maker = Maker(source, grouped)
    lines = ["name: made"]
    if grouped:
        lines.append(f"group: {source.choice([8, 32, 64, 128, 1024])}")
    states = source.choice([[], [], ["s"], ["s", "t"]])
    if states:
        types = {
            name: source.choice(["float32[n]", "bfloat16[n]", "float16[n]"]) for name in states
        }
        lines += ["state:", *(f'  {name}: "{kind}"' for name, kind in types.items())]
        maker.elements += states
    lines.append("encode:")
    for number in range(source.randrange(1, 5)):
        kind = source.randrange(3)
        name = f"v{number}"
        if kind == 0:
            lines.append(f"  {name}: {maker.of_g(source.randrange(1, 4))}")
            maker.elements.append(name)
        elif kind == 1:
            lines.append(f"  {name}: {maker.scalar()}")
            maker.scalars.append(name)
        else:
            lines.append(f"  {name}: {maker.condition(2)}")
            maker.conditions.append(name)
    lines.append(f"  size: {maker.scalar()}")
    maker.scalars.append("size")
    select = source.random() < 0.45
    write = source.choice([selected, selected, forms]) if select else dense
    fields, decode = write(maker, lines)
    lines += ["payload:", *(f'  {name}: "{kind}"' for name, kind in fields.items())]
    lines.append(f"decode: {decode}")
    if states:
        lines.append("update:")
        for name in states:
            new = maker.element(2)
            if select and source.random() < 0.3:
                new = f"where(kept, {maker.element(1)}, {maker.element(1)})"
            lines.append(f"  {name}: {new}")
    if source.random() < 0.6:
        lines.append("feedback: error")
    return "\n".join(lines) + "\n"


def dense(maker, lines):
    """Codes of every element; returns the fields, and decode's expression of them."""
    source = maker.source
    fields = {"size": source.choice(FLOATS)}
    parts = []
    for number in range(source.randrange(1, 3)):
        name = f"q{number}"
        kind = source.randrange(4)
        if kind == 0 and maker.conditions:
            lines.append(f"  {name}: {source.choice(maker.conditions)}")
            fields[name] = "uint1[n]"
            parts.append(f"where({name}, size, {source.choice(['0', '-size', '0.5'])})")
        elif kind == 1:
            lines.append(f"  {name}: clip(floor({maker.of_g(2)}), 0, 2)")
            fields[name] = source.choice(["trit[n]", "runs[n]"])
            parts.append(f"({name} - 1) * size")
        elif kind == 2:
            lines.append(f"  {name}: {maker.of_g(2)}")
            fields[name] = f"{source.choice(FLOATS)}[n]"
            parts.append(name)
        else:
            extra = source.choice(["", " + 0.5", " + random(0, 1)"])
            lines.append(f"  {name}: floor({maker.of_g(2)} / size * 3 + 2{extra})")
            fields[name] = f"{source.choice([*CODES, 'huffman[3]'])}[n]"
            parts.append(f"({name} / 3 - 1) * size")
    return fields, " + ".join(parts)


def forms(maker, lines):
    """A filter for each of several forms of elements. Some exclude each other, some only look so:
    their numbers are one number in float32."""
    source, found = maker.source, {}
    lines.append(f"  tag: {source.choice(['abs(g)', 'round(g)', 'int(g)', 'g * 1'])}")
    numbers = source.choice([("0.1", "0.1000000001"), ("16777216", "16777217"), ("1", "2", "0"),
                             ("-0.0", "0"), ("0.5", "0.25", "1e-46", "0")])  # fmt: skip
    first = ""
    for i, number in enumerate(numbers):
        condition = f"not (tag == {numbers[0]})" if source.random() < 0.2 else f"tag == {number}"
        lines.append(f"  form{i}: filter({condition})")
        first = first or f"form{i}"
        lines.append(f"  value{i}: ({maker.of_g(1)})[form{i}]")
        found[f"value{i}"] = f"{source.choice(FLOATS)}[form{i}]"
    lines.append(f"  index: indices({first})")
    return {"index": f"uint32[{first}]", **found}, "scatter(index, value0)"


def selected(maker, lines):
    """Selected elements and their positions."""
    source = maker.source
    if not maker.grouped and source.random() < 0.4:
        lines.append(f"  kept: top(abs({maker.of_g(1)}), max(1, floor(n * 0.1)))")
    else:
        limit = source.choice(["n", "ceil(n / 2)", "ceil(n / 8)"])
        lines.append(f"  kept: filter({maker.condition(2)}, {limit})")
    lines.append("  index: indices(kept)")
    value = maker.of_g(2)
    fields = {"size": source.choice(FLOATS)} if source.random() < 0.5 else {}
    if maker.grouped:
        fields = {}
    fields["index"] = f"{source.choice(INDICES)}[kept]"
    if source.random() < 0.6 or not fields.get("size"):
        lines.append(f"  value: ({value})[kept]")
        fields["value"] = f"{source.choice(FLOATS)}[kept]"
        decode = "scatter(index, value)"
    else:
        lines.append(f"  value: floor(({value}) / size * 7 + 8)[kept]")
        fields["value"] = "uint4[kept]"
        decode = "scatter(index, (value / 7 - 1) * size)"
    return fields, decode
