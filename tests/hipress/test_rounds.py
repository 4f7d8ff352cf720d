"""Methods computed an array at a time, on real processes over gloo; most payloads add up."""

from __future__ import annotations

import pytest

from tests.hipress import common, rounds_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast

CASES = {
    "randomk": {
        "a tenth": ({"ratio": 0.1}, {}),
        "rebuilt buckets, everything": ({"ratio": 0.2, "min_size": 0}, common.SMALL_BUCKETS),
        "bucket scope": ({"ratio": 0.1, "scope": "bucket"}, common.SMALL_BUCKETS),
        "without feedback": ({"ratio": 0.5, "residual": False}, {}),
    },
    "thc": {
        "four bits": ({"bits": 4}, {}),
        "two bits, rebuilt buckets, everything": ({"bits": 2, "min_size": 0}, common.SMALL_BUCKETS),
        "bucket scope": ({"scope": "bucket"}, common.SMALL_BUCKETS),
        "without feedback": ({"clipped": 0.0, "residual": False, "block": 64}, {}),
    },
}


@pytest.mark.parametrize("name", first_fast(sorted(CASES, reverse=True)))
@pytest.mark.parametrize("world_size", first_fast([2, 4]))
def test_training_follows_plain_ddp(name, world_size):
    results = launch(rounds_ranks.in_rounds, world_size, name, CASES[name])
    for title in CASES[name]:
        found = [result[title] for result in results]
        assert len({each["digest"] for each in found}) == 1, title
        for each in found:
            assert each["losses"][-1] < 0.5 * each["losses"][0], title
        whys = {d["name"]: d for d in found[0]["decisions"]}
        assert whys["second.weight"]["codec"] == name
        assert whys["second.weight"]["strategy"] == "allreduce"
        measured = found[0]["measured"]
        assert measured["wire_bytes"] < 0.6 * measured["ddp_wire_bytes"], title


SPECTRAL = {
    "owners": ({"rank": 8, "strategy": "ps"}, {}),
    "all-gather, narrow": (
        {"rank": 4, "columns": 8, "strategy": "exchange"},
        common.SMALL_BUCKETS,
    ),
}


@pytest.mark.slow
def test_singular_vectors_need_no_rounds():
    results = launch(rounds_ranks.in_rounds, 2, "atomo", SPECTRAL)
    for title, (options, _) in SPECTRAL.items():
        found = [result[title] for result in results]
        assert len({each["digest"] for each in found}) == 1, title
        for each in found:
            assert each["losses"][-1] < 0.5 * each["losses"][0], title
        whys = {d["name"]: d for d in found[0]["decisions"]}
        assert whys["second.weight"]["codec"] == "atomo"
        assert whys["second.weight"]["strategy"] == options["strategy"]


@pytest.mark.parametrize("name", CASES)
def test_infinity_reaches_all_ranks(name):
    results = launch(common.infinity, 2, name)
    assert len({digest for *_, digest in results}) == 1
    for infected, clean, skipped, losses, _ in results:
        assert all(infected)
        assert clean
        assert skipped == [True, False]
        assert losses[-1] < 20
