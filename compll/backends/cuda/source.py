"""The CUDA C++ of a module: its text, and the order of its kernels."""

from __future__ import annotations

from collections.abc import Mapping

from compll.backends.cuda import programs
from compll.backends.cuda.body import state_params
from compll.backends.cuda.grids import Shape, shape_of
from compll.backends.cuda.plan_builder import DECODE, ENCODE, TAKEN, PlanBuilder
from compll.backends.cuda.plans import GRADIENTS, Source, header
from compll.backends.cuda.printer import Printer
from compll.ir.layout import tile_of
from compll.ir.module import Module
from compll.ir.tile import ALL, STATUS, Call, Kernel, Store, order
from compll.passes import lower
from compll.passes.refusal import Unsupported, refused

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")


def source(module: Module, threads: int = 256) -> Source:
    """The kernels of a module for blocks of at most `threads`. Raises SpecError."""
    try:
        parts = lower.kernels(module, "cuda").values()
        calls = any(isinstance(step, Call) for part in parts for k in part for step in k.steps)
        result = Source(header("arrays") if calls else "", shape(module, threads))
        for name, kernel in encodes(module).items():
            more = round_params(kernel, module) if name.startswith("round") else ()
            add(result, name, encode(kernel, name, result.shape, more, module.rounds))
        for kernel in (k for part in parts for k in part):
            if kernel.name.startswith("decode"):
                name = kernel.name.removeprefix("decode_")
                add(result, name, decode(kernel, module, result.shape))
        return result
    except Unsupported as why:
        raise refused(module, "cuda", why) from why


def hop_source(module: Module, threads: int = 256) -> Source:
    """The kernels that decode, add and encode: plans "encode" and "feed"."""
    result = Source("", shape(module, threads))
    for kernel in lower.kernels(module, "cuda")["hop"]:
        name = "feed" if kernel.states else "encode"
        add(result, name, encode(kernel, f"hop_{name}", result.shape, TAKEN))
    return result


def encodes(module: Module) -> dict[str, Kernel]:
    """The encodes without states and with them; if payloads can be cut, also one that cuts."""
    parts = lower.kernels(module, "cuda")
    found = [k for name, part in parts.items() if name != "hop" for k in part]
    by_state = {bool(k.states): k for k in found if "encode" in k.name}
    rounds = {k.name: k for k in found if k.name.startswith("round")}
    return {"feed" if fed else "encode": by_state[fed] for fed in sorted(by_state)} | rounds


def round_params(kernel: Kernel, module: Module) -> tuple[str, ...]:
    """Parameters of a kernel that takes the sums of earlier rounds."""
    last = kernel.name.removeprefix("round").removesuffix("_feed")
    count = int(last) if last.isdigit() else len(module.rounds)
    pairs = ((f"const u8* r{k}", f"const i64* r{k}_at") for k in range(count))
    return ("float workers", *(param for pair in pairs for param in pair))


def shape(module: Module, threads: int) -> Shape:
    """Sharing of tiles by threads."""
    packed = sum(f.packed for f in module.fields)
    return shape_of(tile_of(module), threads, packed)


def encode(
    kernel: Kernel,
    name: str,
    shape: Shape,
    more: tuple[str, ...] = (),
    rounds: tuple[tuple[str, str], ...] = (),
) -> tuple[PlanBuilder, Kernel]:
    """The plan of an encode."""
    plan = PlanBuilder(name, kernel, shape, (*ENCODE, *more, *state_params(kernel.states)))
    for f in kernel.added:
        number = [one for one, _ in rounds].index(f.name.removesuffix(ALL))
        plan.sources[f.name] = lambda b, k=number: f"(r{k} + r{k}_at[p])"  # type: ignore[misc]
    programs.encode(Printer(plan), kernel)
    return plan, kernel


def decode(kernel: Kernel, module: Module, shape: Shape) -> tuple[PlanBuilder, Kernel]:
    """The plan of a decode, with its check."""
    plan = PlanBuilder(kernel.name, kernel, shape, DECODE, decodes=True)
    check = lower.check(module) if lower.checks(module) else None
    programs.decode(Printer(plan), kernel, check)
    return plan, kernel


def add(result: Source, name: str, made: tuple[PlanBuilder, Kernel]) -> None:
    """Add a plan to a source."""
    plan, kernel = made
    result.text += plan.text()
    states = tuple(s.name for s in kernel.states)
    result.plans[name] = plan.plan(states, writes_back(kernel))
    result.merges = result.merges or plan.merges


def writes_back(kernel: Kernel) -> bool:
    """True if an encode overwrites the gradient, also one that is not finite."""
    stores = [s for w in kernel.walks for s in w.stores if s.back]
    known = [v for s in stores for v in order([s.value])]
    status = [s.value for s in kernel.steps if isinstance(s, Store) and s.field is STATUS]
    return bool(stores) and all(any(v is told.args[0] for v in known) for told in status)


def sources(module: Module, params: Mapping[str, object]) -> dict[str, str]:
    """Generated CUDA C++ by the dtype of gradients, for `compll build`."""
    text = source(module)
    return {gradient: text.full(gradient) for gradient in GRADIENTS}
