"""Losses of GPT-2 by real ranks, with a small model."""

import json
import time

import numpy as np
import pytest
from torch.multiprocessing import ProcessRaisedException

from bench import gpt2_losses, measured_tables
from bench.gpt2_losses import METHODS, Scale, measure, missing, rate, words

SMALL = Scale(steps=4, context=16, sequences=8, layers=1, width=48, batches=1)


@pytest.fixture
def folder(tmp_path):
    for name in ("text", "held"):
        np.save(tmp_path / f"{name}.npy", np.arange(2000, dtype=np.uint16) % 100)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[1:2] + METHODS[3:])
def test_a_method_trains_and_tells_its_costs(method, folder):
    cell = measure(method, 1, SMALL, "cpu", folder, time.time() + 600)
    assert 8 < cell["loss"] < 11.5  # of 50,257 words: ln is 10.8
    assert len(cell["curve"]) == 1
    assert 0 < cell["host_ms"] <= cell["ms"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["wrap:topk:ranks=2"])
def test_a_training_that_is_cut_goes_on_bit_for_bit(method, folder, tmp_path, monkeypatch):
    whole = measure(method, 1, SMALL, "cpu", folder, time.time() + 600)
    again = tmp_path / "again"
    again.mkdir()
    for name in ("text.npy", "held.npy"):
        (again / name).write_bytes((folder / name).read_bytes())
    assert measure(method, 1, SMALL, "cpu", again, 0.0) is None
    found = measure(method, 1, SMALL, "cpu", again, time.time() + 600)
    assert (found["loss"], found["curve"]) == (whole["loss"], whole["curve"])
    # a day that ended before the cell was recorded
    assert measure(method, 1, SMALL, "cpu", again, time.time() + 600) == found


@pytest.mark.slow
def test_checkpoints_of_different_steps_are_refused(folder):
    assert measure("wrap:topk:ranks=2", 1, SMALL, "cpu", folder, 0.0) is None
    next(folder.glob("wrap*/1.pt")).unlink()
    with pytest.raises(ProcessRaisedException, match="of different steps: delete"):
        measure("wrap:topk:ranks=2", 1, SMALL, "cpu", folder, time.time() + 600)


def test_words_are_numbers_by_frequency_and_some_files_are_held_out(monkeypatch, tmp_path):
    files = [tmp_path / f"{number}.py" for number in range(60)]
    for file in files:
        file.write_text("often often rare" if file.stem == "3" else "often\n")
    monkeypatch.setattr(gpt2_losses, "_files", lambda characters: files)
    text, held = words(1000, 2)
    assert len(held) == 2 * 2  # a word and a line's end each
    assert len(text) == 57 * 2 + 3
    assert set(text.tolist()) == {1, 2, 3}


def test_the_rate_rises_and_falls_to_a_tenth():
    rates = [rate(step, 930) for step in range(930)]
    assert max(rates) == rates[89] == 1.0
    assert rates[0] == pytest.approx(1 / 90)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)


def test_recorded_cells_are_not_measured_again():
    first, *others = METHODS
    known = [{"method": first, "seed": 1}]
    assert [*missing(METHODS, known)] == [(first, 2), *((each, 1) for each in others)]


def test_a_table_compares_with_16_bits(tmp_path):
    assert measured_tables.of_gpt2(tmp_path) == "Not measured yet."
    common = {"seed": 1, "steps": 930, "tokens": 65536, "bits": 4.25, "ms": 700.0, "host_ms": 80.0,
              "device": "a GPU", "words": 10**7, "date": "2026-01-01"}  # fmt: skip
    cells = [{"method": METHODS[0], "loss": 4.0}, {"method": METHODS[1], "loss": 4.02}]
    lines = "\n".join(json.dumps(common | each) for each in cells)
    (tmp_path / "gpt2_losses.jsonl").write_text(lines)
    table = measured_tables.of_gpt2(tmp_path)
    assert "| `wrap:int4_group:ranks=2` | 1 | 4.020 | +0.50% | 4.25 | 700 | 80 |" in table
