"""The CUDA C++ of a module: its text, and in which order its kernels run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compll.backends.cuda.array_source import array_source
from compll.backends.cuda.decode_add_encode import Hopping, merge_function
from compll.backends.cuda.grids import Grid, Scratch, shape_of
from compll.backends.cuda.halves import functions
from compll.backends.cuda.plans import GRADIENTS, Launches, Source
from compll.backends.cuda.select import Selecting
from compll.backends.cuda.spread import Spreading
from compll.backends.cuda.values import Values
from compll.ir.layout import tile_of
from compll.ir.module import Module
from compll.ir.program import Unsupported
from compll.passes.refusal import refused
from compll.passes.schedule import schedule

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Plan(Launches):
    """How a batch is encoded or decoded in passes.

    Plans: "encode" (no state), "feed" (with states), "set" and "add" (decode).
    """

    grids: tuple[Grid, ...]
    scratch: tuple[Scratch, ...]
    states: tuple[str, ...] = ()
    #: whether encode itself overwrites the gradient by its decoded value
    writes_back: bool = False


def source(module: Module, threads: int = 256) -> Source[Any]:
    """The kernels of a module for blocks of at most `threads`. Raises SpecError."""
    try:
        if module.arrays:
            return array_source(module, threads)
        return _source(module, threads)
    except Unsupported as why:
        raise refused(module, "cuda", why) from why


def _source(module: Module, threads: int) -> Source[Plan]:
    result: Source[Plan] = Source(functions(module), shape_of(tile_of(module), threads))
    for name, feed in (("encode", False), ("feed", True)):
        if (feed and not module.states) or (not feed and module.updates):
            continue
        encoder = Selecting(schedule(module, feed=feed), feed, name, threads)
        result.text += encoder.finished()
        result.plans[name] = _plan(encoder, encoder.states, encoder.prog.writes_back)
    for name, add in (("set", False), ("add", True)):
        decoder = Spreading(module, add, threads)
        result.text += decoder.finished()
        result.plans[name] = _plan(decoder)
    return result


def hop_source(module: Module, threads: int = 256) -> Source[Plan]:
    """The kernels that decode, add and encode: plans "encode" and "feed", and "set" for statics."""
    result: Source[Plan] = Source(functions(module), shape_of(tile_of(module), threads))
    for name, feed in (("encode", False), ("feed", True)):
        if (feed and not module.states) or (not feed and module.updates):
            continue
        merging = merge_function(module, f"hop_{name}", result.shape)
        encoder = Hopping(schedule(module, feed=feed), feed, f"hop_{name}", threads)
        result.text += merging.finished() + encoder.finished()
        result.plans[name] = _plan(encoder, encoder.states, encoder.prog.writes_back)
        result.plans["set"] = _plan(merging)
    return result


def _plan(made: Values, states: tuple[str, ...] = (), writes_back: bool = False) -> Plan:
    return Plan(
        tuple(made.steps),
        made.params(),
        tuple(made.statics),
        tuple(made.grids),
        tuple(made.scratch),
        states,
        writes_back,
    )


def sources(module: Module, params: Mapping[str, object]) -> dict[str, str]:
    """Generated CUDA C++ by the dtype of gradients, for `compll build`."""
    text = source(module)
    return {gradient: text.full(gradient) for gradient in GRADIENTS}
