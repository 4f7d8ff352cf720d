"""Zeros, denormals, huge values, NaN and infinity; malformed payloads."""

import itertools

import numpy as np
import pytest

import compll

#: whose values do not depend on the gradient's magnitude; whose norm is a sum of squares
SIGNS, SQUARES = {"mxnet_1bit", "signsgd", "signum"}, {"qsgd", "qsparse"}


def test_constant_gradients(case, cpu, reference):
    n = 1500
    for value, step in itertools.product((0.0, -0.0, 1e-42, 1e-30, 1.0, 1e30), range(2)):
        x = np.full(n, value, np.float32)
        states = [c.init_state(n) for c in (cpu, reference)]
        payloads = [
            c.encode(x, state=s, step=step) for c, s in zip((cpu, reference), states, strict=True)
        ]
        assert np.array_equal(*payloads), (value, step)
        y = cpu.decode(payloads[0], n)
        if value > 65504 and case[0] == "fp16":
            assert not np.isfinite(y[y != 0]).any(), value  # its value in float16
            continue
        if value > 1e18 and case[0] in SQUARES:
            continue  # the norm overflows, on both backends
        assert np.isfinite(y).all(), value
        if case[0] in SIGNS:
            assert set(np.abs(y)) == {1}, value
            continue
        assert case[0] in (*SQUARES, "wangni", "randomk", "thc") or np.abs(y).max() <= max(
            2.6 * abs(value), 0.6
        ), value
        if value == 0:
            assert (y == 0).all()


def test_read_only_arrays_are_read_and_never_written(cpu, reference, rng):
    x = rng.standard_normal(3000).astype(np.float32)
    x.flags.writeable = False
    for codec in (cpu, reference):
        payload = codec.encode(x)
        assert np.array_equal(codec.decode(payload.tobytes(), 3000), codec.decode(payload, 3000))
        with pytest.raises(compll.UsageError, match="read-only"):
            codec.decode_add(payload, x)


def test_truncated_and_extended_payloads(cpu, reference, rng):
    n = 3000
    payload = cpu.encode(rng.standard_normal(n).astype(np.float32))
    for codec in (cpu, reference):
        for wrong in (
            payload[:-1],
            payload[: len(payload) // 2],
            payload[:0],
            np.append(payload, payload),
        ):
            with pytest.raises(compll.PayloadError):
                codec.decode(wrong, n)
            out = np.full(n, 5, np.float32)
            with pytest.raises(compll.PayloadError):
                codec.decode_add(wrong, out)
            assert (out == 5).all()


def words(payload, first, *values):
    wrong = payload.copy()
    wrong[first : first + 4 * len(values)] = np.array(values, "<u4").view(np.uint8)
    return wrong


def test_indices_and_counts_out_of_range(rng):
    n = 1000
    x = rng.standard_normal(n).astype(np.float32)
    codec = compll.compile("topk", ratio=0.05)
    payload = codec.encode(x)
    for index in (n, 2**31, 2**32 - 1):
        with pytest.raises(compll.PayloadError, match="index"):
            codec.decode(words(payload, 0, index), n)
    for name in ("graddrop", "dgc"):
        codec = compll.compile(name, ratio=0.05)
        payload = codec.encode(x)
        count, length = payload[:8].view("<u4").tolist()
        for wrong in (
            (2**32 - 1, length),
            (count + 1, length),
            (count, length + 1),
            (count, 2**31),
        ):
            with pytest.raises(compll.PayloadError):
                codec.decode(words(payload, 0, *wrong), n)
        endless = payload.copy()
        endless[8 : 8 + length] = 255
        with pytest.raises(compll.PayloadError):
            codec.decode(endless, n)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: c.payload_bytes(2.5), "2.5 is no number of elements"),
        (lambda c: c.payload_bytes(-1), "-1 elements"),
        (lambda c: c.decode(b"", -1), "-1 elements"),
        (lambda c: c.init_state(-1), "-1 elements"),
        (lambda c: c.decode(bytes(5), 2**62), "there is no memory for"),
        (lambda c: c.encode(np.zeros(3, np.float32), state=5), "init_state"),
        (lambda c: c.encode(np.zeros(3, np.float32), seed="a"), "seed is a whole number"),
        (lambda c: c.encode(np.zeros(3, np.float32), step=2**70), "not an int64"),
        (lambda c: c.encode(np.zeros(3, np.float32), seed=2.5), "seed is a whole number, not 2.5"),
        (lambda c: c.decode(bytes(5), 3, step="x"), "step is a whole number, not 'x'"),
        (lambda c: c.decode_add(bytes(5), np.zeros(3, np.float32), step=2**70), "not an int64"),
        (lambda c: c.encode_batch(np.zeros(3), *one_piece(c)), "float32 array is needed"),
        (
            lambda c: c.decode_batch(
                np.zeros(5, np.uint8), *one_piece(c)[::2], np.array([5]), np.zeros(3)
            ),
            "float32 array is needed",
        ),
    ],
)
def test_wrong_arguments_are_told(call, message):
    with pytest.raises(compll.UsageError, match=message):
        call(compll.compile("onebit"))


