"""The compiler's work on a spec, as data and as text: the stages, the layout, the traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice

from compll.errors import UsageError
from compll.frontend import feedback
from compll.frontend.spec import Call, Name, Number, Spec, Syntax, Word
from compll.ir.expr import FACTOR, Expr, Printer, Type, formula
from compll.ir.layout import header, limits, rounds, tile_of
from compll.ir.module import REFERENCE, Field, Module
from compll.ir.static import Number as HostNumber
from compll.ir.static import evaluate
from compll.ir.storage import WITH_BITS
from compll.ir.tile import FIELDS, Kernel, Op, Store, Value, Walk, When, order, order_inside
from compll.ir.tile import Call as Routine
from compll.ir.tile import text as tile_text
from compll.passes import fusion, lower
from compll.passes.traffic import Pass, Traffic, merge_traffic, traffic_of
from compll.runtime.codec import Codec

# ---- artifacts ----------------------------------------------------------------------------------
# Files that `compll build` writes for a target: generated source and, for CUDA, compiled kernels.
#
# A target that generates code has a row in `_SOURCES`; other targets interpret the typed tree.
# Nothing here needs the target's device.

Texts = dict[str, str]
#: registers, local and shared memory, by the gradient's dtype and the kernel's name
Kernels = dict[str, dict[str, dict[str, int]]]
#: targets whose codecs need a device; their source does not
DEVICES = ("cuda",)


def sources(target: str, module: Module, params: Mapping[str, HostNumber]) -> Texts:
    """Generated source, by the ending of its file. Raises SpecError."""
    maker = _SOURCES.get(target)
    return maker(module, params) if maker else {}


@dataclass(frozen=True)
class Binaries:
    """Compiled kernels: files by their endings, and resources of each kernel of each source."""

    files: dict[str, bytes]
    kernels: Kernels


def binaries(target: str, texts: Texts, arch: str) -> Binaries:
    """The sources compiled for one GPU architecture ("sm_90"). Raises UsageError."""
    if target != "cuda":
        raise UsageError(f"--arch belongs to --target cuda, not {target}")
    from compll.backends.cuda.nvrtc import compiled

    try:
        by_name = {name.removesuffix(".cu"): compiled(text, arch) for name, text in texts.items()}
    except ImportError as why:
        raise UsageError(f"--arch needs CuPy with NVRTC: {why}") from why
    except RuntimeError as why:
        raise UsageError(f"{arch}: {why}") from why
    return Binaries(
        {f"{name}.{arch}.cubin": data for name, (data, _) in by_name.items()},
        {name: {k: asdict(r) for k, r in used.items()} for name, (_, used) in by_name.items()},
    )


def assembly(target: str, texts: Texts) -> Texts:
    """Readable forms of the sources for this processor, by the endings of their files."""
    if target != "cpu":
        return {}
    from compll.backends.cpu import jit

    return {ending.replace(".ll", ".s"): jit.assembly(text) for ending, text in texts.items()}


def _cpu(module: Module, params: Mapping[str, HostNumber]) -> Texts:
    from compll.backends.cpu import backend

    return {"cpu.ll": backend.source(module)}


def _cuda(module: Module, params: Mapping[str, HostNumber]) -> Texts:
    from compll.backends.cuda.source import sources

    return {f"{gradient}.cu": text for gradient, text in sources(module, params).items()}


_SOURCES: dict[str, Callable[[Module, Mapping[str, HostNumber]], Texts]] = {
    "cpu": _cpu,
    "cuda": _cuda,
}


# ---- explain ------------------------------------------------------------------------------------

# ---- places -------------------------------------------------------------------------------------
# Parts of a payload: their types, and their sizes as formulas of n.


@dataclass(frozen=True)
class PayloadSlot:
    """A payload field and its size as a formula."""

    name: str
    type: str
    size: str


def places(module: Module) -> list[PayloadSlot]:
    """The payload's parts in order."""
    all_places = [
        PayloadSlot(f"count of {s.name}", "uint32", "4") for s in module.selections if s.dynamic
    ]
    all_places += [PayloadSlot(f"length of {name}", "uint32", "4") for name in header(module)[1]]
    all_places += [PayloadSlot(f.name, _type(f), _size(f, module)) for f in module.fields]
    if module.status:
        all_places.append(PayloadSlot("status", "uint8", "1"))
    return all_places


