"""The CUDA C++ of a module: its text, and the order of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compll.backends.cuda import searches, streams
from compll.backends.cuda.body import Body, state_params
from compll.backends.cuda.calls import Calls
from compll.backends.cuda.elements import counted
from compll.backends.cuda.plans import (
    DECODE,
    ENCODE,
    GRADIENTS,
    TAKEN,
    PlanBuilder,
    Shape,
    Source,
    header,
    shape_of,
)
from compll.backends.cuda.printer import THREADS, Printer
from compll.backends.cuda.searches import ROUNDS
from compll.ir import layout
from compll.ir.layout import is_fixed
from compll.ir.module import STATUS, Module
from compll.ir.tile import (
    FIELDS,
    GRADIENT,
    SEARCHES,
    USED,
    WRONG,
    Call,
    Kernel,
    Op,
    Store,
    Value,
    Walk,
    When,
    count_of,
    flat,
    order,
)
from compll.passes import lower
from compll.passes.traffic import WORD, Sizes, samples
from compll.passes.values import Unsupported, refused

# ---- steps --------------------------------------------------------------------------------------
# Tile programs as CUDA kernels: a walk is a kernel over its tiles, after another that counts if
# it selects; steps between walks are computed by a block for each piece.


class Steps(Printer):
    """Adds the kernels of tile programs to a plan."""

    def __init__(self, plan: PlanBuilder) -> None:
        super().__init__(plan)
        self.calls = Calls(self)

    def steps(self, steps: Sequence[Op]) -> None:
        """Steps in order. Numbers read states from memory when a kernel first needs them, so all new
        states of one number are computed before any is stored."""
        states = [s for s in steps if isinstance(s, Store) and s.array.role == "state"]
        for step in steps:
            if step not in states:
                self.step(step)
        for s in states:
            self.value(s.value)
        for s in states:
            name, b = self.value(s.value), self.open_phase()
            to = f"a_{s.array.name} + {b.given('tensor')}"
            b.first(f"keep1({to}, 0, (float){name});")

    def step(self, step: Op) -> None:
        """Add the kernels of a step."""
        STEPS[type(step)](self, step)

    def when(self, step: When) -> None:
        """Steps under a condition; their results are 0 if it does not hold."""
        self.guard = (step.condition, step.wanted)
        for inner in step.steps:
            for v in inner.results if isinstance(inner, Call) else ():
                self.open_phase().first(f"{self.plan.place(v)} = 0;")
            for f in inner.folds if isinstance(inner, Walk) else ():
                self.guards[f] = self.guard
            self.step(inner)
        self.guard = None

    def store(self, s: Store) -> None:
        """Store a number of the piece, or a table: in the payload, or in all of the gradient. The
        host knows the length of payloads that do not vary."""
        if s.array is GRADIENT:
            elements = Value("repeat", (s.value,), "f32", "element")
            self.walk_kernel("fill", Walk([Store(GRADIENT, elements)]), {})
            return
        if s.array is USED and is_fixed(self.plan.module):
            return
        value = self.value(s.value)
        b = self.open_phase()
        if s.array is USED:
            b.first(f"used[p] = {value};")
            return
        if s.array is WRONG:
            b.refuse(f"threadIdx.x == 0 && {value} != 0")
            return
        to, storage = b.payload(s.array), s.array.storage
        if s.value.kind == "table":
            each = f"store_float32({to} + 4 * k, {value}[k]);"
            b.add(f"for (int k = threadIdx.x; k < {s.array.domain.of}; k += blockDim.x) {each}")
            return
        cast = "i64" if storage.whole else "float"
        b.first(f"store_{storage.name}({to}, ({cast}){value});")

    def call(self, call: Call) -> None:
        """The kernels of a routine."""
        routines = searches.ROUTINES | (streams.LOADS if self.plan.decodes else streams.STORES)
        if call.routine in routines:
            routines[call.routine](self, call)
        else:
            self.calls.emit(call)

    def walk(self, walk: Walk) -> None:
        """A walk's kernel, after the counts that it needs. It leaves the parts of its totals."""
        if walk.product is not None:
            self.calls.inlined(walk.product)
        self.count(walk)
        region, totals = self.region(walk), {f: self.plan.fresh("part") for f in walk.folds}
        self.parts |= {fold: (name, region) for fold, name in totals.items()}
        self.walk_kernel("walk", walk, totals, region)

    def count(self, walk: Walk) -> None:
        """Count the selected elements before each tile, and in all."""
        conditions = counted(walk)
        if not conditions:
            return
        folds = {name: count_of(condition) for name, condition in conditions.items()}
        places = {f: name for name, f in folds.items()}
        region, count = self.region(walk), Walk(folds=[*folds.values()], domain=walk.domain)
        self.walk_kernel("count", count, {}, region, places=places)
        b = self.open_phase()
        totals = {
            name: b.declare("i64", f"scan_array({b.of_blocks(f'blocks_{name}', region.grid)})")
            for name in conditions
        }
        for compact in walk.compacts:
            if self.plan.kernel.counts[compact.selection].op != "counted":
                continue
            counts = [totals[f"always_{compact.selection}"]] if compact.always is not None else []
            if compact.first is not None and compact.limit is not None:
                counts.append(
                    f"op_min({totals[f'first_{compact.selection}']}, {self.value(compact.limit)})"
                )
            b.leave(("counted", compact.selection), b.declare("i64", " + ".join(counts)))


