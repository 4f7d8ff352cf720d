"""Rules by name and shape: codecs of parameters."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from casync.topology import Topology
from hipress import options
from hipress.choose import rules as overrides
from hipress.choose.plan import check_patterns, fixed_plan
from hipress.errors import ConfigError
from hipress.model.params import describe
from hipress.session import plain_options
from tests.hipress import rules_ranks
from tests.hipress.common import make
from tests.hipress.fakes import Halves, Int8, Sparse
from tests.hipress.launch import launch

PARAMS = describe(make())
TWO = Topology.flat(2)


def decided(rules, compressor=None, **more):
    """The decisions of a plan for Net, by name."""
    codec = Int8() if compressor is None else compressor
    wanted = options.make(codec, rules=rules, **more)
    ours = overrides.decide(overrides.compiled(wanted), PARAMS, [codec], wanted, 2)
    plan = ours.apply(fixed_plan(PARAMS, codec, wanted, TWO))
    assert {d.codec for d in plan.decisions} - {None} == set(plan.codecs)
    return {d.name: (d.codec, d.why) for d in plan.decisions}, plan


def test_the_first_match_wins_and_the_rest_gets_the_compressor():
    found, plan = decided({"second.weight": Halves(), "second.*": None, "*.weight 131*": None})
    assert found["second.weight"] == ("half_fake", "rule 'second.weight'")
    assert found["second.bias"] == (None, "rule 'second.*'")
    assert found["norm.weight"] == found["first.weight"] == (None, "rule '*.weight 131*'")
    assert found["last.weight"] == ("int8_fake", "asked for")
    strategies = {d.name: d.strategy for d in plan.decisions}
    assert strategies["second.weight"] == "allreduce"
    assert strategies["last.weight"] == "ps"


def test_shapes_are_matched_whole():
    found, _ = decided({"* 301x131": None, "* 1": None})
    assert Counter(why for _, why in found.values())["rule '* 301x131'"] == 1
    assert found["scale"] == (None, "rule '* 1'")


class Language(nn.Module):
    """A tied head, as in GPT-2; or a separate one, behind the last norm."""

    def __init__(self, *, tied):
        super().__init__()
        self.tokens, self.block = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.norm, self.output = nn.LayerNorm(8), nn.Linear(8, 50, bias=not tied)
        if tied:
            self.output.weight = self.tokens.weight


def kept(model, kinds):
    """Names of the uncompressed parameters if these kinds are, by rules and by `exclude`."""
    params = describe(model)
    wanted = options.make(Int8(), rules=dict.fromkeys(kinds))
    ours = overrides.decide(overrides.compiled(wanted), params, [Int8()], wanted, 2)
    plans = [
        ours.apply(fixed_plan(params, Int8(), wanted, TWO)),
        fixed_plan(params, Int8(), options.make(Int8(), exclude=kinds), TWO),
    ]
    first, other = ({d.name for d in p.decisions if d.codec is None} for p in plans)
    assert first == other
    return first


def test_kinds_of_parameters_are_exempt_whatever_their_names():
    ends = {"block.bias", "norm.weight", "norm.bias"}
    own, tied = Language(tied=False), Language(tied=True)
    assert kept(own, ["@1d"]) == ends | {"output.bias"}
    assert kept(own, ["@embedding"]) == {"tokens.weight"}
    assert kept(own, ["@head"]) == {"output.weight", "output.bias"}
    assert kept(tied, ["@head"]) == kept(tied, ["@embedding"]) == {"tokens.weight"}
    own.output = nn.ModuleList([nn.Linear(8, 8)])  # blocks come last: the head is elsewhere
    assert kept(own, ["@head"]) == set()
    every = ["@1d", "@embedding", "@head"]
    assert kept(tied, every) == ends | {"tokens.weight"}
    assert kept(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 4, bias=False)), every) == {
        "0.bias",
        "1.weight",
    }


@pytest.mark.parametrize("given", [{"rules": {"@heads": None}}, {"exclude": "@heads"}])
def test_an_unknown_kind_is_refused(given):
    wanted = options.make(Int8(), **given)
    check = check_patterns if wanted.exclude else lambda params, _: overrides.assign(ruled, params)
    ruled = overrides.compiled(wanted)
    with pytest.raises(ConfigError, match=r"kind of parameters '@heads'.*@head"):
        check(PARAMS, wanted)


class Sparing(Int8):
    """Takes 12 bytes of a GPU's memory for an element."""

    def scratch_bytes(self, n):
        return 12 * n


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_tensors_beyond_the_scratch_budget_stay_uncompressed(scope):
    """On a GPU, beside payloads and states; the report says so."""
    largest = max(PARAMS, key=lambda param: param.numel)
    limit = 12 * largest.numel - 1
    _, plan = decided({}, Sparing(), scope=scope, scratch=limit, min_size=0)
    found = {d.name: d.why for d in plan.decisions if d.codec is None}
    assert set(found) == ({largest.name} if scope == "tensor" else {p.name for p in PARAMS})
    assert found[largest.name].startswith("int8_fake needs ")
    assert found[largest.name].endswith(f" MiB of scratch memory, over {limit >> 20}")
    _, plan = decided({}, Sparing(), scope=scope, scratch=12 * sum(p.numel for p in PARAMS))
    assert all(d.codec for d in plan.decisions if d.numel > 1)


