"""Costs of codecs that were not timed, from the bytes that their kernels touch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, cast

from casync.codec import FLOAT_BYTES, Codec
from casync.cost import CodecCost, Line
from hipress.tools.models.device_speeds import Device

if TYPE_CHECKING:
    from compll.ir.module import Module
    from compll.runtime.codec import Codec as Compiled

__all__ = ["CALL", "Traffic", "cost", "memory_traffic", "read_measured"]

CALL = {True: 2e-6, False: 1e-5}  # by Device.host: seconds of a call, or of a kernel's launch


@dataclass(frozen=True)
class Traffic:
    """Bytes of memory read or written per byte of gradient."""

    encode: float
    decode: float  # decode and add
    hop: float  # decode, add and encode


def memory_traffic(codec: Codec) -> Traffic:
    """Memory traffic by the compiler's own account of its kernels; see `compll explain`."""
    from compll.passes.traffic import traffic_of

    module = cast("Compiled", codec).module
    encode = traffic_of(module, with_states=bool(module.states)).moved
    decode, fused = _decode_traffic(codec, module)
    hop = decode + encode if fused is None else fused
    return Traffic(encode / FLOAT_BYTES, decode / FLOAT_BYTES, hop / FLOAT_BYTES)


def _decode_traffic(codec: Codec, module: Module) -> tuple[float, float | None]:
    """Bytes per element of a decode that adds, and of one that also encodes, if that is fused."""
    from compll.passes.traffic import merge_traffic, traffic_of

    n = 1 << 20
    payload = codec.payload_bytes(n) / n
    if any(field.shape == "kept" for field in module.fields):
        # scattered values: targets are read and written
        return 3 * payload, None
    if module.decoded is None or any(field.layout.recoded for field in module.fields):
        return payload + 2 * FLOAT_BYTES, None
    encode = traffic_of(module, with_states=bool(module.states))
    traffic = merge_traffic(module, encode)
    return traffic.add, traffic.fused


@cache
def read_measured() -> Mapping[str, tuple[float, float, float]]:
    """Seconds per byte of gradient on a core: encode, decode and add, and both in one; by codec
    with the parameters of its spec. Measured by bench.codecs."""
    text = resources.files("hipress.tools.simulate").joinpath("cpu_codecs.json").read_text("utf-8")
    return {name: tuple(each) for name, each in json.loads(text)["codecs"].items()}


def cost(codec: Codec, device: Device) -> CodecCost:
    """Estimated cost of a codec on a device that was not measured."""
    call = CALL[device.host]
    if device.host and codec.name in read_measured():
        return CodecCost(*(Line(call, each) for each in read_measured()[codec.name]))
    traffic = memory_traffic(codec)
    each = (traffic.encode, traffic.decode, traffic.hop)
    return CodecCost(*(Line(call, bytes_ / device.memory) for bytes_ in each))
