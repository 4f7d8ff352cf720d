"""The plain-torch baselines compute what the specs of the same name do."""

import numpy as np
import pytest
import torch

import compll
from bench import codecs
from bench.plain_torch import METHODS

N = 49 * 1024
#: drawn at random
DRAWN = {
    "wangni",
    "natural",
    "terngrad",
    "terngrad_uniform",
    "int4_group",
    "int8_group",
    "qsgd",
    "qsparse",
    "graddrop",
    "dgc",
    "adaq",
    "dithering",
    "powersgd",
}


def steps(count=3):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(N).astype(np.float32) * 0.4 for _ in range(count)]


def ours(name):
    codec = compll.compile(name)
    state = codec.init_state(N)
    return [
        codec.decode(codec.encode(x, state=state, step=i), N) for i, x in enumerate(steps())
    ], codec


def theirs(name, *, stateful):
    torch.manual_seed(0)
    method = METHODS[name]
    state = torch.zeros(method.states * N) if stateful else None
    return [method.decode(method.encode(torch.from_numpy(x), state), N).numpy() for x in steps()]


@pytest.mark.parametrize("name", METHODS)
def test_the_baseline_is_the_same_method(name):
    expected, codec = ours(name)
    found = theirs(name, stateful=codec.stateful)
    for x, y, z in zip(steps(), expected, found, strict=True):
        assert z.shape == x.shape
        if name not in DRAWN:
            assert np.mean(np.isclose(y, z, rtol=1e-5, atol=1e-6)) > 0.999
        # What is drawn at random differs, but loses as much.
        assert np.linalg.norm(x - z) == pytest.approx(np.linalg.norm(x - y), rel=0.05)


def test_rows_of_other_codecs_are_kept(tmp_path):
    path = tmp_path / "codecs.json"
    row = {"codec": "onebit", "rates": 1}
    codecs.save([row, {"codec": "gone"}], path, 10, 1)
    codecs.save([{"codec": "none"}, row | {"rates": 2}], path, 10, 1)
    held = codecs.json.loads(path.read_text())
    assert held["rows"] == [{"codec": "none"}, row | {"rates": 2}]
    assert held["about"]["torch"] == torch.__version__


def test_speed_ups_compare_the_encode_that_training_uses():
    row = codecs.measure_codec("onebit", 4096, 1)
    assert codecs.speedup(row, "encode") == pytest.approx(
        row["rates"]["encode_feedback"]["rate"] / row["torch"]["encode"]
    )
    assert codecs.speedup(row | {"torch": {}}, "decode") is None
    assert codecs.show([row]).row_count == 1