def one_piece(codec):
    return np.array([[0, 3, 0, 0, 0]]), np.zeros(codec.payload_bytes(3), np.uint8), np.zeros(1, int)


#: specs that number no elements; threelc asks for memory that few machines have
UNBOUNDED = {
    "bf16", "bf16_sr", "ddp_uint8", "efsignsgd", "fp16", "int3_group",
    "int4_group", "int8_dettmers", "int8_group", "mxfp4", "mxfp8", "mxnet_1bit", "mxnet_2bit",
    "mxnet_2bit_auto", "natural", "none", "onebit", "onebit_fine", "onebit_group", "onebit_sgd",
    "qsgd", "signsgd", "signum", "tern_group", "terngrad", "terngrad_uniform", "threelc",
}  # fmt: skip


def refusal(name, n):
    """The error for a tensor of n elements; None if the spec takes it."""
    codec = compll.compile(name, "reference")
    assert codec.payload_bytes(2**31 - 1) > 0
    try:
        codec.payload_bytes(n)
    except compll.UsageError as error:
        return str(error)
    return None


def test_positions_have_32_bits():
    assert compll.compile("onebit").payload_bytes(2**33) == 4 + 2**30
    unbounded = {name for name in compll.list_specs() if refusal(name, 2**31) is None}
    assert unbounded >= UNBOUNDED
    for name in ("atomo", "lossless", "powersgd", "sketch", "thc", "topk"):
        assert refusal(name, 2**31).startswith(f"{name}: indices are int32, too small for")


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """Zero pages: 8 GiB of gradient without memory behind them, except for its last tile."""
    n = 2**31 + 5
    codec = compll.compile("onebit_group")
    x = np.zeros(n, np.float32)
    x[-3:] = -1, 2, -3
    payload = codec.encode(x)
    assert len(payload) == codec.payload_bytes(n) == 4 * (2**21 + 1) + 2**28 + 1
    assert payload[-1] == 0b10100
    scale = payload[4 * 2**21 : 4 * 2**21 + 4].view(np.float32)[0]
    assert scale == np.float32(6 / 5)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_tests_of_what_is_not_finite(target, tmp_path):
    path = tmp_path / "tested.yaml"
    path.write_text(
        "name: tested\n"
        "params: {most: inf}\n"
        "encode:\n"
        "  big: 1e30 * g * 1e30\n"
        "  none: big - big\n"
        "  top: isinf(most) + 2 * isinf(max(big))\n"
        "  q: isinf(big) + 2 * isnan(none) + 4 * isfinite(g) + 8 * top\n"
        'payload: {q: "uint5[n]"}\n'
        "decode: q\n"
    )
    codec = compll.compile(path, target)
    x = np.array([1, -1e20, 1e-30, 0], np.float32)
    assert codec.decode(codec.encode(x), 4).tolist() == [31, 31, 28, 28]
