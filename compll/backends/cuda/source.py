"""The CUDA C++ of a module: its text, and the order of its kernels."""

from __future__ import annotations

from collections.abc import Mapping

from compll.backends.cuda.body import Body, state_params
from compll.backends.cuda.grids import Shape, shape_of
from compll.backends.cuda.plan_builder import DECODE, ENCODE, TAKEN, PlanBuilder
from compll.backends.cuda.plans import GRADIENTS, Source, header
from compll.backends.cuda.printer import THREADS, Printer
from compll.backends.cuda.searches import ROUNDS
from compll.backends.cuda.selected_lanes import counted
from compll.ir import layout
from compll.ir.module import STATUS, Module
from compll.ir.tile import (
    FIELDS,
    GRADIENT,
    SEARCHES,
    Call,
    Kernel,
    Op,
    Store,
    Walk,
    When,
    count_of,
    order,
)
from compll.passes import lower
from compll.passes.refusal import Unsupported, refused
from compll.passes.traffic import WORD, Sizes, samples

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")


def source(module: Module, threads: int = 256) -> Source:
    """The kernels of a module for blocks of at most `threads`. Raises SpecError."""
    packed = sum(f.packed for f in module.fields)
    shape = shape_of(layout.tile_of(module), threads, packed)
    try:
        kernels = [k for part in lower.kernels(module, "cuda").values() for k in part]
        mixing = any(mixes(step) for k in kernels for step in k.steps)
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
    known = [v for s in stores for v in order([s.value])]
    status = [s.value for s in kernel.steps if isinstance(s, Store) and s.array.name == STATUS.name]
    return bool(stores) and all(any(v is told.args[0] for v in known) for told in status)


def sources(module: Module, params: Mapping[str, object]) -> dict[str, str]:
    """Generated CUDA C++ by the dtype of gradients, for `compll build`."""
    text = source(module)
    return {gradient: text.full(gradient) for gradient in GRADIENTS}


# plans


def encode(kernel: Kernel, name: str, shape: Shape) -> PlanBuilder:
    """The plan of an encode or a round."""
    more: tuple[str, ...] = TAKEN if kernel.kind == "hop" else ()
    rounds = [one for one, _ in kernel.module.rounds]
    if kernel.kind in ("round", "rounds"):
        own = kernel.module.fields[0].name if kernel.kind == "round" else ""
        earlier = range(rounds.index(own) if own else len(rounds))
        sums = (param for k in earlier for param in (f"const u8* r{k}", f"const i64* r{k}_at"))
        more = ("float workers", *sums)
    plan = PlanBuilder(name, kernel, shape, (*ENCODE, *more, *state_params(kernel.states)))
    plan.sums = {field: f"(r{k} + r{k}_at[p])" for k, field in enumerate(rounds)}
    p = Printer(plan)
    p.steps(kernel.steps)
    p.end_phase()
    return plan


def decode(kernel: Kernel, shape: Shape, checking: Kernel | None) -> PlanBuilder:
    """The plan of a decode, after the kernels of a check, which mark bad payloads."""
    plan = PlanBuilder(kernel.name, kernel, shape, DECODE, decodes=True)
    p = Printer(plan)
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
    """True if each lane is decoded on its own, in one walk, so that a kernel can add payload after
    payload."""
    (first, *others) = kernel.steps
    if others or not isinstance(first, Walk) or first.domain.of or first.folds or first.compacts:
        return False
    adds = [s.array for s in first.stores] == [GRADIENT]
    return adds and not any(v.op in ("draw", "spread") for v in first.values)


def check(p: Printer, kernel: Kernel) -> None:
    """Add kernels that check if payloads are as long as their headers say, and if positions lie in
    their tensors."""
    b = p.phase = Body(p.plan, -1, THREADS)
    n, wrong = b.given("n"), b.memory("wrong", "uint32", -1)
    b.first(f"*{wrong} = 0;")
    b.refuse(f"threadIdx.x == 0 && {n} == 0 && used_in[p] != 0")
    b.skip(f"{n} == 0")
    p.plan.checks = True
    p.steps(kernel.steps)


def moved(module: Module, *, feed: bool) -> float:
    """Bytes that an encode without write-back moves for each element of a large gradient: all, not
    the least.

    A search for the k-th largest element reads keys once for each digit, and a walk that selects
    runs twice: it counts before it writes. A search by counts is assumed to end after one walk.
    Steps under a condition, samples, selected elements and work on streams of varying length are
    not counted.
    """
    kernel = lower.encode(module, feed)
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
