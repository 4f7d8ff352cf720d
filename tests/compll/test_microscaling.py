"""OCP's microscaling formats: values, rounding and scales as the standard has them."""

import numpy as np
import pytest

import compll

#: bits of a mantissa, least exponent, largest value
FORMATS = {"mxfp4": (1, 0, 6.0), "mxfp8": (3, -6, 448.0)}


def rounded(x, name):
    """A group converted by the standard: to nearest even, too large values to the largest one."""
    bits, least, largest = FORMATS[name]
    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max())) - np.floor(np.log2(largest)))
    y = x / scale
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(y), 1e-30))), least)
    step = 2.0 ** (exponent - bits)
    return np.clip(np.rint(y / step) * step, -largest, largest) * scale


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1.0, 3e-30, 1e30])
def test_values_are_the_standards(name, size, rng):
    x = (rng.standard_normal((50, 32)) * size).astype(np.float32)
    codec = compll.compile(name)
    y = codec.decode(codec.encode(x.reshape(-1)), x.size).reshape(x.shape)
    wanted = np.stack([rounded(group.astype(np.float64), name) for group in x])
    assert np.array_equal(y, wanted.astype(np.float32))


def test_a_scale_is_a_byte_and_one_element_four_bits():
    assert compll.compile("mxfp4").payload_bytes(3200) == 3200 // 32 + 3200 // 2 + 1


def test_ties_go_to_even_values():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 4.0], np.float32)
    codec = compll.compile("mxfp4")
    found = codec.decode(codec.encode(np.resize(x, 32)), 32)[:9]
    assert found.tolist() == [0, 1, 1, 2, 2, 4, 4, -4, 4]


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_zeros_and_what_is_tiny_are_no_harm(target):
    codec = compll.compile("mxfp4", target)
    x = np.zeros(64, np.float32)
    x[40] = 1e-44
    assert not codec.decode(codec.encode(x), 64).any()