STEPS: dict[type[Op], Callable[[Steps, Any], None]] = {
    Walk: Steps.walk, When: Steps.when, Store: Steps.store, Call: Steps.call,
}  # fmt: skip


# ---- source -------------------------------------------------------------------------------------


def source(module: Module, threads: int = 256) -> Source:
    """The kernels of a module for blocks of at most `threads`. Raises SpecError."""
    packed = sum(f.packed for f in module.fields)
    shape = shape_of(layout.tile_of(module), threads, packed)
    try:
        kernels = [k for part in lower.kernels(module, "cuda").values() for k in part]
        mixing = any(mixes(step) for k in kernels for step in flat(k.steps))
        result = Source(header("arrays") if mixing else "", shape)
        result.hops = [k for k in kernels if k.kind == "hop"]
        # an encode that cuts comes later, and replaces the one that does not
        plans = {plan_of(k): k for k in kernels if k.kind != "hop"}
        checking = plans.pop("check", None)
        for name, k in plans.items():
            add(result, name, decode(k, shape, checking) if k.decodes else encode(k, name, shape))
        return result
    except Unsupported as why:
        raise refused(module, "cuda", why) from why


def mixes(step: Op) -> bool:
    """True for a routine that mixes elements."""
    return isinstance(step, Call) and step.routine not in (*SEARCHES, *FIELDS)


def hop_source(code: Source) -> Source:
    """The kernels that decode, add and encode: plans "encode" and "feed"."""
    result = Source("", code.shape)
    for kernel in code.hops:
        add(result, plan_of(kernel), encode(kernel, f"hop_{plan_of(kernel)}", code.shape))
    return result


def plan_of(kernel: Kernel) -> str:
    """The name of a kernel's plan."""
    if kernel.kind in ("encode", "hop", "cut"):
        return "feed" if kernel.states else "encode"
    return kernel.kind if kernel.decodes else kernel.name


def add(result: Source, name: str, plan: PlanBuilder) -> None:
    """Add a plan to a source."""
    result.text += plan.text()
    result.plans[name] = plan.plan(writes_back(plan.kernel))
    result.merges = result.merges or plan.merges


def writes_back(kernel: Kernel) -> bool:
    """True if an encode overwrites the gradient, also one that is not finite."""
    stores = [s for w in kernel.walks for s in w.stores if s.back]
    values = [v for s in stores for v in order([s.value])]
    status = [s.value for s in kernel.steps if isinstance(s, Store) and s.array.name == STATUS.name]
    return bool(stores) and all(any(v is flag.args[0] for v in values) for flag in status)


