"""Lifecycle: a single rank, import, interpreter exit, threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import hipress
from tests.hipress import common, lifecycle_ranks
from tests.hipress.fakes import Int8
from tests.hipress.launch import launch
from tests.patience import HANG

HEAVY = {
    "compll",
    "llvmlite",
    "networkx",
    "matplotlib",
    "jinja2",
    "typer",
    "rich",
    "yaml",
    "scipy",
    "sympy",
}

EXIT = """
import sys, torch, torch.distributed as dist, hipress
from tests.hipress import common, lifecycle_ranks
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
codec = common.codec("int8") if sys.argv[4] == "int8" else sys.argv[4]
ddp = hipress.wrap(common.make(), codec, verify=True)
common.train(ddp, rank, range(2))
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
compilers = ("compll.backends.cpu.printer", "scipy")
print("trained", [name for name in compilers if name in sys.modules], flush=True)
"""


LIGHT = f"""
import sys, torch
before = set(sys.modules)
import hipress
print(*sorted({HEAVY!r} & (sys.modules.keys() - before)))
"""


def test_import_is_light():
    assert subprocess.check_output([sys.executable, "-c", LIGHT], text=True).strip() == ""


def trained(*arguments):
    """Outputs of two ranks that ran EXIT."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=HANG)
            assert process.returncode == 0, output
            found.append(output)
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.slow  # two processes, for each of which torch is imported anew
@pytest.mark.parametrize("ending", ["leave", "destroy"])
def test_interpreter_exits(ending, tmp_path):
    for output in trained(str(tmp_path / "store"), ending, "int8"):
        assert "trained []" in output


@pytest.mark.slow
def test_training_with_cached_kernels_compiles_nothing(tmp_path):
    outputs = trained(str(tmp_path / "first"), "destroy", "onebit")
    if not all("trained []" in output for output in outputs):  # the first run of all
        outputs = trained(str(tmp_path / "second"), "destroy", "onebit")
    assert all("trained []" in output for output in outputs)


def test_a_model_may_be_collected_by_its_own_thread():
    """The thread waited for itself, and what was to be closed after that stayed open."""
    for found, errors, left in launch(lifecycle_ranks.collected_by_its_own_thread, 2):
        assert found == ["hipress-verify"]
        assert errors == left == []


def test_forked_children_touch_nothing():
    """DataLoader workers that collected a dead module once aborted; a child that trained hung."""
    results = launch(lifecycle_ranks.forked, 2)
    for rank, (status, (kind, message), _) in enumerate(results):
        assert status == 0
        assert kind == "SyncError"
        assert message.startswith(f"rank {rank}: process ")
        assert "is a fork of" in message
    assert results[0][2] == results[1][2]


def test_parameters_frozen_or_freed_after_ddp_was_made():
    (planned, first), (_, second) = launch(lifecycle_ranks.frozen, 2)
    layers = [f"{i}.{kind}" for i in (0, 2, 3) for kind in ("weight", "bias")]
    assert planned == [layers] * 3
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_parameters_in_buckets_are_told_without_memory():
    """torch makes zeros in place of all gradients for it."""
    assert launch(lifecycle_ranks.known, 1) == [(2, 0)]


def test_a_parameter_that_is_freed_later_is_told():
    """Ranks once trained it each by itself, without a word, as with DDP."""
    for kind, message in launch(lifecycle_ranks.freed, 2):
        assert kind == "SyncError"
        assert "'1.weight' was frozen when hipress took the model" in message


def test_copies_and_pickles_of_a_wrapped_module():
    (digests, steps), (others, _) = launch(lifecycle_ranks.copied, 2)
    assert digests == others
    assert digests[1] == digests[2] != digests[0]
    assert steps == 2


def test_queries_without_torch_distributed():
    assert launch(lifecycle_ranks.shut_down, 2) == [((rank, 2, 2), rank) for rank in range(2)]


def test_one_rank():
    ((losses, reducer, taken, twice),) = launch(lifecycle_ranks.alone, 1)
    hooked, bare, wrapped, compiled, *nested = taken
    assert losses[-1] < losses[0]
    assert reducer[0] == hooked[0] == bare[0] == wrapped[0] == "ConfigError"
    assert "python_reducer" in reducer[1]
    assert "allreduce_hook" in hooked[1]
    assert "expected a DistributedDataParallel" in bare[1]
    assert "pass it to hipress.attach instead" in wrapped[1]
    assert compiled == wrapped
    assert nested[0][0] == "ConfigError"
    assert "'0' in the Sequential is a DistributedDataParallel itself" in nested[0][1]
    assert [kind for kind, _ in nested[1:]] == ["none", "none"]
    whole, part, both = twice
    assert {kind for kind, _ in twice} == {"ConfigError"}
    assert "attached to this module already: train it as it is" in whole[1]
    assert "the model is '0.second' of a module that hipress is attached to" in part[1]
    assert "which averages its 'weight' already; hipress.detach that module" in part[1]
    assert "'module' in the DistributedDataParallel is a DistributedDataParallel" in both[1]
    assert "averages its 'scale' already; put its .module there" in both[1]


def test_without_process_group():
    with pytest.raises(hipress.ConfigError, match="init_process_group"):
        hipress.wrap(common.make(), Int8())
