"""hipress's own connections."""

import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from casync.topology import Topology
from hipress import compat
from hipress.choose.planner import Planner
from hipress.choose.rules import NO_RULES
from hipress.errors import AgreementTimeout, ConfigMismatch, HipressError
from hipress.model.devices import ON_HOST
from hipress.options import Options
from hipress.ranks import coordinator as coordinators
from hipress.ranks import groups
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import connect
from tests.hipress.launch import launch
from tests.patience import HANG


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(coordinators, "SKEW_SECONDS", 0.05)
    monkeypatch.setattr(coordinators, "DONE_SECONDS", 0.05)


def test_a_connection_that_cannot_be_made_names_the_ranks(monkeypatch):
    def fail(*_):
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(dist, "ProcessGroupGloo", fail)
    coordinator = Coordinator.on(dist.HashStore(), 1, (3, 5), "here", HANG)
    told = r"^no word from rank 3 .*\nrank 5: connecting ranks \(3, 5\) for it failed: Connection"
    with pytest.raises(HipressError, match=told):
        connect(coordinator, "it")


@pytest.mark.parametrize("address, interface, hint", [
    ("127.0.1.1", None, True), ("127.0.1.1", "eth0", False), ("10.1.2.3", None, False),
])  # fmt: skip
def test_gloo_on_an_address_of_this_machine_alone_is_told(address, interface, hint, monkeypatch):
    """Debian's installer, for example, writes the machine's name to /etc/hosts."""

    def fail(*_):
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(dist, "ProcessGroupGloo", fail)
    monkeypatch.setattr(groups.socket, "gethostbyname", lambda _: address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    coordinator = Coordinator.on(dist.HashStore(), 1, (3, 5), "here", HANG)
    with pytest.raises(HipressError) as told:
        connect(coordinator, "it")
    assert ("set GLOO_SOCKET_IFNAME to the interface that joins them" in str(told.value)) == hint


@pytest.mark.slow
def test_connecting_takes_no_longer_than_the_time_out(monkeypatch):
    """Gloo tries five times as long, and longer if the job's store is silent. One rank is connected
    early, as gloo connects pairs one by one, and waits for the others."""
    released = threading.Event()
    monkeypatch.setattr(
        dist, "ProcessGroupGloo", lambda _, rank, *__: released if rank == 3 else released.wait()
    )
    store, found = dist.HashStore(), []
    *waiting, connected = [
        Coordinator.on(store, rank, (3, 5, 8, 9), "here", 2) for rank in (0, 1, 3)
    ]
    connected = replace(connected, timeout=HANG)

    def wait_in_vain(coordinator):
        with pytest.raises(AgreementTimeout) as error:
            connect(coordinator, "it")
        found.append(str(error.value))

    monkeypatch.setattr(coordinators, "SKEW_SECONDS", 1.0)  # both name the one that is silent
    threads = [threading.Thread(target=wait_in_vain, args=(each,)) for each in waiting]
    late = threading.Thread(target=wait_in_vain, args=(connected,))
    for thread in (late, *threads):
        thread.start()
    for thread in threads:
        thread.join(HANG)
    released.set()
    waiting[0].fail(AgreementTimeout("no word from rank 8"))
    late.join(HANG)
    assert "no word from rank 8" in found.pop()
    assert len(found) == 2
    for told in found:
        assert "connecting ranks (3, 5, 8, 9) for it took longer than 2 s" in told
        assert told.startswith("no word from rank 8 during")


def test_a_link_that_cannot_be_measured_names_the_rank(monkeypatch):
    def measure_link(*_):
        raise RuntimeError("closed by peer")

    monkeypatch.setattr("hipress.ranks.groups.connect", lambda coordinator, purpose: object())
    monkeypatch.setattr("hipress.choose.probe.measure_link", measure_link)
    coordinator = Coordinator.on(dist.HashStore(), 1, (3, 5), "here", 0.05)
    planner = Planner((), Options(), Topology.flat(2), NO_RULES, coordinator, ON_HOST)
    told = r"^no word from rank 3 .*\nrank 5: measuring the link .*\(3, 5\) failed: closed"
    with pytest.raises(HipressError, match=told):
        planner.plan({})


def test_an_epoch_has_its_own_notes(tmp_path):
    """Ranks that come again to a store, by a new process group, hear nothing of an earlier one."""
    store, again = (dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2))
    ranks = [Coordinator.on(store, rank, (0, 1), "all", HANG) for rank in (0, 1)]
    ranks[0].fail(ValueError("old"))
    with pytest.raises(ConfigMismatch, match="rank 0 failed: ValueError: old"):
        ranks[1].require_equal({})
    first = ranks[0].mailbox.epoch.number
    ranks = [Coordinator.on(again, rank, (0, 1), "all", 0.1) for rank in (0, 1)]
    assert ranks[0].mailbox.epoch.number == ranks[1].mailbox.epoch.number != first
    assert ranks[1].reason() is None
    ranks[0].tell("a step")
    assert ranks[1].silent("a step", time.monotonic()) == []


def test_no_rank_is_connected_before_all_are():
    """It could end its connections at once, and with them another rank's attempt to connect."""
    assert launch(connected_last, 2) == [True, True]


def connected_last(rank, world_size):
    """True if rank 1, which is slow, is connected when this rank goes on."""
    store, make = compat.another_client(compat.job_store()), compat.gloo_group

    def made(*args):
        group = make(*args)
        if rank == 0:
            store.set("first", "")
        else:
            store.wait(["first"])
            for _ in range(100):
                store.check(["first"])
            store.set("last", "")
        return group

    compat.gloo_group = made
    group = connect(coordinators.coordinator(dist.group.WORLD, HANG), "a test")
    return group.size() == world_size and store.check(["last"])