def sources(module: Module, params: Mapping[str, object]) -> dict[str, str]:
    """Generated CUDA C++ by the dtype of gradients, for `compll build`."""
    text = source(module)
    return {gradient: text.full(gradient) for gradient in GRADIENTS}


# plans


def encode(kernel: Kernel, name: str, shape: Shape) -> PlanBuilder:
    """The plan of an encode or a round."""
    more: tuple[str, ...] = TAKEN if kernel.kind == "hop" else ()
    rounds = [field for field, _ in kernel.module.rounds]
    if kernel.kind in ("round", "rounds"):
        round_field = kernel.module.fields[0].name if kernel.kind == "round" else ""
        earlier = range(rounds.index(round_field) if round_field else len(rounds))
        sums = (param for k in earlier for param in (f"const u8* r{k}", f"const i64* r{k}_at"))
        more = ("float workers", *sums)
    plan = PlanBuilder(name, kernel, shape, (*ENCODE, *more, *state_params(kernel.states)))
    plan.sums = {field: f"(r{k} + r{k}_at[p])" for k, field in enumerate(rounds)}
    p = Steps(plan)
    p.steps(kernel.steps)
    p.end_phase()
    return plan


def decode(kernel: Kernel, shape: Shape, checking: Kernel | None) -> PlanBuilder:
    """The plan of a decode, after the kernels of a check, which mark bad payloads."""
    plan = PlanBuilder(kernel.name, kernel, shape, DECODE, decodes=True)
    p = Steps(plan)
    if checking is not None:
        check(p, checking)
        p.end_phase()
    else:
        plan.merges = kernel.kind == "add" and alone(kernel)
    for step in kernel.steps:
        if not (isinstance(step, Call) and step.routine in FIELDS):  # the check loaded them
            p.step(step)
    p.end_phase()
    return plan


def alone(kernel: Kernel) -> bool:
    """True if each element is decoded on its own, in one walk, so that a kernel can add payload after
    payload."""
    (first, *others) = kernel.steps
    if others or not isinstance(first, Walk) or first.domain.of or first.folds or first.compacts:
        return False
    adds = [s.array for s in first.stores] == [GRADIENT]
    plain = first.product is None and not any(v.op in ("draw", "spread") for v in first.values)
    return adds and plain


def check(p: Steps, kernel: Kernel) -> None:
    """Add kernels that check if payloads are as long as their headers say, and if positions lie in
    their tensors."""
    b = p.phase = Body(p.plan, -1, THREADS)
    n, wrong = b.given("n"), b.memory("wrong", "uint32", -1)
    b.first(f"*{wrong} = 0;")
    b.refuse(f"threadIdx.x == 0 && {n} == 0 && used_in[p] != 0")
    b.skip(f"{n} == 0")
    p.plan.checks = True
    p.steps(kernel.steps)


def moved(module: Module, *, with_states: bool) -> float:
    """Bytes that an encode without write-back moves for each element of a large gradient: all, not
    the least.

    A search for the k-th largest element reads keys once for each digit, and a walk that selects
    runs twice: it counts before it writes. A search by counts is assumed to end after one walk.
    Steps under a condition, samples, selected elements and work on streams of varying length are
    not counted.
    """
    kernel = lower.encode(module, with_states)
    sizes, total = Sizes(kernel), 0.0
    for step in kernel.steps:
        if isinstance(step, When):
            continue
        conditions = counted(step).values() if isinstance(step, Walk) else ()
        counts = [Walk(folds=[*map(count_of, conditions)])] if conditions else []
        for walk in filter(None, map(sizes.walk, (*counts, step))):
            total += walk.read + walk.written
        if isinstance(step, Call) and step.routine == "kth_largest" and not samples(step):
            total += WORD * (len(ROUNDS) - 1)
    return total
