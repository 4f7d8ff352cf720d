"""The process group `hipress`, as the replicas' dimension of a mesh."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hipress
from hipress import compat
from tests.hipress import group_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast

ROOT = Path(hipress.__file__).parents[1]
ALL = ("int4_group", "int8_group", "default")


@pytest.mark.parametrize(
    "way, ranks, micro, names",
    first_fast([("replicate", 2, 2, ALL[2:]), ("hsdp", 4, 2, ALL), ("hsdp", 4, 1, ALL),
                ("replicate", 3, 1, ALL)]),
)  # fmt: skip
def test_replicas_train_as_natively(way, ranks, micro, names):
    """Replicas are averaged once a step, whatever the number of micro-batches."""
    layers, steps = 3, group_ranks.STEPS
    for found in launch(group_ranks.trained, ranks, way, ("none", *names), micro):
        native, none = found["native"], found["none"]
        assert native[-1] < 0.8 * native[0]
        assert none["as native"]
        assert none["losses"] == native
        assert "no: compressor 'none'" in none["text"]
        for compressor in names:
            ours = found[compressor]
            assert ours["replicas"]
            assert not ours["as native"]
            assert ours["losses"][-1] == pytest.approx(native[-1], rel=0.15)
            rows = {row.why_not: row for row in ours["report"].calls if row.what == "all-reduce"}
            small = rows.get("fewer than 16384 elements")
            assert rows[""].calls + (small.calls if small else 0) == layers * steps
            assert (small is not None) == (compressor == "default")
            assert 0 < ours["report"].bytes_sent < 4 * rows[""].elements
            assert "yes" in ours["text"]
            mean = ours["report"].bytes_sent / ours["report"].passes
            assert ours["report"].passes == steps
            assert ours["figures"] == {"hipress/bytes": mean}


def test_sums_and_averages_of_all_types():
    for found, compressed in launch(group_ranks.reduced, 3):
        for (op, _), value in found.items():
            assert value == pytest.approx(6 if "SUM" in op else 2, rel=0.02)
        assert compressed == [6]  # float64 travels as it is


def test_a_group_leaves_alone_what_is_no_gradient():
    for rank, (errors, values, rows) in enumerate(launch(group_ranks.refused, 2)):
        for title, told in {
            "auto": 'needs a compressor by name: "auto" plans for a model',
            "name": "did you mean 'int4_group'?",
            "states": "keeps states (residual) from step to step",
            "owners": "hipress.shard(model, replicas='onebit_group')",
            "options": "options of a group hipress are hipress.GroupOptions, not 'int4_group'",
            "host": "compresses where its tensors are",
            "native": "this group is of backend 'gloo', not 'hipress'",
        }.items():
            assert errors[title].kind == "ConfigError", title
            assert told in errors[title].message
        assert values == (3.0, [0.0, 1.0], [0, 1], [6.0 * rank, 6.0 * rank + 2, 6.0 * rank + 4])
        assert rows["all-reduce", "outside of a backward pass"] == 1
        assert rows["all-reduce", "neither SUM nor AVG"] == 1
        for what in ("broadcast", "reduce_scatter", "barrier"):
            assert rows[what, "only all-reduces are compressed"] == 1


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda, device = True, torch.device("cuda", 1)


@pytest.mark.parametrize("kind, devices", [(torch.Tensor, None), (OnGpu, [OnGpu.device])])
def test_a_stream_that_waits_for_an_all_reduce_comes_after_it(monkeypatch, kind, devices):
    """An event of the future orders it, which torch records only for devices that are named."""
    made = []

    class Future(torch.futures.Future):
        def __init__(self, *, devices=None):
            made.append(devices)
            super().__init__()

    monkeypatch.setattr(torch.futures, "Future", Future)
    assert compat.finished_work([torch.zeros(2).as_subclass(kind)]).wait()
    assert made == [devices]


def test_a_group_of_all_ranks_is_refused_as_the_default():
    for error in launch(group_ranks.default, 2):
        assert error.kind == "ConfigError"
        assert "losses, norms and checkpoints travel there" in error.message
        assert 'backend_override={"replicate": "hipress"}' in error.message


def test_ranks_of_a_group_have_the_same_options():
    for error in launch(group_ranks.unequal, 2):
        assert error.kind == "ConfigMismatch"
        assert "min_size of group hipress: rank 0: 1024, rank 1: 1025" in error.message


def test_the_entry_point_registers_the_backend():
    """torch 2.14 looks a backend up by its name, and calls what it finds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    path, _, name = project["entry-points"]["torch.distributed.backends"]["hipress"].partition(":")
    getattr(importlib.import_module(path), name)()
    assert dist.Backend.backend_list.count("hipress") == 1
