"""The compiler's work on a spec, as data and as text: the stages, the layout, the traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from compll.frontend.spec import Spec
from compll.frontend.syntax import Call, Name, Number, Syntax, Word
from compll.ir.expr import Expr, Printer, Type
from compll.ir.layout import limits, tile_of
from compll.ir.module import REFERENCE, Module
from compll.ir.places import places
from compll.ir.rounds import rounds
from compll.ir.static import evaluate
from compll.ir.tile import FIELDS, Kernel, Op, Store, Value, When, order
from compll.ir.tile import Call as Routine
from compll.ir.tile import Walk as TileWalk
from compll.ir.tile_text import text as tile_text
from compll.passes import feedback, fusion, lower
from compll.passes.traffic import Traffic, Walk, merge_traffic, traffic_of
from compll.runtime.codec import Codec
from compll.tools import artifacts

STAGES = ("syntax", "types", "feedback", "layout", "passes", "tiles", "traffic", "source")
SIZES = (1, 1000, 1_000_000, 100_000_000)


def encode_traffic(module: Module) -> Traffic:
    """Memory traffic of the encode with state, or of the only encode."""
    return traffic_of(module, feed=bool(module.states))


def stage(name: str, spec: Spec, codec: Codec, target: str) -> str:
    """The text of a stage, one of STAGES. Raises SpecError if `target` refuses the spec."""
    module = codec.module
    makers: dict[str, Callable[[], Iterator[str]]] = {
        "syntax": lambda: _syntax(spec),
        "types": lambda: _types(module),
        "feedback": lambda: _feedback(module),
        "layout": lambda: _layout(codec),
        "passes": lambda: passes(module),
        "tiles": lambda: tiles(module),
        "traffic": lambda: walks(module),
        "source": lambda: _source(codec, target),
    }
    return "\n".join(makers[name]())


def tiles(module: Module) -> Iterator[str]:
    """The tile programs."""
    found = [kernel for part in lower.kernels(module).values() for kernel in part]
    yield "\n".join(map(tile_text, found)).rstrip()


def _source(codec: Codec, target: str) -> Iterator[str]:
    texts = artifacts.sources(target, codec.module, codec.params)
    if not texts:
        yield f"# {target} interprets the typed tree"
    for ending, text in texts.items():
        if len(texts) > 1:
            yield f"// {codec.name}.{ending}"
        yield text


def _tree(tree: Syntax) -> str:
    if isinstance(tree, Number | Word):
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
    text = Printer(module.bindings)
    for name, expr in module.bindings.items():
        yield f"{name}: {expr.type} = {text(expr)}"
    for s in module.selections:
        if s.kind == "drawn":
            yield f"{s.name}: {text(s.limit)} elements, drawn alike on all ranks"
        else:
            among = f" among {s.of}" if s.of else ""
            yield f"{s.name}: {s.kind} of {text(s.key)}{among}, at most {text(s.limit)} elements"
    yield f"decode: {module.decode.type} = {text(module.decode)}"


def _feedback(module: Module) -> Iterator[str]:
    text = Printer(module.bindings)
    if module.decoded is not None:
        yield f"decode(encode(g)) = {text(module.decoded)}"
    elif module.feedback:
        what = "this rank's own payload" if module.own else "what the ranks combined"
        yield f"residual = ({_fed(module)}) - decode({what})"
    else:
        yield "decode mixes elements: no feedback, and write-back decodes the payload"
    if module.feedback and module.decoded is not None:
        g = module.pool.make("input", (), Type("float", "n"), _fed(module))
        yield f"{module.fed_state} = {text(feedback.update(module, g, module.decoded))}"
    for name, expr in module.updates.items():
        yield f"{name} = {text(expr)}"


def _fed(module: Module) -> str:
    """The input of feedback."""
    if module.differences:
        return f"g - {REFERENCE}"
    return "g + residual" if module.decay == 1 else f"g + {module.decay:g} * residual"


def _layout(codec: Codec) -> Iterator[str]:
    text = Printer(codec.module.bindings)
    for place in places(codec.module):
        yield f"{place.name}: {place.type}, {place.size} bytes"
    for s in codec.module.selections:
        most = limits(codec.module, 10**6, codec.params)[s.name]
        yield f"count({s.name}) <= {text(s.limit)}: {most} of 1000000"
    sizes = ", ".join(f"payload_bytes({n}) = {codec.payload_bytes(n)}" for n in SIZES)
    yield f"{'exactly' if codec.fixed else 'at most'}: {sizes}"


def passes(module: Module) -> Iterator[str]:
    """The steps of an encode: walks over memory, and searches and routines before them."""
    kernel = lower.encode(module, bool(module.states))
    text, number = _Passes(kernel), 0
    if module.feedback:
        yield f"in what follows, g is {_fed(module)}"
    tile = f"groups of {module.group}" if module.group else f"tiles of {tile_of(module)}"
    for step in kernel.steps:
        inner = step.steps[0] if isinstance(step, When) else step
        when = ""
        if isinstance(step, When):
            when = f", only where {text.named(step.condition)} is {step.wanted}"
        if isinstance(inner, TileWalk):
            number += 1
            kept = f"elements of {inner.domain.of}"
            over = {"kept": kept, "matrix": "a matrix"}.get(inner.domain.kind, tile)
            yield f"pass {number}, over {over}{when}:"
            yield from text.walk(inner)
        elif line := text.line(inner):
            yield f"before pass {number + 1}: {line}{when}"
    yield from rounds_text(module)


class _Passes:
    """The steps of an encode in words of its spec."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.module = kernel, kernel.module
        self.text = Printer(self.module.bindings)
        self.fields = {f.name: f.expr for f in self.module.fields if f.expr is not None}
        self.states = dict(self.module.updates)
        if self.module.feedback and self.module.decoded is not None:
            g = self.module.pool.make("input", (), Type("float", "n"), "g")
            fed = feedback.update(self.module, g, self.module.decoded)
            self.states[self.module.fed_state] = fed

    def named(self, value: Value) -> str:
        """The expression that a value computes, or is a part of."""
        if id(value) in self.kernel.exprs:
            return self.text(self.kernel.exprs[id(value)][1])
        known = (e for v, e in self.kernel.exprs.values() if v.level == value.level
                 and e.type.shape != "static" and any(x is value for x in order([v])))  # fmt: skip
        return next(map(self.text, known), value.op)

    def line(self, step: Op) -> str:
        """A step that is no walk; "" for a number that is stored."""
        if not isinstance(step, Routine):
            return ""
        if step.routine in FIELDS:
            return f"{step.attr.name} as {step.routine}"
        if step.results:
            return self.named(step.results[0])
        made = (e for v, e in self.kernel.exprs.values() if v.attr in step.made)
        return next(map(self.text, made), step.routine)

    def walk(self, walk: TileWalk) -> Iterator[str]:
        """The parts of a walk."""
        reads = {v.attr.name for v in walk.values
                 if v.level == "lane" and v.op in ("load", "unpack", "at", "spread")}  # fmt: skip
        yield f"  reads {', '.join(sorted(reads)) or 'nothing'}"
        totals = {id(v.args[0]): v for v, _ in self.kernel.exprs.values() if v.op == "total"}
        whole = " over the whole tensor" * (self.module.group > 0)
        for fold in (v for v in walk.values if v.op == "fold"):
            if fold not in walk.folds:
                yield f"  reduces {self.named(fold)}"
            elif id(fold) in totals:
                yield f"  reduces {self.named(totals[id(fold)])}{whole}"
        for one in walk.compacts:
            s = next(s for s in self.module.selections if s.name == one.selection)
            yield f"  selects {s.name}: {s.kind} of {self.text(s.key)}"
        yield from map(self.store, walk.stores)

    def store(self, s: Store) -> str:
        """A store of a walk."""
        if s.back:
            return "  writes back on request g"
        name, updates = s.array.name, s.array.role == "state"
        known = self.states if updates else self.fields
        value = self.text(known[name]) if name in known else self.named(s.value)
        return f"  {'updates' if updates else 'stores'} {name} = {value}"


