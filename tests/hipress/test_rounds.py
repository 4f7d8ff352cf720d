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
    "powersgd": {
        "rank 2": ({"rank": 2}, {}),
        "rank 4, rebuilt buckets": ({"rank": 4}, common.SMALL_BUCKETS),
        "everything": ({"rank": 1, "min_size": 0}, common.SMALL_BUCKETS),
        "bucket scope": ({"rank": 2, "scope": "bucket"}, common.SMALL_BUCKETS),
    },
    "atomo": {
        "owners": ({"rank": 8, "strategy": "ps"}, {}),
        "all-gather": ({"rank": 4, "columns": 8, "strategy": "exchange"}, common.SMALL_BUCKETS),
    },
}


#: by method, bounds of the last loss by the first one, and of bytes by DDP's. Four ranks that
#: gather all of atomo send as many.
BOUNDS = {"randomk": (0.5, 0.6), "thc": (0.5, 0.6), "powersgd": (0.3, 0.2), "atomo": (0.5, 1.1)}


@pytest.mark.parametrize("name", first_fast(["thc", "randomk", "powersgd", "atomo"]))
@pytest.mark.parametrize("world_size", first_fast([2, 4]))
def test_training_follows_plain_ddp(name, world_size):
    results = launch(rounds_ranks.in_rounds, world_size, name, CASES[name])
    loss, sent = BOUNDS[name]
    for title, (options, _) in CASES[name].items():
        found = [result[title] for result in results]
        assert len({each["digest"] for each in found}) == 1, title
        for each in found:
            assert each["losses"][-1] < loss * each["losses"][0], title
            assert each["difference"] < 0.5 or name != "powersgd", title
        made = next(d for d in found[0]["decisions"] if d["name"] == "second.weight")
        assert made["codec"].startswith(name)
        assert made["strategy"] == options.get("strategy", "allreduce")
        measured = found[0]["measured"]
        assert measured["wire_bytes"] < sent * measured["ddp_wire_bytes"], title
