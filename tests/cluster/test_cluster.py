"""Ranks started by a scheduler: variables, the first rank's address, and a run over hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hipress.tools.bench.started import Cluster, Started, master
from hipress.tools.results import Results
from hipress.tools.run import netns

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "environment, started",
    [
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
            Started("environment variables", 3, 4, 1),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            Started("Slurm", 0, 2, 0),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            Started("Open MPI", 1, 2, 0),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "8"}, Started("MPI", 1, 8, 0)),
    ],
)
def test_launchers_are_recognized_by_their_environment(environment, started):
    assert Started.read(environment) == started


def test_torchrun_within_slurm_is_torchrun():
    both = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    both |= {"TORCHELASTIC_RUN_ID": "none"}
    assert Started.read(both).by == "torchrun"


def test_a_process_that_nobody_started_is_told_how():
    assert not Started.there({})
    with pytest.raises(ValueError, match="torchrun --nnodes 2"):
        Started.read({})


@pytest.mark.parametrize(
    "environment, host",
    [
        ({"MASTER_ADDR": "10.0.0.7", "SLURM_STEP_NODELIST": "a"}, "10.0.0.7"),
        ({"SLURM_STEP_NODELIST": "node[03-07,12]"}, "node03"),
        ({"SLURM_JOB_NODELIST": "alpha,beta"}, "alpha"),
        ({"SLURM_JOB_NODELIST": "gpu-[1,3]"}, "gpu-1"),
    ],
)
def test_the_first_ranks_host_is_found(environment, host):
    assert master(environment) == host


@pytest.mark.parametrize(
    "names, ranks",
    [("aabb", 2), ("aaaa", 4), ("ab", 1), ("abab", 1), ("aab", 1), ("abb", 1), ("aabbaa", 1)],
)
def test_ranks_of_a_host_form_shards_if_hosts_are_alike(names, ranks):
    cluster = Cluster({"RANK": "0", "WORLD_SIZE": str(len(names)), "MASTER_ADDR": "a"})
    cluster._names, cluster.hosts = [*names], len({*names})
    assert cluster.per_host == ranks


def test_a_first_rank_that_nothing_names():
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        master({})


def check(folder: Path, hosts: str) -> None:
    """The files have real ranks, a probed link, and results of both methods."""
    found = Results.read(folder / "bench.json")
    (report,) = found.reports
    assert report.place == f"2 real ranks on {hosts}, started by torchrun"
    assert (report.hosts, report.rate) == (2, "as it is")
    assert [each.error for each in report.results] == [None, None]
    assert report.results[1].identical is True
    assert found.profile is not None
    assert (folder / "bench.html").exists()


WHAT = ("bench", "--methods", "none,hipress:int4_group", "--steps", "4", "--rounds", "1")


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*torchrun, "hipress.tools.cli", *WHAT, "--output", str(tmp_path)],
        cwd=ROOT, env=environment, check=True, timeout=280,
    )  # fmt: skip
    check(tmp_path, "1 host")


@pytest.mark.slow
@pytest.mark.network
def test_under_torchrun_over_emulated_hosts(tmp_path):
    """A torchrun on each host, as on a cluster; its store is on the first."""
    if (why := netns.unavailable()) is not None:
        pytest.skip(why)
    with netns.Network(2, "1gbit") as network:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": network.interface,
        }
        there = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", network.address(0))
        children = [
            network.start(
                rank,
                [sys.executable, "-m", "torch.distributed.run", *there, "--master-port", "29511",
                 "--node-rank", str(rank), "-m", "hipress.tools.cli", *WHAT,
                 "--output", str(tmp_path)],
                env=environment,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            statuses = [child.wait(timeout=250) for child in children]
        finally:
            for child in children:
                child.kill()
    assert statuses == [0, 0]
    check(tmp_path, "1 host")
