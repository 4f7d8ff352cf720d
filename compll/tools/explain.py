"""The compiler's work on a spec, as data and as text: the stages, the layout, the traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from compll.frontend.spec import Spec
from compll.frontend.syntax import Call, Name, Number, Syntax, Word
from compll.ir.expr import Expr, Type, walk
from compll.ir.layout import limits, tile_of
from compll.ir.matrices import mixes
from compll.ir.module import REFERENCE, Module
from compll.ir.places import places
from compll.ir.printer import Printer
from compll.ir.program import LIBRARY, Pass, Program
from compll.ir.tile_text import text as tile_text
from compll.passes import feedback, lower
from compll.passes.kernel_traffic import rounds_text, traffic_of
from compll.passes.schedule import hops, schedule
from compll.passes.traffic import Traffic, Walk, merge_traffic
from compll.runtime.codec import Codec
from compll.tools import artifacts

STAGES = ("syntax", "types", "feedback", "layout", "passes", "tiles", "traffic", "source")
SIZES = (1, 1000, 1_000_000, 100_000_000)


def program_of(module: Module) -> Program:
    """The encode with state, or the only encode."""
    return schedule(module, feed=bool(module.states))


def found_traffic(module: Module) -> Traffic:
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
    if mixes(module):
        yield from _arrays_feedback(module, text)
        return
    if module.decoded is None:
        yield "decode mixes elements: no feedback, and write-back decodes the payload"
        return
    yield f"decode(encode(g)) = {text(module.decoded)}"
    if module.feedback:
        g = module.pool.make("input", (), Type("float", "n"), _fed(module))
        yield f"{module.fed_state} = {text(feedback.update(module, g, module.decoded))}"
    for name, expr in module.updates.items():
        yield f"{name} = {text(expr)}"


def _fed(module: Module) -> str:
    """The input of feedback."""
    if module.differences:
        return f"g - {REFERENCE}"
    return "g + residual" if module.decay == 1 else f"g + {module.decay:g} * residual"


def _arrays_feedback(module: Module, text: Printer) -> Iterator[str]:
    if module.feedback:
        what = "this rank's own payload" if module.own else "what the ranks combined"
        yield f"residual = ({_fed(module)}) - decode({what})"
    for name, expr in module.updates.items():
        yield f"{name} = {text(expr)}"


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
    """The passes; for specs whose values mix elements, their steps."""
    if mixes(module):
        text = Printer(module.bindings)
        roots = [f.expr for f in module.fields if f.expr is not None]
        taken = (e for e in walk(*roots, module.decode, *module.updates.values()) if e.args)
        for number, e in enumerate((e for e in taken if e.type.shape != "static"), 1):
            yield f"step {number}: {text.names.get(id(e), e.type.shape)} = {text(e)}"
        yield from rounds_text(module)
        return
    program = program_of(module)
    text = Printer(program.named)
    tile = f"groups of {module.group}" if module.group else f"tiles of {tile_of(module)}"
    for number, one in enumerate(program.passes, 1):
        for e in one.scalars:
            if e.op in LIBRARY:
                guard = program.guards.get(id(e))
                when = f", only where {text(guard[0])} is {guard[1]}" if guard else ""
                yield f"before pass {number}: {text(e)}{when}"
        yield f"pass {number}, over {tile}:"
        yield from _pass(one, text, grouped=module.group > 0)


def _pass(one: Pass, text: Printer, *, grouped: bool) -> Iterator[str]:
    reads = sorted({str(e.value) for e in walk(*_roots(one)) if e.op in ("input", "state")})
    yield f"  reads {', '.join(reads) or 'nothing'}"
    for e in one.reductions:
        whole = grouped and e.type.shape == "scalar"
        yield f"  reduces {text(e)}{' over the whole tensor' if whole else ''}"
    for s in one.selections:
        yield f"  selects {s.name}: {s.kind} of {text(s.key)}"
    for sink in [*one.sinks, *one.kept]:
        what = {"field": "stores", "state": "updates", "back": "writes back on request"}[sink.kind]
        yield f"  {what} {sink.name} = {text(sink.expr)}"


def _roots(one: Pass) -> list[Expr]:
    return [s.expr for s in one.sinks] + one.reductions + [s.key for s in one.selections]


def walks(module: Module) -> Iterator[str]:
    named = module.bindings if mixes(module) else program_of(module).named
    text, found = Printer(named), found_traffic(module)
    before = set[str]()
    for number, one in enumerate(found.walks, 1):
        yield f"walk {number}: {_touched(one, before)}"
        if needs := sorted({name for e in one.needs for name in text.values(e)}):
            yield f"  after {', '.join(needs)}"
        before |= set(one.reads)
    ratio = found.moved / max(found.least, 1e-9)
    yield f"walks {len(found.walks)}, least possible {found.chain}"
    yield (
        f"bytes per element: moved {found.moved:.4g}, least possible {found.least:.4g} "
        f"(each input read, each result written once): ratio {ratio:.2f}"
    )
    yield from merges(module, found)


def merges(module: Module, encode: Traffic) -> Iterator[str]:
    """Traffic of a decode, and of a server or a ring hop: decode, add, encode."""
    selects = any(f.shape == "kept" or f.recoded for f in module.fields)
    if mixes(module) or selects:
        return
    single = len(encode.walks) == 1 and hops(module)
    found = merge_traffic(module, encode, single)
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
