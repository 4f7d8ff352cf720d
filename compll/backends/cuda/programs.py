"""Encodes, decodes and checks as a plan's kernels."""

from __future__ import annotations

from dataclasses import replace

from compll.backends.cuda.body import Body
from compll.backends.cuda.printer import THREADS, Printer
from compll.ir.layout import header
from compll.ir.tile import Kernel, Store, Stream, Value, Walk

#: the smallest bits, without the sign, of a float that is not finite
INFINITE = 0x7F800000
#: true if an incoming payload's status byte is set
TOLD = Value("told", (), "bool", "piece")
NAN = Value("const", (), "f32", "piece", float("nan"))


def encode(p: Printer, kernel: Kernel) -> None:
    """Add an encode's kernels."""
    p.plan.limits = kernel.limits
    p.steps(kernel.steps)
    close(p, kernel)
    p.end_phase()


def decode(p: Printer, kernel: Kernel, checking: Kernel | None) -> None:
    """Add a decode's kernels, after those of a check, which mark bad payloads."""
    p.plan.limits = kernel.limits
    p.plan.merges = kernel.name == "decode_add" and checking is None and alone(kernel)
    if checking is not None:
        check(p, checking)
        p.end_phase()
    for step in kernel.steps:
        if isinstance(step, Walk) and kernel.module.status:
            telling(p, step)
        elif isinstance(step, Store) and step.target == "zero":
            fill(p)
        elif not isinstance(step, Stream):  # the check loaded them
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


def telling(p: Printer, walk: Walk) -> None:
    """A decode's walk. The result is NaN if the payload says that the gradient was not finite."""
    if any(s.place is not None for s in walk.stores):
        if walk.stores[0].target == "scatter_add":
            p.guard = (TOLD, True)
            fill(p)
        p.guard = (TOLD, False)
        p.walk(walk)
        p.guard = None
        return
    stores = [
        replace(s, value=told_or(s.value)) if s.target == "gradient" else s for s in walk.stores
    ]
    p.walk(replace(walk, stores=stores))


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
    if kernel.bad is not None:
        bad = p.value(kernel.bad)
        b = p.open_phase()
        b.add(
            f"if (threadIdx.x == 0 && {bad} > 0) "
            f"{{ *{b.memory('wrong', 'uint32', -1)} = 1; atomicOr(errors, 1u); }}"
        )


def close(p: Printer, kernel: Kernel) -> None:
    """Store the status byte, and the payload's length if it varies."""
    status, varying = p.plan.module.status, any(header(p.plan.module))
    if not (status or varying):
        return
    if status:
        assert kernel.bad is not None
        high = p.value(kernel.bad)
    b = p.open_phase()
    end = b.fields["out"].end()
    if status:
        b.add(f"if (threadIdx.x == 0) out[{end}] = {high} >= {INFINITE};")
    if varying:
        b.add(f"if (threadIdx.x == 0) used[p] = {end} - at[p] + {int(status)};")


def fill(p: Printer) -> None:
    """Store zeros everywhere, for decodes of selections; NaN if a payload's status byte is set."""
    zero = Value("repeat", (Value("const", (), "f32", "piece", 0.0),), "f32", "lane")
    value = told_or(zero) if p.plan.module.status else zero
    p.walk_kernel("fill", Walk([Store("gradient", None, value)]), {})


def told_or(value: Value, told: Value = TOLD) -> Value:
    """A lane; NaN if the payload's status byte is set."""
    return Value("where", (told, NAN, value), "f32", "lane")