def test_one_codec_with_two_sets_of_parameters():
    rules = {
        "first.weight": {"compressor": "topk", "ratio": 0.5},
        "second.weight": {"compressor": "topk", "ratio": 0.25},
        "*": None,
    }
    found, plan = decided(rules, min_size=0)
    one, other = found["first.weight"][0], found["second.weight"][0]
    assert plan.codecs[one].params["ratio"] == 0.5
    assert plan.codecs[other].params["ratio"] == 0.25


def test_a_codec_that_does_not_suit_leaves_a_parameter_alone():
    found, _ = decided({"scale": Sparse()})
    assert found["scale"] == (None, "fewer than 1024 elements")


def test_rules_come_from_a_file(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text('"*.bias":\nsecond.*: {compressor: topk, ratio: 0.5}\n')
    found, plan = decided(path, min_size=0)
    assert found["second.bias"] == (None, "rule '*.bias'")
    assert plan.codecs[found["second.weight"][0]].params["ratio"] == 0.5
    assert plain_options(options.make("auto", rules=path))["rules"] == str(path)


def test_options_show_rules_as_json_takes_them():
    wanted = options.make("auto", rules={"a": None, "b": "topk", "c": {"compressor": "topk"}})
    assert plain_options(wanted)["rules"] == {"a": None, "b": "topk", "c": {"compressor": "topk"}}
    assert plain_options(options.make("auto", rules={"a": Int8()}))["rules"] == {"a": "int8_fake()"}


@pytest.mark.parametrize(
    "rules, told",
    [
        ({"lost.*": None}, r"rule 'lost\.\*' matches no parameter of scale, first\.weight"),
        ({"lost 3x3": None}, "rule 'lost 3x3' matches no parameter of scale 1, first.weight 131x7"),
        ({"*": None, "*.bias": "topk"}, r"rule '\*\.bias' gets no parameter: rule '\*' before it"),
        ({"*": "onebt"}, r"rule '\*': unknown compressor 'onebt'. did you mean 'onebit'"),
        ({"*": {"compressor": "topk", "ration": 1}}, r"rule '\*': .*no parameter 'ration'"),
        ({"*": {"ratio": 1}}, r"rule '\*': a rule has a compressor's name or path, None, or a map"),
        ({"*": 3}, r"rule '\*': a rule has a compressor's name"),
        (["*.bias"], "rules are patterns of names with compressors"),
        ({3: None}, "rules are patterns of names with compressors"),
        ("nowhere.yaml", "nowhere.yaml:1:1: cannot read the file: No such file"),
    ],
)
def test_mistakes_are_named(rules, told):
    with pytest.raises(ConfigError, match=told):
        decided(rules)


def test_a_strategy_that_cannot_carry_a_rules_codec():
    with pytest.raises(ConfigError, match=r"rule 'second.*': .*sparse_fake.*'ps'"):
        decided({"second.*": Sparse()}, strategy="ps")


def laughs(width, levels):
    """A list of lists, each of which has its parts many times: 500 bytes mean a billion values."""
    lists = [f"&a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return f"x: [&a0 [{', '.join('x' * width)}], {', '.join(lists)}]"


FILES = {
    "no YAML": ("a: [", ":2:1: malformed YAML"),
    "no mapping": ("- a", ":1:1: a rules file is a mapping"),
    "deep": ("'*': " + "[" * 900, ":1:21: nested more than 16 deep"),
    "aliases": (laughs(10, 10), ":1:.*: more than 20000 values, aliases counted"),
    "shared lists": (laughs(5, 5), ":1:4: rule 'x': a rule has a compressor's name"),
    "a rule": ("'*': none\n'a*':\n  {compressor: onebt}", ":3:3: rule 'a.': unknown compressor"),
    "a parameter": ("'*': {compressor: topk, ratio: [1]}", ":1:6: .*'ratio' is float, not .1."),
}


@pytest.mark.parametrize("text, told", FILES.values(), ids=FILES)
def test_mistakes_in_files_have_places(text, told, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"rules.yaml{told}") as error:
        decided(path)
    assert len(str(error.value)) < 500


def test_values_of_files_are_those_of_specs(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("second.*: ~\n'*': {compressor: topk, ratio: 1e-1}")
    found, plan = decided(path, min_size=0)
    assert found["second.weight"] == (None, "rule 'second.*'")
    assert {codec.params["ratio"] for codec in plan.codecs.values()} == {0.1}


@pytest.mark.slow
def test_ranks_train_by_rules_and_by_auto_for_the_rest():
    for fixed, auto, mismatch, useless in launch(rules_ranks.ruled, 2):
        assert fixed == {"second.weight": "half_fake", "second.bias": None, "last.weight": "int8"}
        assert auto["second.weight"] == "half_fake"
        assert auto["second.bias"] is None
        assert mismatch[0] == "ConfigMismatch"
        assert "rules" in mismatch[1]
        assert useless[0] in ("ConfigError", "ConfigMismatch")
        assert "rule 'lost' matches no parameter" in useless[1]
