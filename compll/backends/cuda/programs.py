"""Encodes, decodes and checks as a plan's kernels."""

from __future__ import annotations

from compll.backends.cuda.body import Body
from compll.backends.cuda.printer import THREADS, Printer
from compll.ir.layout import header
from compll.ir.tile import Kernel, Stream, Walk


def encode(p: Printer, kernel: Kernel) -> None:
    """Add an encode's kernels."""
    p.plan.limits = kernel.limits
    p.steps(kernel.steps)
    close(p)
    p.end_phase()


def decode(p: Printer, kernel: Kernel, checking: Kernel | None) -> None:
    """Add a decode's kernels, after those of a check, which mark bad payloads."""
    p.plan.limits = kernel.limits
    p.plan.merges = kernel.name == "decode_add" and checking is None and alone(kernel)
    if checking is not None:
        check(p, checking)
        p.end_phase()
    for step in kernel.steps:
        if not isinstance(step, Stream):  # the check loaded them
            p.step(step)
    p.end_phase()


def alone(kernel: Kernel) -> bool:
    """True if each lane is decoded on its own, in one walk, so that a kernel can add payload after
    payload."""
    (first, *others) = kernel.steps
    if others or not isinstance(first, Walk) or first.of or first.folds or first.compacts:
        return False
    adds = [s.target for s in first.stores] == ["gradient"]
    return adds and not any(v.op in ("draw", "spread") for v in first.values)


def check(p: Printer, kernel: Kernel) -> None:
    """Check that payloads are as long as their headers say, and that positions lie in their
    tensors."""
    b = p.phase = Body(p.plan, -1, THREADS)
    p.plan.checks = True
    wrong = b.memory("wrong", "uint32", -1)
    n = b.given("n")
    b.add(f"if (threadIdx.x == 0) *{wrong} = {n} == 0 && used_in[p] != 0;")
    b.add(f"if ({n} == 0 && threadIdx.x == 0 && used_in[p] != 0) atomicOr(errors, 1u);")
    b.add(f"if ({n} == 0) return;")
    fields = b.fields["in"]
    counted_, lengths = header(p.plan.module)
    good = [f"used_in[p] >= {4 * len(counted_ + lengths)}"]
    good += [f"{fields.kept(s)} <= {b.value(p.plan.limits[s])}" for s in counted_]
    for name in lengths:
        f = next(f for f in p.plan.module.fields if f.name == name)
        if f.storage == "runs":
            good.append(f"{fields.length(f)} <= {fields.bytes(f, n)}")
    good.append(f"{fields.end()} - at_in[p] + {int(p.plan.module.status)} == used_in[p]")
    text = " && ".join(good)
    b.add(f"const bool good = {text};")
    b.add(f"if (threadIdx.x == 0 && !good) {{ *{wrong} = 1; atomicOr(errors, 1u); }}")
    p.steps(kernel.steps)


def close(p: Printer) -> None:
    """Store the payload's length if it varies."""
    if any(header(p.plan.module)):
        b = p.open_phase()
        length = f"{b.fields['out'].end()} - at[p] + {int(p.plan.module.status)}"
        b.add(f"if (threadIdx.x == 0) used[p] = {length};")
