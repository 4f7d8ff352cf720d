"""Small codecs in numpy that satisfy casync's Protocol, so that these tests need no compiler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from casync.codec import CodecDefaults, StateField


def kernel_input(x, row, scale, state):
    start, length, _, _, at = row
    values = x[start : start + length] * np.float32(scale)
    return values if state is None else values + state["residual"][at : at + length]


@dataclass(frozen=True)
class Int8(CodecDefaults):
    """A codec with a scale per piece of GROUP elements, 8 bits each, and error feedback."""

    name: str = "int8_fake"
    digest: str = "int8_fake/1"
    align: int = 16
    fixed: bool = True
    reencodes: bool = True
    states: tuple[StateField, ...] = (
        StateField("residual"),
        StateField("calls", per="tensor", fate="mean"),
    )
    skew: float = 0.0  # added by decode: makes a rank disagree with the others

    def payload_bytes(self, n: int) -> int:
        return 4 * -(-n // self.align) + n

    def encode_batch(self, x, table, out, at, *, state=None, seed=0, step=0, scale=1.0,
                     writeback=False):  # fmt: skip
        used = np.zeros(len(table), np.int64)
        for i, row in enumerate(table):
            values = kernel_input(x, row, scale, state)
            payload = self._encode(values)
            used[i] = payload.size
            out[at[i] : at[i] + payload.size] = payload
            back = self._decode(payload, len(values))
            start, length, tensor, _, place = row
            if state is not None:
                rest = values - back
                state["residual"][place : place + length] = np.where(np.isfinite(rest), rest, 0)
                state["calls"][tensor] += 1
            if writeback:
                x[start : start + length] = back
        return used

    def decode_batch(self, payload, table, at, used, out, *, add=False, step=0):
        for i, (start, length, *_) in enumerate(table):
            values = self._decode(payload[at[i] : at[i] + used[i]], length) + np.float32(self.skew)
            if add:
                out[start : start + length] += values
            else:
                out[start : start + length] = values

    def _encode(self, values):
        groups = -(-len(values) // self.align)
        padded = np.zeros(groups * self.align, np.float32)
        padded[: len(values)] = values
        padded = padded.reshape(groups, self.align)
        scale = np.abs(padded).max(axis=1)
        finite = np.where(np.isfinite(scale) & (scale > 0), scale, 1)
        with np.errstate(invalid="ignore"):
            ratio = np.nan_to_num(padded / finite[:, None], nan=0, posinf=0, neginf=0)
            codes = np.rint(ratio * 127).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), codes.ravel()[: len(values)].view(np.uint8)])

    def _decode(self, payload, length):
        groups = -(-length // self.align)
        scale = payload[: 4 * groups].copy().view(np.float32)
        codes = payload[4 * groups :].view(np.int8).astype(np.float32)
        each = np.repeat(scale, self.align)[:length]
        with np.errstate(invalid="ignore"):
            return codes / np.float32(127) * each


@dataclass(frozen=True)
class Halves(CodecDefaults):
    """float16: additive."""

    name: str = "half_fake"
    digest: str = "half_fake/1"
    fixed: bool = True
    additive: str | None = "float16"
    reencodes: bool = True

    def payload_bytes(self, n: int) -> int:
        return 2 * n

    def encode_batch(self, x, table, out, at, *, state=None, seed=0, step=0, scale=1.0,
                     writeback=False):  # fmt: skip
        for (start, length, *_), place in zip(table, at, strict=True):
            values = (x[start : start + length] * np.float32(scale)).astype(np.float16)
            out[place : place + 2 * length] = values.view(np.uint8)
            if writeback:
                x[start : start + length] = values
        return table[:, 1] * 2

    def decode_batch(self, payload, table, at, used, out, *, add=False, step=0):
        for (start, length, *_), place in zip(table, at, strict=True):
            values = payload[place : place + 2 * length].view(np.float16).astype(np.float32)
            out[start : start + length] = values + (out[start : start + length] if add else 0)


@dataclass(frozen=True)
class Sparse(CodecDefaults):
    """The elements above the mean magnitude, with their indices, and a residual."""

    name: str = "sparse_fake"
    digest: str = "sparse_fake/1"
    fixed: bool = False
    reencodes: bool = False
    states: tuple[StateField, ...] = (StateField("residual"),)

    def payload_bytes(self, n: int) -> int:
        return 8 * max(1, n // 2)

    def encode_batch(self, x, table, out, at, *, state=None, seed=0, step=0, scale=1.0,
                     writeback=False):  # fmt: skip
        used = np.zeros(len(table), np.int64)
        for i, row in enumerate(table):
            values = kernel_input(x, row, scale, state)
            kept = np.flatnonzero(np.abs(values) > np.abs(values).mean())[
                : max(1, len(values) // 2)
            ]
            payload = np.concatenate([
                kept.astype(np.int32).view(np.uint8), values[kept].view(np.uint8)
            ])  # fmt: skip
            used[i] = payload.size
            out[at[i] : at[i] + payload.size] = payload
            if state is not None:
                rest = values.copy()
                rest[kept] = 0
                state["residual"][row[4] : row[4] + row[1]] = rest
        return used

    def decode_batch(self, payload, table, at, used, out, *, add=False, step=0):
        for i, (start, length, *_) in enumerate(table):
            count = used[i] // 8
            body = payload[at[i] : at[i] + used[i]]
            target = out[start : start + length]
            if not add:
                target[:] = 0
            target[body[: 4 * count].view(np.int32)] += body[4 * count :].view(np.float32)
