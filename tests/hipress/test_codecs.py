"""Codecs compiled by compll, end to end."""

from __future__ import annotations

import pytest

import compll
from hipress.choose import evidence
from hipress.engine.residuals import deferrable_states
from tests.hipress import codec_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast

EXACT = {"none": 1e-5, "fp16": 1e-3, "bf16": 1e-2, "bf16_sr": 1e-2, "lossless": 1e-5}
CODECS = {
    name: {} for name in ("none", "bf16", "int4_group", "fp16", "onebit_group", "terngrad_uniform")
}
CODECS |= {"onebit_sgd": {}, "qsparse": {"ratio": 0.1}, "int8_group": {}}
VOTES = {"signsgd": {}, "signum": {}}
CODECS |= {"lossless": {"strategy": "ps"}, "bf16_sr": {}}
CODECS |= {"topk": {"ratio": 0.1}, "dgc": {"ratio": 0.1, "momentum": 0.0}}


#: those of the fast test
FEW = ("none", "lossless", "fp16", "int4_group", "onebit_group", "topk", "dgc")


@pytest.mark.parametrize("world_size, names", first_fast([(2, FEW), (4, tuple(CODECS))]))
def test_every_codec_trains(world_size, names):
    results = launch(codec_ranks.real, world_size, {name: CODECS[name] for name in names})
    for name in names:
        trained = results[0][name]
        assert all(result[name].digest == trained.digest for result in results), name
        assert trained.losses[-1] < trained.losses[0], name
        assert trained.difference <= EXACT.get(name, 1.0), name
        assert 0.7 < trained.delivered < 1.3, (name, trained.delivered)
    # two ranks' numbers have only one sum, whatever the strategy
    bits = {results[0][name].digest for name in ("none", "lossless")}
    assert len(bits) == 1 or world_size > 2


#: the others, a few in each launch
REST = sorted(set(compll.list_specs()) - set(CODECS) - set(VOTES))


@pytest.mark.slow  # training; tests/compll holds each to the reference
@pytest.mark.parametrize("names", [REST[i : i + 6] for i in range(0, len(REST), 6)], ids="-".join)
def test_every_other_spec_keeps_the_ranks_together(names):
    for name in names:
        compll.compile(name)  # once, not in every rank
    results = launch(codec_ranks.real, 2, {name: {} for name in names})
    for name in names:
        trained = results[0][name]
        assert all(result[name].digest == trained.digest for result in results), name
        assert trained.losses[-1] < trained.losses[0], name


def test_auto_measures_and_decides():
    """Nothing is installed if a codec must save 10 s a step, however busy the machine is."""
    results = launch(codec_ranks.automatic, 2, 10.0)
    for result in results:
        assert not result.report["installed"]
        assert result.hooks == 0
        assert result.report["probe"]["seconds"] > 0
        assert result.report["tried"] == []
        assert "the native all-reduce remains" in result.text
        assert result.losses[-1] < result.losses[0]
        assert result.digest == results[0].digest


@pytest.mark.slow
def test_auto_installs_what_it_tries():
    """A codec that may cost 10 s a step is installed, however busy the machine is."""
    results = launch(codec_ranks.automatic, 2, -10.0)
    for result in results:
        report = result.report
        assert result.hooks == 1
        assert {d["codec"] for d in report["decisions"]} <= {
            None,
            *(key for key, *_ in evidence.trusted(None)),
        }
        assert report["measured"]["steps"] == len(result.losses)
        assert len(report["tried"]) == 4
        assert sum(each["plan"] == "no compression" for each in report["tried"]) == 1
        assert "Plans tried" in result.text
        assert "being tried" in result.text
        assert result.losses[-1] < result.losses[0]
        assert result.digest == results[0].digest
        assert report["decisions"] == results[0].report["decisions"]


def test_a_compressor_that_suits_nothing_is_told():
    ((level, told),), second = launch(codec_ranks.ineligible, 2)
    assert level == "WARNING"
    assert told.startswith(
        "hipress: nothing is compressed, the native all-reduce remains: no tensor"
    )
    assert "type float64" in told
    assert second == []


def test_a_compressor_that_loses_under_the_optimizer_is_told():
    under_adam, *silent = launch(codec_ranks.losing, 2)[0]
    ((level, told),) = [line for line in under_adam if "loss" in line[1]]
    assert level == "WARNING"
    worst = evidence.worst(compll.compile("onebit_group", "reference"), "adam")
    assert f"onebit_group() did not keep the loss under adam: {worst}; " in told
    assert not any("loss" in told for lines in silent for _, told in lines)


