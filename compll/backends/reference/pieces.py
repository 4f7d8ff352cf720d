"""A piece of a gradient: its payload, decoding, and new states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.reference import fields
from compll.backends.reference.runs import Run
from compll.errors import PayloadError
from compll.ir.expr import Type
from compll.ir.layout import header, layout
from compll.ir.module import Module
from compll.ir.static import Number
from compll.numerics import halves, matrices
from compll.numerics.types import F32, U8
from compll.passes import feedback
from compll.runtime.batches import Encoding


def encode(
    module: Module,
    params: Mapping[str, Number],
    x: F32,
    states: dict[str, NDArray[Any]] | None,
    how: Encoding,
    *,
    tensor: int,
    offset: int,
    most: int | None = None,
) -> U8:
    """Encode one piece: x and states are views that are updated in place."""
    place = {"seed": how.seed, "step": how.step, "tensor": tensor, "offset": offset}
    run = Run(module, params, len(x), **place, most=most)
    if len(x) == 0:
        return np.zeros(0, np.uint8)
    with np.errstate(all="ignore"):
        return _encode(run, x, states, np.float32(how.scale), how.writeback)


def _encode(
    run: Run,
    x: F32,
    states: dict[str, NDArray[Any]] | None,
    scale: np.float32,
    writeback: bool,
) -> U8:
    module, g = run.module, x * scale
    if states is None and module.updates:
        states = _fresh(run)
    run.inputs = {name: halves.read(held) for name, held in (states or {}).items()}
    feed = module.feedback and states is not None
    if feed:
        held = run.inputs[module.fed_state]
        g = g - held if module.differences else matrices.fed(x, scale, held, module.decay)
    run.inputs["g"] = g
    derived = module.derived_states
    for state in module.states:
        if state.name not in derived:
            value = run.inputs[state.name]
            run.inputs[state.name] = value if state.shape == "n" else np.float64(value[0])
    exprs = dict(module.updates)
    if feed:
        source = module.pool.make("input", (), Type("float", "n"), "g")
        assert module.decoded is not None
        exprs[module.fed_state] = feedback.update(module, source, module.decoded)
    payload = written(run, lambda: g)
    updates = {name: run.value(e) for name, e in exprs.items()}
    for name, held in (states or {}).items():
        if name in updates:
            halves.keep(held, updates[name])
    if writeback:
        place = {"step": run.step, "tensor": run.tensor, "offset": run.offset}
        x[:] = decode(payload, Run(module, run.env, len(x), **place))
    return payload


def _fresh(run: Run) -> dict[str, NDArray[Any]]:
    """States of zeros, for a call without states."""
    sizes = {s.name: run.n if s.shape == "n" else 1 for s in run.module.states}
    return {s.name: np.zeros(sizes[s.name], s.dtype) for s in run.module.states}


def written(run: Run, g: Callable[[], F32]) -> U8:
    """The payload; g: a function for the input, called if a status byte says whether it was
    finite."""
    module = run.module
    kept = {s.name: len(run.pick(s.name)) for s in module.selections}
    stored = {f.name: run.stored(f) for f in module.fields}
    counted, gaps = header(module)
    lengths = {name: len(stored[name]) for name in gaps}
    place = layout(module, run.n, kept, lengths)
    out = np.zeros(place.total, np.uint8)
    head = [kept[name] for name in counted] + [lengths[name] for name in gaps]
    out[: 4 * len(head)] = np.array(head, "<u4").view(np.uint8)
    for start, data in zip(place.starts, stored.values(), strict=True):
        out[start : start + len(data)] = data
    if module.status:
        out[-1] = not np.isfinite(g()).all()
    return out


def decode(payload: U8, run: Run) -> F32:
    """The float32 [n] values of a payload, computed by `run`. Raises PayloadError."""
    module, n = run.module, run.n
    if n == 0 and len(payload) == 0:
        return np.zeros(0, np.float32)
    read(module, payload, n, run)
    with np.errstate(all="ignore"):
        out = np.asarray(run.value(module.decode), np.float32)
    return np.full(n, np.nan, np.float32) if module.status and payload[-1] else out


def read(module: Module, payload: U8, n: int, run: Run) -> None:
    """Give `run` the fields of a payload. Raises PayloadError."""
    kept = fields.read_counts(module, run.env, payload, n)
    lengths = fields.read_lengths(module, payload)
    where = layout(module, n, kept, lengths)
    if len(payload) != where.total:
        raise PayloadError(
            f"{module.name}: a payload of {n} elements has {where.total} bytes here, "
            f"this one {len(payload)}"
        )
    drawn = {s.name for s in module.selections if s.kind == "drawn"}
    run.picked = {name: np.arange(count) for name, count in kept.items() if name not in drawn}
    for field, start in zip(module.fields, where.starts, strict=True):
        data = payload[start : start + lengths.get(field.name, len(payload))]
        size = kept.get(module.among(field.of), n)
        run.inputs[field.name] = fields.loaded(field, data, size, run.tile, kept.get(field.of, 0))
    fields.check_indices(module, run.inputs, n, kept)
