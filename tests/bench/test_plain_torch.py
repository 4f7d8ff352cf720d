"""The plain-torch baselines compute the same values as the specs of the same name."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import typer

import compll
from bench import codecs
from bench.commands import other_rows
from bench.plain_torch import METHODS
from compll.ir.layout import limits

N = 49 * 1024
#: drawn at random
DRAWN = {"terngrad", "int4_group", "int8_group", "qsgd", "dgc", "powersgd"}
#: magnitudes that thresholds cannot part: a few values, so that bounds on the number kept hold
EQUAL = np.random.default_rng(1).choice([-1.0, -0.5, 0.5, 1.0], N).astype(np.float32)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def bounded(name):
    """True if the spec keeps elements beyond a threshold, up to a bound on their number."""
    module = compll.compile(name, "reference").module
    most = limits(module, N, compll.compile(name, "reference").params)
    return any(s.kind == "filter" and most[s.name] < N for s in module.selections)


def steps(count=3):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(N).astype(np.float32) * 0.4 for _ in range(count)]


def ours(name):
    codec = compll.compile(name)
    state, found = codec.init_state(N), []
    for step, x in enumerate(steps()):
        payload = codec.encode(x, state=state, step=step)
        found.append(codec.decode(payload, N, step=step))
    return found, codec


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
        # Random draws differ, but lose as much.
        assert np.linalg.norm(x - z) == pytest.approx(np.linalg.norm(x - y), rel=0.05)


@pytest.mark.parametrize("name", [name for name in METHODS if bounded(name)])
def test_no_more_is_sent_than_the_bound_of_the_spec(name):
    """The payload has exactly as many values as the spec sends, if no threshold separates them."""
    codec, method = compll.compile(name, "reference"), METHODS[name]
    state = torch.zeros(method.states * N) if codec.stateful else None
    payload = codec.encode(EQUAL, state=codec.init_state(N) if codec.stateful else None)
    expected = int(payload[:4].view("<u4")[0])
    count = len(method.encode(torch.from_numpy(EQUAL), state)[0])
    assert count == expected
    assert count <= limits(codec.module, N, codec.params)["kept"]


def test_rows_of_other_codecs_are_kept(tmp_path):
    path = tmp_path / "codecs.json"
    codecs.save([{"codec": "onebit"}, {"codec": "gone"}, {"codec": "none"}], path, {"cpu": "A"})
    assert other_rows(path, {"cpu": "A", "date": "now"}, ["onebit"], "codec") == [{"codec": "none"}]
    with pytest.raises(ValueError, match="measured with cpu A, not B: name no codec"):
        other_rows(path, {"cpu": "B"}, ["onebit"], "codec")
    assert other_rows(path, {"cpu": "B"}, ["onebit", "none"], "codec") == []
    assert other_rows(tmp_path / "none.json", {"cpu": "B"}, [], "codec") == []


FREED = """
import resource
from bench import codecs
import numpy as np
if codecs.keep_memory():
    np.ones(10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        np.ones(10_000_000)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
else:
    print(0)
"""


@pytest.mark.slow
def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # of 20,000 pages


@pytest.mark.slow
def test_a_row_may_have_parameters(tmp_path):
    (name,) = codecs.VARIANTS
    row = codecs.measure_codec(name, 4096, 1)
    assert (row["codec"], row["torch"]) == (name, {})
    moved = codecs.measure_codec("onebit_group", 4096, 1)["rates"]["encode_feedback"]["moved"]
    assert row["rates"]["encode_feedback"]["moved"] == moved - 4
    codecs.save([row], tmp_path / "codecs.json", {"repeat": 1})
    assert json.loads((tmp_path / "codecs.json").read_text())["rows"] == [row]


def test_speed_ups_compare_the_encode_that_training_uses():
    row = codecs.measure_codec("onebit", 4096, 1)
    assert codecs.speedup(row, "encode") == pytest.approx(
        row["rates"]["encode_feedback"]["rate"] / row["torch"]["encode"]
    )
    assert codecs.speedup(row | {"torch": {}}, "decode") is None
    assert codecs.show([row]).row_count == 1


def test_an_unknown_codec_is_told_before_any_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(codecs, "measure_codec", None)
    with pytest.raises(typer.Exit):
        codecs.main(["topk", "onebit_grup"])
    assert "did you mean hipress:onebit_group?" in capsys.readouterr().err
