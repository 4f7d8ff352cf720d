"""Ranks that disagree, die or diverge: every rank raises an error, in time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.futures import Future

from casync.errors import TransportError
from hipress.channel import failures, futures
from hipress.errors import RankLost
from hipress.ranks.stop import Stop
from tests.hipress import failure_ranks
from tests.hipress.launch import launch
from tests.patience import HANG, SILENCE


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree(world_size):
    results = launch(failure_ranks.mismatches, world_size)
    last = world_size - 1
    for rank, found in enumerate(results):
        for title, both in {
            "codec": ("int8_fake", f"rank {last}: half_fake"),
            "strategy": ("strategy: rank 0: ps", f"rank {last}: ring"),
            "seed": ("seed: rank 0: 0", f"rank {last}: 1"),
            "format": ("payload format: rank 0: 1", f"rank {last}: 2"),
            "exclude": ("exclude", f"rank {last}: last.*"),
            "ddp_value": ("ddp_kwargs: rank 0: {'bucket_cap_mb': '1'", f"rank {last}: {{"),
            "residual_by_name": (
                "compressor: rank 0: topk(ratio=0.01),",
                f"rank {last}: topk(ratio=0.01, residual='bfloat16')",
            ),
            "residual": (
                "compressor: rank 0: topk(ratio=0.01),",
                f"rank {last}: topk(ratio=0.01, residual='bfloat16')",
            ),
            "ratio": ("rank 0: topk(ratio=0.01),", f"rank {last}: topk(ratio=0.25)"),
            "spec": ("compressor 'd.yaml' differs between ranks 0 and", f"and {last} (digests "),
            "layout": ("weight 8x3x3x3 float32, rank", "float32 strides (27, 1, 9, 3)"),
            "frozen": ("buffers, entry 0: rank 0: 0.weight 3x3 float32", "0.weight 4x3 float32"),
            "buffer": ("1.running_mean 3 float32", "1.running_mean 4 float32"),
            "shape": ("second.weight 301x131", f"rank {last}: second.weight 302x131"),
        }.items():
            kind, message, seconds = found[title]
            assert kind == "ConfigMismatch"
            assert seconds < HANG
            for part in both:
                assert part in message
        for title in ("alike", "order", "path", "path_object", "numpy", "written"):
            assert found[title][:2] == ("none", "")
        kind, message, _ = found["broken"]
        assert kind == ("ConfigError" if rank == last else "ConfigMismatch")
        assert "'typo*' matches no parameter" in message
        kind, message, _ = found["scope"]
        assert kind == ("ConfigError" if rank == last else "ConfigMismatch")
        assert "did you mean 'tensor'" in message
        for title, told in {
            "exclude_type": "exclude=3: pass a pattern of parameter names",
            "model": "the model must be a torch.nn.Module, got 'x'",
            "ddp_kwargs": "did you mean 'bucket_cap_mb'",
            "mixed": "use torch.autocast instead",
            "ddp_kwargs_type": "ddp_kwargs=3: pass a dict",
            "target": "'target' is no parameter of a spec",
        }.items():
            kind, message, seconds = found[title]
            assert kind == ("ConfigError" if rank == last else "ConfigMismatch")
            assert seconds < HANG
            assert told in message
            if rank != last:
                assert f"rank {rank} stops, because rank {last} failed: " in message
        if rank != last:
            kind, message, seconds = found["absent"]
            assert kind == "AgreementTimeout"
            assert f"for rank {last} of {world_size}" in message
            assert SILENCE <= seconds < HANG


def test_a_native_reduce_to_which_a_rank_that_ended_owes_is_given_up(monkeypatch):
    """20 s after its end was seen, not earlier, since bytes may come through other ranks; not at
    all if the rank turns out to be alive."""
    now, gone, seen = 100.0, Stop("RankLost", "rank 1 ended"), []
    coordinator = SimpleNamespace(ranks=(0, 1), rank=0, gone=lambda: seen[-1])
    monkeypatch.setattr(failures.time, "monotonic", lambda: now)
    monkeypatch.setattr(futures, "POLL_SECONDS", 0.01)
    found = failures.Failures(coordinator, 1800.0)
    for at, told in ((0, None), (1, gone), (20, gone), (21, None), (22, gone), (41, gone)):
        now = 100.0 + at
        seen.append(told)
        found.refuse_gone()
    now += 2.0
    with pytest.raises(TransportError, match="rank 0: rank 1 ended, and this rank waits for its"):
        futures.wait_within(Future(), None, found.refuse_gone)


def test_a_rank_that_may_have_had_fewer_batches_is_told_with_the_remedy():
    for told, noted in (("rank 1 ended during step 3\nbroken", True), ("rank 1 failed", False)):
        coordinator = SimpleNamespace(
            ranks=(0, 1), rank=0, named=lambda error, what, told=told: RankLost(told)
        )
        error = failures.Failures(coordinator, 1.0).explain(TransportError("broken"), 3)
        assert ("model.join()" in "".join(getattr(error, "__notes__", ()))) == noted


@pytest.mark.slow
def test_a_rank_that_compares_no_hashes():
    *waiting, _ = launch(failure_ranks.silent_hashes, 3)
    for kind, message, seconds in waiting:
        assert kind in ("AgreementTimeout", "RankLost")
        assert message.startswith("no word from rank 2 during step 0: stopped, cut off or ended\n")
        assert "verify's exchange of hashes" in message
        assert seconds < HANG / 2


@pytest.mark.slow
def test_a_failed_step_keeps_no_module():
    """Its error once kept the frames of the training loop: module, threads and connections stayed,
    once for each time that a process wrapped its model again."""
    (first, second), _ = launch(failure_ranks.restore, 2)
    assert first == "AgreementTimeout"
    assert second != "none"


def test_ranks_that_diverge():
    for kind, message in launch(failure_ranks.diverging, 2):
        assert kind == "DivergenceError"
        assert "ranks 0 and 1 hold different averages" in message


def test_a_message_that_is_damaged_on_its_way():
    """The receiving rank reports it; the sender learns that the connection was closed."""
    (kind, message, _), (other, _, _) = launch(failure_ranks.damaged, 2)
    assert kind == "SyncError"
    assert message.startswith("step 1 failed: rank 0, peer 1, task `recv rank=0 part=")
    assert "damaged" in message
    assert other == "RankLost"


def test_a_rank_that_skips_an_optimizers_step():
    for kind, message in launch(failure_ranks.skipped, 3):
        assert kind == "DivergenceError"
        assert message.startswith("step 1: rank 1 holds other parameters of '")


def test_an_optimizer_that_raises_on_one_rank():
    """Its program goes on: the next step fails on all ranks, with the reason."""
    results = launch(failure_ranks.optimizer_raises, 3, (1,))
    why = "the step of Raising before step 2 raised an error, or was interrupted, on rank 1"
    for rank, found in enumerate(results):
        assert [kind for kind, _ in found[:2]] == ["none", "none"]
        kind, message = found[2]
        assert kind == ("SyncError" if rank == 1 else "RankLost")
        told = "" if rank == 1 else "rank 1 failed during step 2: SyncError: "
        assert message.startswith(f"{told}{why} and not on rank 0, 2: their parameters differ")
        assert found[3][0] != "none"


def test_an_optimizer_that_raises_on_all_ranks():
    for found in launch(failure_ranks.optimizer_raises, 2, (0, 1)):
        assert [kind for kind, _ in found] == ["none"] * 4


def test_backward_passes_in_an_optimizers_step():
    (steps, one), (_, other) = launch(failure_ranks.closures, 2)
    assert steps > 2
    assert one == other


def test_a_rank_that_gives_up_tells_for_whom_it_waited():
    """The later one of two that wait for a third hears of the first, and of the third."""
    error = RuntimeError("gloo: Timed out waiting 10000ms for recv operation to complete")
    error.add_note("no word from rank 0 during the program: stopped, cut off or ended")
    told = Stop.of(error, 2).told(" during the program")
    assert told.startswith("rank 2 failed during the program: RuntimeError: gloo: Timed out")
    assert told.endswith("\nno word from rank 0 during the program: stopped, cut off or ended")
