"""Options: validated once, with messages that help."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from datetime import timedelta

import numpy as np
import pytest
import torch

import hipress
from compll.runtime.library import specs_dir
from hipress import options
from hipress.choose.search import candidates
from hipress.codecs import resolve, strategy_for
from hipress.errors import ConfigError
from hipress.model.devices import Placement
from hipress.session import label
from tests.hipress.fakes import Halves, Int8, Sparse


class BytesPath:
    """A path that is not text."""

    def __fspath__(self):
        return b"topk.yaml"


class Unfinished:
    """An object with only one member of a codec."""

    def encode_batch(self):
        raise AssertionError


def test_each_way_in_takes_the_options_that_are_declared_for_it():
    declared = {each.name: options.declared(each) for each in fields(options.Options)}
    for way in ("wrap", "attach", "Synchronizer"):
        taken = inspect.signature(getattr(hipress, way)).parameters
        assert set(declared) <= set(taken), way
    for way in (options.GOSSIP, options.SHARD, options.OUTER, options.ALL_REDUCE, options.GROUP):
        taken = inspect.signature(getattr(hipress, way)).parameters
        assert {n for n, option in declared.items() if way in option.ways} == set(declared) & set(
            taken
        ), way


def test_defaults_and_forms():
    made = options.make("auto", exclude="last.*", timeout=timedelta(seconds=3))
    assert made.automatic
    assert made.exclude == ("last.*",)
    assert made.timeout == 3
    assert options.make(Int8()).timeout == 1800


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("auto", {"scope": "tensr"}, "did you mean 'tensor'"),
        ("auto", {"timeout": 0}, "timeout must be a finite positive number of seconds"),
        ("auto", {"timeout": float("nan")}, "finite positive number of seconds.*, got nan"),
        ("auto", {"timeout": float("inf")}, "finite positive number of seconds.*, got inf"),
        ("auto", {"timeout": timedelta.max}, r"at most 1e\+09, got"),
        ("auto", {"min_size": -1}, "min_size"),
        ("auto", {"scratch": -1}, "scratch must be at least 0 bytes, got -1"),
        ("auto", {"seed": -1}, "seed"),
        ("auto", {"seed": "x"}, "seed is a whole number, not 'x'"),
        ("auto", {"seed": True}, "seed is a whole number, not True"),
        ("auto", {"seed": np.int64(-1)}, "seed must be in"),
        ("auto", {"seed": 2.0}, "seed is a whole number, not 2.0"),
        ("auto", {"min_size": True}, "min_size is a whole number, or None, not True"),
        ("auto", {"min_size": np.float32(3)}, "min_size is .*float32"),
        ("auto", {"timeout": True}, "timeout is seconds, or a timedelta, not True"),
        ("auto", {"verify": 1}, "verify is True or False, not 1"),
        ("auto", {"exclude": [3]}, "exclude"),
        ("auto", {"params": {"ratio": 0.1}}, "'ratio'"),
        ("auto", {"params": {"freeze": 4}}, "'freeze' is an argument of the optimizers"),
        (
            "auto",
            {"accept_loss": 1},
            "accept_loss is a share of the loss between 0 and 1, .* not 1",
        ),
        ("auto", {"accept_loss": float("nan")}, "between 0 and 1, such as 0.01, not nan"),
        ("auto", {"accept_loss": -0.01}, "between 0 and 1, such as 0.01, not -0.01"),
        ("auto", {"accept_loss": True}, "accept_loss is a share .* or None, not True"),
        ("auto", {"accept_loss": "1%"}, "accept_loss is a share .* or None, not '1%'"),
        ("auto", {"accept_loss": 0.01}, "none is known here: pass optimizer="),
        ("topk", {"accept_loss": 0.01, "optimizer": "sgd"}, 'accept_loss says what "auto" may'),
        (Int8(), {"params": {"bits": 2}}, "'bits'"),
        (7, {}, "compressor"),
        (Int8, {}, "compressor is the class Int8; pass a codec made of it"),
        (Unfinished(), {}, "compressor Unfinished lacks name, digest, .*casync.codec.Codec"),
        (BytesPath(), {}, "compressor must be a name, a path or a codec, got b'topk.yaml'"),
        (
            "auto",
            {"params": {"straetgy": "ps"}},
            "unknown option 'straetgy'. did you mean 'strategy'",
        ),
        (Int8(), {"params": {"proces_group": 1}}, "did you mean 'process_group'"),
        ("auto", {"params": {"static_graph": True}}, "ddp_kwargs={'static_graph': ...}"),
    ],
)
def test_refuses(name, wrong, message):
    with pytest.raises(ConfigError, match=message):
        options.make(name, **wrong)


@pytest.mark.parametrize(
    "name, wrong, meant",
    [
        ("topk", "straetgy", "strategy"),
        ("topk", "min_sise", "min_size"),
        ("topk", "ddp_kwarg", "ddp_kwargs"),
        ("topk", "ratoi", "ratio"),
        ("none", "exlude", "exclude"),
    ],
)
def test_a_misspelt_option_or_parameter_of_a_spec(name, wrong, meant):
    message = f"compressor '{name}' has no parameter '{wrong}'; did you mean '{meant}'?"
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(options.make(name, params={wrong: 1}))


def test_names_that_are_near_nothing_list_the_parameters():
    with pytest.raises(ConfigError, match=r"has no parameter 'xyz'\n.*known here: ratio"):
        resolve(options.make("topk", params={"xyz": 1}))
    with pytest.raises(ConfigError, match="need a compressor given by name"):
        options.make("auto", params={"xyz": 1})
    with pytest.raises(ConfigError, match=r"compressor 'foo'\. `compll list` prints all"):
        resolve(options.make("foo"))  # not "did you mean 'atomo'?"


def test_arguments_of_ddp_have_their_place():
    with pytest.raises(ConfigError, match=r"ddp_kwargs={'find_unused_parameters': "):
        resolve(options.make("topk", params={"find_unused_parameters": True}))


def test_names_that_others_use_and_files_without_their_ending(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("name: mine")
    for name, meant in (("fp32", "none"), ("tbq", "mxnet_2bit"), ("mine", "mine.yaml")):
        with pytest.raises(ConfigError, match=f"did you mean .*'{meant}'"):
            resolve(options.make(name))


@pytest.mark.parametrize(
    "strategy, told", [("rng", "did you mean 'ring'"), ("vote", "cannot predict strategy 'vote'")]
)
def test_auto_needs_a_codec_for_the_strategy(strategy, told):
    """Otherwise it would measure the link, have no codec to compare, and never compress."""
    with pytest.raises(ConfigError, match=told):
        candidates(options.make("auto", strategy=strategy))


def test_scalars_of_numpy_are_parameters():
    made = options.make("topk", params={"ratio": np.float32(0.125)})
    assert made == options.make("topk", params={"ratio": 0.125})
    assert label(made) == "topk(ratio=0.125)"
    assert resolve(made).params == {"ratio": 0.125}


def test_whole_numbers_of_any_kind():
    made = options.make("topk", seed=np.uint64(2**64 - 1), min_size=np.int16(7), timeout=np.int8(9))
    assert made == options.make("topk", seed=2**64 - 1, min_size=7, timeout=9)
    assert {type(each) for each in (made.seed, made.min_size, made.timeout)} == {int}


def test_a_path_is_what_its_text_is():
    path = specs_dir() / "topk.yaml"
    made = options.make(path, params={"ratio": 0.125})
    assert made == options.make(str(path), params={"ratio": 0.125})
    assert label(made) == f"{path}(ratio=0.125)"
    assert resolve(made).params == {"ratio": 0.125}


@pytest.mark.parametrize(
    "codec, suits",
    [(Halves(), "allreduce"), (Int8(), "ps"), (Sparse(), "exchange")],
)
def test_automatic_strategy(codec, suits):
    assert strategy_for(codec) == suits


@pytest.mark.parametrize(
    "codec, asked, message",
    [
        (Int8(), "pss", "did you mean 'ps'"),
        (Int8(), "allreduce", "do not add"),
        (Sparse(), "ring", "exchange"),
    ],
)
def test_strategy_that_cannot_work(codec, asked, message):
    with pytest.raises(ConfigError, match=message):
        strategy_for(codec, asked)


def test_all_mistakes_of_a_spec_are_told_at_once(tmp_path):
    """Mistakes of form were once reported alone, before the others."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "name: own\nencode: {q: meen(g)}\npayload: {q: float32}\ndecode: q\nfeedback: true\n"
    )
    with pytest.raises(ConfigError) as caught:
        resolve(options.make(str(path)))
    assert "unknown operator 'meen'" in str(caught.value)
    assert "'feedback' is one of none, error, own" in str(caught.value)


