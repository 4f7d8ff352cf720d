"""The CUDA C++ of a module: its text, and in which order its kernels run."""

from __future__ import annotations

from collections.abc import Mapping

from compll.backends.cuda import programs
from compll.backends.cuda.array_plans import array_plans
from compll.backends.cuda.body import state_params
from compll.backends.cuda.grids import Shape, shape_of
from compll.backends.cuda.plan_builder import DECODE, ENCODE, TAKEN, PlanBuilder
from compll.backends.cuda.plans import GRADIENTS, Source, header
from compll.backends.cuda.printer import Printer
from compll.ir.layout import tile_of
from compll.ir.module import Module
from compll.ir.program import Unsupported
from compll.ir.tile import Kernel
from compll.passes import lower
from compll.passes.refusal import refused

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")


def source(module: Module, threads: int = 256) -> Source:
    """The kernels of a module for blocks of at most `threads`. Raises SpecError."""
    try:
        result = Source(
            header("arrays") + header("spectra") if module.arrays else "", shape(module, threads)
        )
        if module.arrays:
            for name, plan, kernel in array_plans(module, result.shape):
                add(result, name, (plan, kernel))
            return result
        for name, kernel in encodes(module).items():
            add(result, name, encode(kernel, name, result.shape))
        for name, adds in (("set", False), ("add", True)):
            add(result, name, decode(lower.decode(module, name, add=adds), result.shape))
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
    """The encodes without states and with them; where payloads can be cut, one that cuts."""
    parts = lower.kernels(module, "cuda")
    found = [*parts["first"], *parts["stateless"], *parts["cut"]]
    by_state = {bool(k.states): k for k in found if "encode" in k.name}
    return {"feed" if fed else "encode": by_state[fed] for fed in sorted(by_state)}


def shape(module: Module, threads: int) -> Shape:
    """How threads share tiles."""
    packed = sum(f.packed for f in module.fields)
    return shape_of(tile_of(module), threads, packed)


def encode(
    kernel: Kernel, name: str, shape: Shape, more: tuple[str, ...] = ()
) -> tuple[PlanBuilder, Kernel]:
    """The plan of an encode."""
    plan = PlanBuilder(name, kernel, shape, (*ENCODE, *more, *state_params(kernel.states)))
    programs.encode(Printer(plan), kernel)
    return plan, kernel


def decode(kernel: Kernel, shape: Shape) -> tuple[PlanBuilder, Kernel]:
    """The plan of a decode, with its check."""
    plan = PlanBuilder(f"decode_{kernel.name}", kernel, shape, DECODE, decodes=True)
    check = lower.check(kernel.module, kernel) if lower.checks(kernel.module) else None
    programs.decode(Printer(plan), kernel, check)
    return plan, kernel


def add(result: Source, name: str, made: tuple[PlanBuilder, Kernel]) -> None:
    """Add a plan to a source."""
    plan, kernel = made
    result.text += plan.text()
    states = tuple(s.name for s in kernel.states)
    result.plans[name] = plan.plan(states, kernel.writes_back)
    result.merges = result.merges or plan.merges


def sources(module: Module, params: Mapping[str, object]) -> dict[str, str]:
    """Generated CUDA C++ by the dtype of gradients, for `compll build`."""
    text = source(module)
    return {gradient: text.full(gradient) for gradient in GRADIENTS}