def rounds_text(module: Module) -> Iterator[str]:
    """Lines that describe the rounds to a person."""
    for number, one in enumerate(rounds(module), 1):
        size = one.payload_bytes(10**6)
        yield (
            f"round {number}: the {one.how} of {one.name} over the ranks, "
            f"{size} bytes for n = 1000000"
        )
    if module.when is not None:
        sizes = [10**k for k in range(1, 9) if evaluate(module.when, {"n": 10**k})]
        yield f"worth while for {min(sizes) if sizes else 'no'} elements or more, by powers of ten"


def walks(module: Module) -> Iterator[str]:
    text, found = Printer(module.bindings), encode_traffic(module)
    before = set[str]()
    for number, one in enumerate(found.walks, 1):
        yield f"walk {number}: {_touched(one, before)}"
        known = (e for v in one.needs for e in _exprs(found.kernel, v))
        if needs := sorted({name for e in known for name in text.values(e)}):
            yield f"  after {', '.join(needs)}"
        before |= set(one.reads)
    ratio = found.moved / max(found.least, 1e-9)
    yield f"walks {len(found.walks)}, least possible {found.chain}"
    yield (
        f"bytes per element: moved {found.moved:.4g}, least possible {found.least:.4g} "
        f"(each input read, each result written once): ratio {ratio:.2f}"
    )
    yield from merges(module, found)


def _exprs(kernel: Kernel, value: Value) -> Iterator[Expr]:
    """Expressions that a number of the piece is made of, if it depends on steps."""
    if next(fusion.inputs([value]), None) is None:
        return
    if id(value) in kernel.exprs:
        yield kernel.exprs[id(value)][1]
    elif value.op in fusion.MADE:  # the key of a threshold
        found = (e for v, e in kernel.exprs.values() if v.level == "piece" and value in order([v]))
        yield from islice(found, 1)
    else:
        for a in value.args:
            yield from _exprs(kernel, a)


def merges(module: Module, encode: Traffic) -> Iterator[str]:
    """Traffic of a decode, and of a server or a ring hop: decode, add, encode."""
    selects = any(f.shape == "kept" or f.layout.recoded for f in module.fields)
    if module.decoded is None or selects:
        return
    found = merge_traffic(module, encode)
    size = found.payload
    yield f"decode: reads payload ({size:.4g} B), writes g (4 B): ratio 1.00"
    yield f"decode and add: reads payload, g ({size + 4:.4g} B), writes g (4 B): ratio 1.00"
    if found.fused is not None:
        yield (
            "decode, add and encode in one kernel (cuda; cpu for tiles of 512 elements and more): "
            f"moved {found.fused:.4g}, "
            f"least possible {size + encode.least:.4g} (as two kernels {found.apart:.4g})"
        )


def _touched(one: Walk, before: set[str]) -> str:
    """Arrays that a walk touches, with bytes per element."""
    names = ", ".join(f"{name} again" if name in before else name for name in one.reads)
    writes = f"writes {', '.join(one.writes)} ({one.written:.4g} B)"
    reads = f"reads {names or 'nothing'} ({one.read:g} B)"
    return f"{reads}, {writes if one.writes else 'writes nothing'}"