@pytest.mark.parametrize("transport", ["nccl", "nccl4py", "pynccl"])
def test_checksums_are_for_hosts(transport):
    """Over NCCL they did nothing."""
    on_gpu = Placement(torch.device("cuda:0"), transport)
    with pytest.raises(ConfigError, match=f"payloads of .*cuda:0 travel by '{transport}'"):
        on_gpu.refuse_checksum(True)
    on_gpu.refuse_checksum(False)
    Placement(torch.device("cuda:0"), "staged").refuse_checksum(True)
    with pytest.raises(ConfigError, match="GroupOptions takes no checksum: over NCCL"):
        hipress.GroupOptions("int4_group", checksum=True)


@pytest.mark.parametrize("transport", ["gloo", "staged"])
def test_graphs_are_for_nccl(transport):
    with pytest.raises(ConfigError, match=f"over NCCL; payloads .* travel by '{transport}'"):
        Placement(torch.device("cpu"), transport).refuse_capture(True)
    Placement(torch.device("cpu"), transport).refuse_capture(False)
    Placement(torch.device("cuda:0"), "nccl4py").refuse_capture(True)


@pytest.mark.parametrize("way", [hipress.wrap, hipress.attach, hipress.Synchronizer])
def test_a_call_that_does_not_fit_is_told_by_the_callers_name(way):
    with pytest.raises(TypeError, match=f'^hipress.{way.__name__}.*too many.*strategy="ring"'):
        way(torch.nn.Linear(2, 2), "int4_group", "ring")
