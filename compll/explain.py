"""What the compiler did with a spec, as data and as text: the stages, the layout, the traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compll import feedback
from compll.codec import Codec
from compll.ir import Expr, Field, Module, Type, walk
from compll.layout import header, limits, tile_of
from compll.passes import LIBRARY, Pass, Program, schedule, traffic
from compll.spec import Spec
from compll.syntax import Call, Name, Number, Syntax

STAGES = ("syntax", "types", "feedback", "layout", "passes", "traffic", "source")
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "and", "or": "or", "floordiv": "//", "mod": "%", "pow": "**",
}  # fmt: skip
SIZES = (1, 1000, 1_000_000, 100_000_000)


def program_of(module: Module) -> Program:
    """The encode with state, or the only one."""
    return schedule(module, feed=bool(module.states))


class Printer:
    """Writes expressions as a person would, with the names that the spec gives to their parts."""

    def __init__(self, module: Module) -> None:
        named = reversed(module.bindings.items())
        self.names = {id(e): name for name, e in named if e.args}

    def __call__(self, expr: Expr) -> str:
        """The expression itself, its parts by name."""
        return self.body(expr)

    def part(self, expr: Expr) -> str:
        return self.names.get(id(expr)) or self.body(expr)

    def body(self, expr: Expr) -> str:
        if expr.op == "const":
            return repr(expr.value)
        if expr.op in ("lift", "float", "int"):
            return self.part(expr.args[0])
        if not expr.args:
            return self.leaf(expr)
        args = [self.part(a) for a in expr.args]
        if expr.op in INFIX:
            return f"({args[0]} {INFIX[expr.op]} {args[1]})"
        if expr.op == "choose":
            return f"({args[1]} if {args[0]} else {args[2]})"
        if expr.op == "gather":
            return f"{args[0]}[{expr.value}]"
        special = {"neg": "-", "code": f"stored.{expr.value}"}
        return f"{special.get(expr.op, expr.op.removeprefix('reduce_'))}({', '.join(args)})"

    @staticmethod
    def leaf(expr: Expr) -> str:
        known = {
            "uniform": "random(0, 1)",
            "indices": f"indices({expr.value})",
            "count_kept": f"count({expr.value or expr.type.of})",
            "group_size": "size of the group",
        }
        return known.get(expr.op, str(expr.value))


def stage(name: str, spec: Spec, codec: Codec) -> str:
    """One stage's text; `name` is one of STAGES."""
    module = codec.module
    makers: dict[str, Callable[[], Iterator[str]]] = {
        "syntax": lambda: _syntax(spec),
        "types": lambda: _types(module),
        "feedback": lambda: _feedback(module),
        "layout": lambda: _layout(codec),
        "passes": lambda: _passes(module),
        "traffic": lambda: _traffic(module),
        "source": lambda: iter([source(codec)]),
    }
    return "\n".join(makers[name]())


def source(codec: Codec) -> str:
    """The generated source, or a remark where the backend interprets the typed tree."""
    found = getattr(codec.backend, "source", None)
    return found.text if found is not None else "# this backend interprets the typed tree\n"


def _tree(tree: Syntax) -> str:
    if isinstance(tree, Number):
        return repr(tree.value)
    if isinstance(tree, Name):
        return tree.name
    assert isinstance(tree, Call)
    return f"{tree.op}({', '.join(map(_tree, tree.args))})"


def _syntax(spec: Spec) -> Iterator[str]:
    for section, bindings in (
        ("encode", spec.encode),
        ("decode", spec.decode),
        ("update", spec.update),
    ):
        for b in bindings:
            yield f"{section}  {b.name} = {_tree(b.value)}"


def _types(module: Module) -> Iterator[str]:
    text = Printer(module)
    for name, expr in module.bindings.items():
        yield f"{name}: {expr.type} = {text(expr)}"
    for s in module.selections:
        yield f"{s.name}: {s.kind} of {text(s.key)}, at most {text(s.limit)} elements"
    yield f"decode: {module.decode.type} = {text(module.decode)}"


def _feedback(module: Module) -> Iterator[str]:
    text = Printer(module)
    if module.decoded is None:
        yield "decode mixes elements: no feedback, and write-back decodes the payload"
        return
    yield f"decode(encode(g)) = {text(module.decoded)}"
    if module.feedback:
        g = module.pool.make("input", (), Type("float", "n"), "g + residual")
        yield f"residual = {text(feedback.residual_update(module.pool, g, module.decoded))}"
    for name, expr in module.updates.items():
        yield f"{name} = {text(expr)}"


@dataclass(frozen=True)
class Place:
    """A payload field and its size as a formula."""

    name: str
    type: str
    size: str


def places(module: Module) -> list[Place]:
    """The payload's parts in order."""
    found = [Place(f"count of {s.name}", "uint32", "4") for s in module.selections if s.dynamic]
    found += [Place(f"length of {name}", "uint32", "4") for name in header(module)[1]]
    found += [Place(f.name, _type(f), _size(f, module)) for f in module.fields]
    if module.status:
        found.append(Place("status", "uint8", "1"))
    return found


