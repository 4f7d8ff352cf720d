"""Variants of training after the freeze of Adam's second moments."""

from __future__ import annotations

import json

import pytest

from bench import freezes, losses
from bench.freezes import Training, Variant, doubling
from bench.loss_workloads import WORKLOADS


@pytest.mark.slow
def test_by_default_a_variant_is_what_hipress_does():
    ours, _ = Training(WORKLOADS["gpt"], 1, 14, Variant(freeze=losses.FREEZE)).run()
    theirs, _ = losses.curve("gpt", "momentum:onebit_fine", 1, 14)
    assert ours == pytest.approx(theirs.final, rel=1e-3)
    for other in (Variant(floor=0.5), Variant(refresh=2), Variant(local=0.5)):
        assert Training(WORKLOADS["gpt"], 1, 14, other).run()[0] != pytest.approx(ours, rel=1e-3)


def test_intervals_double():
    assert [*doubling(3, 2, 30)] == [3, 4, 6, 8, 12, 16, 24]
    assert [*doubling(0, 1, 20, longest=4)] == [0, 2, 6, 10, 14, 18]


def test_a_line_for_each_variant(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(freezes.Training, "run", lambda self: (1.0, 0.0))
    freezes.main("gpt", 200, 1, ["refresh=16,local=0.5", "follow=1"], tmp_path / "lines.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [(each["refresh"], each["local"], each["follow"]) for each in lines] == [
        (16, 0.5, 0), (0, 1.0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "workload, variant, told",
    [("gpt", "refesh=16", "unknown 'refesh'"), ("digits", "follow=1", "no workload"),
     ("gtp", "follow=1", "'gtp' is no workload")],
)  # fmt: skip
def test_an_unknown_variant_is_refused(workload, variant, told, capsys):
    with pytest.raises(freezes.typer.Exit):
        freezes.main(workload, 200, 1, [variant])
    assert told in capsys.readouterr().err