def test_compiling_is_told_by_rank_0_once(tmp_path):
    first, second = launch(codec_ranks.compiled, 2, str(tmp_path))
    assert second == [[], []]
    assert first == [[("INFO", "compiling kernels of none, which are then cached")], []]


def test_rank_0_logs_once_which_tensors_are_compressed():
    """At INFO, which only some applications show; surprisingly little compression is a warning."""
    first, second = launch(codec_ranks.told, 2)
    assert second == [[]] * 5
    assert [level for ((level, _),) in first] == ["INFO", "INFO", "INFO", "WARNING", "INFO"]
    fixed, automatic, excluded, little, sparse = [text for ((_, text),) in first]
    assert fixed == (
        "hipress: int8_fake (ps) for 9 of 9 parameters, 100.0% of 41,949 elements: 0.1678 MB a "
        "step become at most 0.05246 MB; compressor 'int8_fake' was asked for"
    )
    told = "hipress: nothing is compressed, the native all-reduce remains: no compressor"
    assert automatic.startswith(told)
    assert "for 8 of 9 parameters, 6.0% of" in excluded
    assert "topk (ps) for 1 of 3 parameters, 25.0% of 8,000 elements" in little
    assert "MB a step (1 sparse ones aside) become at most" in sparse


def test_reports_count_the_same_gradients_with_and_without_compression():
    """It once set dense sizes of all parameters against compressed bytes: 47,089 times."""
    for report, text in launch(codec_ranks.counted, 3):
        measured = report["measured"]
        kinds = {name: tuple(kind.values()) for name, kind in measured["kinds"].items()}
        layer, double, rows = 4 * 51 * 200, 8 * 201 * 30, 7 * (8 + 4 * 50)
        gradients, ddp, sent = kinds["compressed"]
        assert (gradients, ddp) == (layer, pytest.approx(layer * 4 / 3))
        assert layer / 5 < sent < layer
        assert kinds["uncompressed"] == (double, *[pytest.approx(double * 4 / 3)] * 2)
        assert kinds["sparse"] == (rows, 2 * rows, 2 * rows)
        for at, name in enumerate(("gradient_bytes", "ddp_wire_bytes", "wire_bytes")):
            assert measured[name] == pytest.approx(sum(kind[at] for kind in kinds.values()))
        for shown in ("int8_fake (ps) for 2 of 5", "type float64 is not compressed"):
            assert shown in text, text
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert f"uncompressed {double / 1e6:.3f}" in "\n".join(lines)
        (whole,) = [line for line in lines if line.startswith("all ")]
        assert whole.endswith(f"{measured['ddp_wire_bytes'] / measured['wire_bytes']:.1f}x")


def test_reports_tell_of_compiled_codecs_what_they_tell_of_names():
    for (named, _), (compiled, text) in launch(codec_ranks.reported, 2):
        assert named["compressor"] == compiled["compressor"] == "topk(ratio=0.1)"
        assert named["params"] == {"ratio": 0.1}
        assert compiled == named | {"params": {}}
        assert compiled["exclude"] == ["*.bias"]
        assert "topk" in text


def test_names_that_do_not_exist():
    (errors,) = launch(codec_ranks.unknown, 1)
    assert {error.kind for error in errors} == {"ConfigError"}
    names = ("'onebit_group'", "ratio", "ratio", "nowhere.yaml", "'ring'")
    for error, expected in zip(errors, names, strict=True):
        assert expected in error.message


@pytest.mark.slow
def test_signs_vote_and_ranks_agree():
    results = launch(codec_ranks.real, 3, VOTES)
    for name in VOTES:
        assert len({result[name].digest for result in results}) == 1, name


@pytest.mark.parametrize(
    "name, params, names",
    [
        ("dgc", CODECS["dgc"], ("u", "v")),
        ("onebit_group", {}, ("residual",)),
        ("signum", {}, ()),  # of zeros it votes for ones
        ("powersgd", {}, ("residual",)),  # the factor is all ranks'
        ("int4_group", {}, ()),
    ],
)
def test_which_states_wait_for_a_step_that_uses_their_parameter(name, params, names):
    assert deferrable_states(compll.compile(name, **params)) == names