def _type(f: Field) -> str:
    base = f"uint{f.bits}" if f.packed else f.storage
    return base + {"n": "[n]", "group": "[groups]", "kept": f"[{f.of}]"}.get(f.shape, "")


def _size(f: Field, module: Module) -> str:
    count = {
        "scalar": "",
        "n": "n",
        "group": f"ceil(n / {module.group})",
        "kept": f"count({f.of})",
    }[f.shape]
    if f.storage == "gaps":
        return f"{count} + the gaps above 127"
    if not count:
        return str(f.item_bits // 8)
    if f.packed and f.bits < 8:
        return f"ceil({count} * {f.bits} / 8)"
    return f"{count} * {f.item_bits // 8}" if f.item_bits > 8 else count


def _layout(codec: Codec) -> Iterator[str]:
    text = Printer(codec.module)
    for place in places(codec.module):
        yield f"{place.name}: {place.type}, {place.size} bytes"
    for s in codec.module.selections:
        most = limits(codec.module, 10**6, codec.params)[s.name]
        yield f"count({s.name}) <= {text(s.limit)}: {most} of 1000000"
    sizes = ", ".join(f"payload_bytes({n}) = {codec.payload_bytes(n)}" for n in SIZES)
    yield f"{'exactly' if codec.fixed else 'at most'}: {sizes}"


def _passes(module: Module) -> Iterator[str]:
    text = Printer(module)
    program = program_of(module)
    tile = f"groups of {module.group}" if module.group else f"tiles of {tile_of(module)}"
    for number, one in enumerate(program.passes, 1):
        for e in one.scalars:
            if e.op in LIBRARY:
                guard = program.guards.get(id(e))
                when = f", only where {text(guard[0])} is {guard[1]}" if guard else ""
                yield f"before pass {number}: {text(e)}{when}"
        yield f"pass {number}, over {tile}:"
        yield from _pass(one, text)


def _pass(one: Pass, text: Printer) -> Iterator[str]:
    reads = sorted({str(e.value) for e in walk(*_roots(one)) if e.op in ("input", "state")})
    yield f"  reads {', '.join(reads) or 'nothing'}"
    for e in one.reductions:
        yield f"  reduces {text(e)}"
    for s in one.selections:
        yield f"  selects {s.name}: {s.kind} of {text(s.key)}"
    for sink in [*one.sinks, *one.kept]:
        what = {"field": "stores", "state": "updates", "back": "writes back on request"}[sink.kind]
        yield f"  {what} {sink.name} = {text(sink.expr)}"


def _roots(one: Pass) -> list[Expr]:
    return [s.expr for s in one.sinks] + one.reductions + [s.key for s in one.selections]


def _traffic(module: Module) -> Iterator[str]:
    found = traffic(program_of(module))
    for number, (read, written) in enumerate(found.passes, 1):
        yield f"walk {number}: reads {read:g}, writes {written:.4g} bytes per element"
    ratio = found.moved / max(found.least, 1e-9)
    yield f"moved {found.moved:.4g}, least possible {found.least:.4g}: ratio {ratio:.2f}"


def report(codec: Codec) -> dict[str, object]:
    """What `compll build` writes beside the source, as JSON."""
    module = codec.module
    found = traffic(program_of(module))
    return {
        "name": codec.name,
        "about": module.about,
        "source": module.source,
        "parameters": dict(codec.params),
        "digest": codec.digest,
        "target": codec.target,
        "group": module.group or None,
        "feedback": module.feedback,
        "states": [s.name for s in module.states],
        "merge": module.merge,
        "payload": [{"name": p.name, "type": p.type, "bytes": p.size} for p in places(module)],
        "payload_fixed": codec.fixed,
        "payload_bytes": {str(n): codec.payload_bytes(n) for n in SIZES},
        "passes": len(found.passes),
        "bytes_moved_per_element": found.moved,
        "bytes_least_per_element": found.least,
    }


def markdown(codec: Codec) -> str:
    """The report for a reader: what travels, what each pass does, what it costs."""
    module = codec.module
    rows = [f"| {p.name} | {p.type} | {p.size} |" for p in places(module)]
    bound = "exactly" if codec.fixed else "at most"
    sizes = [f"| {n} | {codec.payload_bytes(n)} |" for n in SIZES]
    params = ", ".join(f"{k} = {v}" for k, v in codec.params.items()) or "none"
    facts = [f"- parameters: {params}", f"- backend: {codec.target}", f"- digest: {codec.digest}"]
    parts = [
        [f"# {codec.name}", "", module.about, "", *facts],
        ["## Payload", "", "| part | type | bytes |", "| --- | --- | --- |", *rows],
        [f"| elements | bytes ({bound}) |", "| --- | --- |", *sizes],
        ["## Passes", "", "```", *_passes(module), "```"],
        ["## Memory traffic", "", "Bytes per element of the gradient.", "", "```"],
    ]
    text = "\n\n".join("\n".join(part) for part in parts)
    return "\n".join([text, *_traffic(module), "```", ""])


def bits(codec: Codec) -> float:
    """Payload bits per element of a large tensor."""
    n = 1 << 24
    return codec.payload_bytes(n) * 8 / n
