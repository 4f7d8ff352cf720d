"""A few trials of each kind of bench.fuzz have no finding, and a planted fault is found."""

import json
import logging

import pytest
import typer

from bench import fuzz, fuzz_inputs

#: trials of a kind, in the fast tests and in all of them
SOME = {
    "states": 300, "rules": 20, "profiles": 100, "clusters": 50, "results": 50,

}  # fmt: skip
MANY = {
    "payloads": 4000, "specs": 200, "states": 4000, "rules": 300, "profiles": 1000,
    "clusters": 1000, "results": 1000,
}  # fmt: skip


@pytest.mark.parametrize("kind", SOME)
def test_damaged_files(kind):
    assert fuzz.run(kind, SOME[kind], seed=1).findings == []


def test_logging_is_as_it_was_afterwards(caplog):
    fuzz.run("rules", 1)
    logging.getLogger("hipress").warning("seen")
    assert caplog.messages == ["seen"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MANY)
def test_more_of_all_kinds(kind):
    tally = fuzz.run(kind, MANY[kind], seed=2)
    assert tally.findings == []
    assert set(tally.outcomes) == {"taken", "refused"}


def test_a_crash_is_found_and_run_again_by_its_number(monkeypatch, tmp_path, capsys):
    def wrong():
        def trial(random):
            if random.random() < 0.2:
                raise KeyError("a reader's fault")
            return "taken"

        return trial

    monkeypatch.setattr(fuzz, "KINDS", {"states": ("files", wrong)})
    monkeypatch.setattr(fuzz, "apart", fuzz.run)
    told = []
    for first, files in ((0, 40), (None, 1)):
        first = told[0] if first is None else first
        with pytest.raises(typer.Exit) as ended:
            fuzz.main(0, 0, files, first=first, output=tmp_path)
        assert ended.value.exit_code == 1
        row = json.loads((tmp_path / "fuzz.json").read_text())["states"]
        assert row["trials"] == files
        assert "KeyError at test_fuzz.py" in row["findings"][0]
        told.append(int(row["findings"][0].split()[3].rstrip(":")))
    assert told[0] == told[1]


def test_an_unknown_kind_is_refused(capsys):
    with pytest.raises(typer.Exit):
        fuzz.main(kind=["payload"])
    assert "choose from payloads, specs, states" in capsys.readouterr().err


def test_every_kind_has_an_option():
    assert {option for option, _ in fuzz_inputs.KINDS.values()} == {"payloads", "specs", "files"}
