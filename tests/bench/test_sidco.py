"""The study of threshold estimators, at a small size."""

import json

from bench import sidco


def test_the_study_writes_its_results(tmp_path, capsys):
    sidco.main(steps=4, width=8, vocabulary=100, output=tmp_path)
    held = json.loads((tmp_path / "sidco.json").read_text())
    assert held["about"]["command"].startswith("python -m bench.sidco")
    assert set(held["rows"]) == {"0.1", "0.01", "0.001"}
    for row in held["rows"].values():
        assert set(row) == set(sidco.ESTIMATORS)
        assert all(0 <= c["low"] <= c["high"] for c in row.values())
    # DGC takes its threshold from the largest of a sample, and corrects it.
    assert 0.5 < held["rows"]["0.1"]["DGC"]["mean"] < 1.5
    assert (tmp_path / "sidco.png").stat().st_size > 1000
    assert "GaussianK" in capsys.readouterr().out
