"""The tables of bench.policies."""

from bench import policies
from bench.policies import Run


def test_costs_and_which_ratio_when():
    shares = [(0, {"": 0.001, "0.1": 0.9}), (66, {"": 0.001, "0.01": 0.9})]
    runs = [
        Run(
            method,
            seed,
            0.1 * seed,
            0.98,
            20.0,
            3e6,
            shares if method == "accordion" else [(0, {})],
        )
        for method in policies.METHODS
        for seed in (1, 2)
    ]
    text = policies.text(runs)
    assert "| DDP fp32 | 0.150 | 98.0% | 3.0 | 20.0 |" in text
    assert "| `Accordion`, 0.1 | 90% | 0% | 0% | 0% | 0% | 0% |" in text
    assert "| `Accordion`, 0.01 | 0% | 90% | 90% | 90% | 90% | 90% |" in text
    assert "`Accordion`, 0.001" not in text
    assert "`Accordion`, uncompressed" not in text
