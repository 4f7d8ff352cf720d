"""Commands of bench refuse bad arguments in one line, before any work."""

import sys

import pytest
import typer

from bench import auto, netns, policies, ranks, throttle


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(netns, "unavailable", lambda: None)
    for module in (policies, throttle):
        monkeypatch.setattr(module, "Network", None)
    monkeypatch.setattr(auto, "run_cell", None)


@pytest.mark.parametrize(
    "main, options, message",
    [
        (policies.main, {"rate": "fast"}, "rate 'fast': expected 100kbit to 100gbit"),
        (throttle.main, {"slow": "fast"}, "rate 'fast': expected 100kbit to 100gbit"),
        (
            throttle.main,
            {"optimizer": "rmsprop"},
            "optimizer 'rmsprop': the workload trains with sgd or adamw",
        ),
        (auto.main, {"optimizer": ["adam"]}, "'adam': choose from sgd, adamw"),
    ],
)
def test_refused_options(main, options, message, capsys):
    refused(main, options, message, capsys)


@pytest.mark.parametrize("module", [auto, policies, throttle])
def test_a_folder_that_cannot_be(module, tmp_path, capsys):
    (tmp_path / "file").touch()
    refused(module.main, {"output": tmp_path / "file" / "folder"}, "Not a directory", capsys)


def test_a_machine_without_emulated_hosts(monkeypatch, capsys):
    monkeypatch.setattr(netns, "unavailable", lambda: "network namespaces need root")
    told = "hosts cannot be emulated here: network namespaces need root"
    refused(policies.main, {}, told, capsys)


def refused(main, options, message, capsys):
    with pytest.raises(typer.Exit) as exit:
        main(**options)
    assert exit.value.exit_code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_rank_takes_its_own_arguments(monkeypatch, capsys):
    def rank(method: str, seed: int) -> None:
        print(method, seed + 1)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["bench", "topk", "3"])
    with pytest.raises(SystemExit):
        ranks.run(policies.main, rank)
    assert capsys.readouterr().out == "topk 4\n"
