"""Codecs in other processes, and copies of them."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest

import compll

SPEC = """name: scaled
params: {factor: 2.0}
encode: {x: g * factor}
payload: {x: "float32[n]"}
decode: x
"""
X = np.arange(300, dtype=np.float32)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "scaled.yaml"
    path.write_text(SPEC)
    return path


def encoded(codec):
    return codec.encode(X).tobytes()


def test_a_codec_goes_to_another_process(path, monkeypatch):
    codec = compll.compile(path, factor=3)
    monkeypatch.chdir(path.parent)
    near = compll.compile("scaled.yaml", factor=3)
    monkeypatch.chdir("/")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(encoded, [codec, near, compll.compile("topk", ratio=0.1)])
    assert found == [encoded(codec)] * 2 + [encoded(compll.compile("topk", ratio=0.1))]


def test_here_it_is_the_same(path):
    for codec in (
        compll.compile(path, "reference"),
        compll.compile("onebit_group", residual="bfloat16"),
        compll.compile("powersgd", "reference").for_shape((30, 10)),
    ):
        assert pickle.loads(pickle.dumps(codec)) is codec
        assert copy.copy(codec) is copy.deepcopy(codec) is codec


def test_a_spec_that_has_changed_is_told(path):
    data = pickle.dumps(compll.compile(path, "reference"))
    path.write_text(SPEC + "feedback: error\n")
    with pytest.raises(compll.UsageError, match="has changed since"):
        pickle.loads(data)


def test_a_codec_of_other_origin_is_no_pickle():
    codec = compll.compile("onebit", "reference")
    other = compll.Codec(codec.module, codec.params, "reference", "", codec.backend)
    with pytest.raises(TypeError, match=r"not made by compll\.compile"):
        pickle.dumps(other)


def test_the_digest_has_the_number_of_the_payload_format(monkeypatch, tmp_path):
    first = compll.compile("topk", "reference")
    monkeypatch.setattr("compll.runtime.codec.FORMAT", compll.PAYLOAD_FORMAT + 1)
    monkeypatch.setattr("compll.runtime.library._compiled", {})
    assert compll.compile("topk", "reference").digest != first.digest