def _type(f: Field) -> str:
    base = f"uint{f.bits}" if f.storage in ("uint", "byte") else f.storage
    base += f"[{f.bits}]" if f.storage in WITH_BITS and f.layout.varying else ""
    if f.shape == "matrix":
        return base + f"[{', '.join(map(formula, f.dims))}]"
    return base + {"n": "[n]", "group": "[groups]", "kept": f"[{f.of}]", "table": f"[{f.of}]"}.get(
        f.shape, ""
    )


def factors(dims: tuple[Expr, ...]) -> str:
    """Rows times columns."""
    return " * ".join(formula(d, FACTOR) for d in dims)


def _size(f: Field, module: Module) -> str:
    if f.shape in ("scalar", "table"):
        return str(f.item_bits // 8 * int(f.of or 1))
    counts = {
        "n": "n", "group": f"ceil(n / {module.group})", "kept": f"count({f.of})",
        "matrix": factors(f.dims),
    }  # fmt: skip
    return f.layout.formula(counts[f.shape], tile_of(module))


# ---- explain ------------------------------------------------------------------------------------

STAGES = ("syntax", "types", "feedback", "layout", "passes", "tiles", "traffic", "source")
SIZES = (1, 1000, 1_000_000, 100_000_000)


def encode_traffic(module: Module) -> Traffic:
    """Memory traffic of the encode with state, or of the only encode."""
    return traffic_of(module, with_states=bool(module.states))


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
    kernels = [kernel for part in lower.kernels(module).values() for kernel in part]
    yield "\n".join(map(tile_text, kernels)).rstrip()


def _source(codec: Codec, target: str) -> Iterator[str]:
    texts = sources(target, codec.module, codec.params)
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
        yield f"{module.feedback_state} = {text(feedback.update(module, g, module.decoded))}"
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
        if isinstance(inner, Walk):
            number += 1
            kept = f"elements of {inner.domain.of}"
            over = {"kept": kept, "matrix": "a matrix"}.get(inner.domain.kind, tile)
            yield f"pass {number}, over {over}{when}:"
            yield from text.walk(inner)
        elif line := text.line(inner):
            yield f"before pass {number + 1}: {line}{when}"
    yield from rounds_text(module)


#: instructions that read elements of arrays
READS = ("load", "unpack", "at", "spread")


class _Passes:
    """The steps of an encode in words of its spec."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.module = kernel, kernel.module
        self.text = Printer(self.module.bindings)
        self.fields = {f.name: f.expr for f in self.module.fields if f.expr is not None}
        self.states = dict(self.module.updates)
        if self.module.feedback and self.module.decoded is not None:
            g = self.module.pool.make("input", (), Type("float", "n"), "g")
            state = self.module.feedback_state
            self.states[state] = feedback.update(self.module, g, self.module.decoded)

    def named(self, value: Value) -> str:
        """The expression that a value computes, or is a part of."""
        if value in self.kernel.exprs:
            return self.text(self.kernel.exprs[value])
        exprs = (e for v, e in self.kernel.exprs.items() if v.level == value.level
                 and e.type.shape != "static" and any(x is value for x in order([v])))  # fmt: skip
        return next(map(self.text, exprs), value.op)

    def line(self, step: Op) -> str:
        """A step that is no walk; "" for a number that is stored."""
        if not isinstance(step, Routine):
            return ""
        if step.routine in FIELDS:
            return f"{step.attr.name} as {step.routine}"
        if step.results:
            return self.named(step.results[0])
        made = (e for v, e in self.kernel.exprs.items() if v.attr in step.made)
        return next(map(self.text, made), step.routine)

    def walk(self, walk: Walk) -> Iterator[str]:
        """The parts of a walk."""
        product = [] if walk.product is None else [walk.product]
        views = [view.value for call in product for view in call.views]
        read = (v for v in order_inside([*walk.roots, *views]) if v.op in READS)
        reads = {v.attr.name for v in read if v.level == "element"}
        reads -= {a.name for call in product for a in call.made}
        yield f"  reads {', '.join(sorted(reads)) or 'nothing'}"
        yield from (f"  computes {self.line(call)}" for call in product)
        totals = {v.args[0]: v for v in self.kernel.exprs if v.op == "total"}
        whole = " over the whole tensor" * (self.module.group > 0)
        for fold in (v for v in walk.values if v.op == "fold"):
            if fold not in walk.folds:
                yield f"  reduces {self.named(fold)}"
            elif fold in totals:
                yield f"  reduces {self.named(totals[fold])}{whole}"
        for compact in walk.compacts:
            s = next(s for s in self.module.selections if s.name == compact.selection)
            yield f"  selects {s.name}: {s.kind} of {self.text(s.key)}"
        yield from map(self.store, walk.stores)

    def store(self, s: Store) -> str:
        """A store of a walk."""
        if s.back:
            return "  writes back on request g"
        name, updates = s.array.name, s.array.role == "state"
        exprs = self.states if updates else self.fields
        value = self.text(exprs[name]) if name in exprs else self.named(s.value)
        return f"  {'updates' if updates else 'stores'} {name} = {value}"


def rounds_text(module: Module) -> Iterator[str]:
    """Lines that describe the rounds to a person."""
    for number, round_ in enumerate(rounds(module), 1):
        size = round_.payload_bytes(10**6)
        yield (
            f"round {number}: the {round_.how} of {round_.name} over the ranks, "
            f"{size} bytes for n = 1000000"
        )
    if module.when is not None:
        sizes = [10**k for k in range(1, 9) if evaluate(module.when, {"n": 10**k})]
        yield f"worth while for {min(sizes) if sizes else 'no'} elements or more, by powers of ten"


def walks(module: Module) -> Iterator[str]:
    text, traffic = Printer(module.bindings), encode_traffic(module)
    before = set[str]()
    for number, pass_ in enumerate(traffic.walks, 1):
        yield f"walk {number}: {_touched(pass_, before)}"
        exprs = (e for v in pass_.needs for e in _exprs(traffic.kernel, v))
        if needs := sorted({name for e in exprs for name in text.values(e)}):
            yield f"  after {', '.join(needs)}"
        before |= set(pass_.reads)
    ratio = traffic.moved / max(traffic.least, 1e-9)
    yield f"walks {len(traffic.walks)}, least possible {traffic.chain}"
    yield (
        f"bytes per element: moved {traffic.moved:.4g}, least possible {traffic.least:.4g} "
        f"(each input read, each result written once): ratio {ratio:.2f}"
    )
    yield from merges(module, traffic)


def _exprs(kernel: Kernel, value: Value) -> Iterator[Expr]:
    """Expressions that a number of the piece is made of, if it depends on steps."""
    if next(fusion.inputs([value]), None) is None:
        return
    if value in kernel.exprs:
        yield kernel.exprs[value]
    elif value.op in fusion.MADE:  # the key of a threshold
        exprs = (e for v, e in kernel.exprs.items() if v.level == "piece" and value in order([v]))
        yield from islice(exprs, 1)
    else:
        for a in value.args:
            yield from _exprs(kernel, a)


def merges(module: Module, encode: Traffic) -> Iterator[str]:
    """Traffic of a decode, and of a server or a ring hop: decode, add, encode."""
    selects = any(f.shape == "kept" or f.layout.recoded for f in module.fields)
    if module.decoded is None or selects:
        return
    traffic = merge_traffic(module, encode)
    size = traffic.payload
    yield f"decode: reads payload ({size:.4g} B), writes g (4 B): ratio 1.00"
    yield f"decode and add: reads payload, g ({size + 4:.4g} B), writes g (4 B): ratio 1.00"
    if traffic.fused is not None:
        yield (
            "decode, add and encode in one kernel (cuda; cpu for tiles of 512 elements and more): "
            f"moved {traffic.fused:.4g}, "
            f"least possible {size + encode.least:.4g} (as two kernels {traffic.separate:.4g})"
        )


def _touched(walk: Pass, before: set[str]) -> str:
    """Arrays that a walk touches, with bytes per element."""
    names = ", ".join(f"{name} again" if name in before else name for name in walk.reads)
    writes = f"writes {', '.join(walk.writes)} ({walk.written:.4g} B)"
    reads = f"reads {names or 'nothing'} ({walk.read:g} B)"
    return f"{reads}, {writes if walk.writes else 'writes nothing'}"


# ---- report -------------------------------------------------------------------------------------
# The report of a compiled spec, as data and as Markdown: payload, passes, memory traffic.


def facts(codec: Codec, target: str) -> dict[str, object]:
    """The report that `compll build` writes beside the source, as JSON."""
    module = codec.module
    traffic = encode_traffic(module)
    return {
        "name": codec.name,
        "about": module.about,
        "source": module.source,
        "parameters": dict(codec.params),
        "digest": codec.digest,
        "target": target,
        "group": module.group or None,
        "feedback": module.feedback,
        "states": [s.name for s in module.states],
        "merge": module.merge,
        "rounds": dict(module.rounds),
        "payload": [{"name": p.name, "type": p.type, "bytes": p.size} for p in places(module)],
        "payload_fixed": codec.fixed,
        "payload_bytes": {str(n): codec.payload_bytes(n) for n in SIZES},
        "passes": len(traffic.walks),
        "passes_least": traffic.chain,
        "bytes_moved_per_element": traffic.moved,
        "bytes_least_per_element": traffic.least,
    }


def markdown(codec: Codec, target: str, kernels: Mapping[str, Kernels]) -> str:
    """The report for a reader: payload, passes and their traffic, and resources of kernels compiled
    for an architecture."""
    module = codec.module
    rows = [f"| {p.name} | {p.type} | {p.size} |" for p in places(module)]
    bound = "exactly" if codec.fixed else "at most"
    sizes = [f"| {n} | {codec.payload_bytes(n)} |" for n in SIZES]
    params = ", ".join(f"{k} = {v}" for k, v in codec.params.items()) or "none"
    facts = [f"- parameters: {params}", f"- backend: {target}", f"- digest: {codec.digest}"]
    parts = [
        [f"# {codec.name}", "", module.about, "", *facts],
        ["## Payload", "", "| part | type | bytes |", "| --- | --- | --- |", *rows],
        [f"| elements | bytes ({bound}) |", "| --- | --- |", *sizes],
        ["## Passes", "", "```", *passes(module), "```"],
        ["## Memory traffic", "", "Bytes per element of the gradient.", "", "```"],
    ]
    text = "\n\n".join("\n".join(part) for part in parts)
    resources = [line for arch, used in kernels.items() for line in kernel_table(arch, used)]
    return "\n".join([text, *walks(module), "```", *resources, ""])


def kernel_table(arch: str, kernels: Kernels) -> list[str]:
    """Registers and memory of kernels for an architecture and float32 gradients, as Markdown."""
    rows = [
        f"| {name} | {used['registers']} | {used['local']} | {used['shared']} |"
        for name, used in kernels["float32"].items()
    ]
    head = "| kernel | registers | local bytes of a thread | shared bytes of a block |"
    return ["", f"## Kernels on {arch}", "", head, "| --- | --- | --- | --- |", *rows]


def bits(codec: Codec) -> float:
    """Payload bits per element of a large tensor."""
    n = 1 << 24
    return codec.payload_bytes(n) * 8 / n
