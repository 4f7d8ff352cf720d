"""Sites of test_torchft.py."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch import nn

import hipress
from hipress import compat
from hipress.errors import HipressError
from hipress.outer import torchft_members
from tests.hipress.common import data, digest, make, raised_by
from tests.patience import HANG, SILENCE


class FakeManager:
    """The same sites, always, as a torchft.Manager of either kind tells them. refused: the step
    that it does not commit."""

    def __init__(self, rank, nightly, refused=3, sites=2):
        self.rank, self.nightly, self.steps, self.refused = rank, nightly, 0, refused
        self.sites = sites
        self.store, self._pg, self.errors = compat.job_store(), SimpleNamespace(), []
        self.configured = False

    def start_quorum(self):
        if self.configured:
            return
        self.configured = True
        store = compat.another_client(self.store)
        if self.nightly:
            store.set(f"handle {self.rank}", self._pg.get_reconfigure_handle())
            handles = [store.get(f"handle {rank}").decode() for rank in range(self.sites)]
            self._pg.reconfigure(SimpleNamespace(uuid="quorum", handles=handles))
        else:
            address = compat.store_address(self.store)
            self._pg.configure(f"{address}/torchft/1/0", "site", self.rank, self.sites, 0, 1, [])

    def wait_quorum(self):
        pass

    def report_error(self, error):
        self.errors.append(error)

    def should_commit(self):
        self.steps += 1
        return self.steps != self.refused and not self.errors

    def shutdown(self, wait):
        pass


def train(outer, model, optimizer, rank, rounds, act=lambda: None):
    seen, number = {}, 0
    while outer.rounds < rounds:
        x, y = data(rank, number)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        outer.step()
        seen[outer.rounds] = digest(
            nn.ParameterList([nn.Parameter(outer.site.fragments[0].agreed)])
        )
        number += 1
        act()
    return seen


def faked(rank, world_size, nightly, refusing):
    """Rounds by a fake of torchft, one of which the managers of some sites do not commit."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    manager = FakeManager(rank, nightly, refused=3 if rank in refusing else 0)
    members = hipress.TorchftMembers(manager, patience=SILENCE)
    outer = hipress.Outer(model, optimizer, "onebit_group", every=2, members=members)
    seen = train(outer, model, optimizer, rank, 4)
    return seen, outer.site.undone


def ends_first(rank, world_size):
    """The first site, which keeps the quorum's store, ends as soon as it may, while the second has
    yet to learn how their last round ended. Digests of agreed weights by round, by site."""
    store, decide, loops, waited = compat.job_store(), torchft_members.decide, [], []

    def late(call, *arguments):
        def patient(asked):
            answer = call(asked)  # first, that this site has the average
            if rank == 1 and loops and loops[0].rounds == 1 and not waited:
                waited.append(True)
                store.wait(["ended"])
            return answer

        return decide(patient, *arguments)

    torchft_members.decide = late
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    members = hipress.TorchftMembers(FakeManager(rank, True, refused=0))
    loops.append(hipress.Outer(model, optimizer, "onebit_group", every=2, members=members))
    seen = train(loops[0], model, optimizer, rank, 2)
    if rank == 0:
        loops.clear()
        del members
        gc.collect()
        store.set("ended", "")
    return seen


def keeper_dies(rank, world_size):
    """The first site, which keeps the quorum's store, is killed when the second has read there that
    their round went well, and the third has yet to. The outcome of the round, by site."""
    store, decide = compat.job_store(), torchft_members.decide

    def late(call, *arguments):
        def patient(asked):
            answer = call(asked)  # first, that this site has the average
            if rank == 2:
                store.wait(["killed"])
                with suppress(HipressError):
                    while True:
                        call(lambda quorum: quorum.check(["the end of its store"]))
            return answer

        return decide(patient, *arguments)

    torchft_members.decide = late
    members = hipress.TorchftMembers(FakeManager(rank, True, refused=0, sites=3))
    members.meet(leaving=False).require_equal({})
    store.set(f"process {rank}", str(os.getpid()))
    agreed = members.commit(None)
    if rank == 0:
        store.wait(["never"])
    if rank == 1:
        os.kill(int(store.get("process 0")), signal.SIGKILL)
        store.set("killed", "")
        store.wait(["the third site has ended"])
    store.set("the third site has ended", "")
    return agreed


def keeper_dies_untold(rank, world_size):
    """The first site, which keeps the quorum's store, is killed before it says there that it has
    the round's average, as the others have. The outcome of the round, by site."""
    store, decide = compat.job_store(), torchft_members.decide

    def late(call, *arguments):
        def patient(asked):
            answer = call(asked)  # first, that this site has the average
            store.set(f"site {rank} has it", "")
            store.wait(["killed"])
            return answer

        return decide(patient, *arguments)

    torchft_members.decide = late
    members = hipress.TorchftMembers(FakeManager(rank, True, refused=0, sites=3))
    members.meet(leaving=False).require_equal({})
    if rank == 0:
        store.wait(["site 1 has it", "site 2 has it"])
        store.set("killed", "")
        os.kill(os.getpid(), signal.SIGKILL)
    agreed = members.commit(None)
    store.add("over", 1)
    while store.add("over", 0) < 2:  # one that ended would not be asked
        time.sleep(0.05)
    return agreed


def keeper_stops(rank, world_size):
    """The first site, which keeps the quorum's store, is stopped while the second asks there how
    their round ended, and goes on when that one has given up; only then the others have the round's
    average. The outcome of the round, by site; the second's error."""
    store, decide = compat.job_store(), torchft_members.decide
    patience = SILENCE if rank == 1 else HANG
    members = hipress.TorchftMembers(FakeManager(rank, True, refused=0, sites=3), patience=patience)

    def stopping(call, *arguments):
        def asks(asked):
            answer = call(asked)  # first, that this site has the average
            os.kill(keeper, signal.SIGSTOP)
            return answer

        return decide(asks, *arguments)

    members.meet(leaving=False).require_equal({})
    store.set(f"process {rank}", str(os.getpid()))
    keeper = int(store.get("process 0"))
    if rank != 1:
        store.wait(["given up"])
        return members.commit(None)
    torchft_members.decide = stopping
    try:
        return raised_by(members.commit, None)
    finally:
        os.kill(keeper, signal.SIGCONT)
        store.set("given up", "")


def managed(rank, address, seconds=60.0):
    """Members of a site, by a manager of torchft."""
    from torchft import Manager, ProcessGroupGloo

    own = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wait = timedelta(seconds=seconds)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict,
        min_replica_size=1, use_async_quorum=False, replica_id=f"site{rank}",
        lighthouse_addr=address, store_addr="127.0.0.1", store_port=own.port, rank=0, world_size=1,
        timeout=wait, quorum_timeout=wait, connect_timeout=wait,
    )  # fmt: skip
    manager.own_store = own  # lives as long
    return hipress.TorchftMembers(manager)


def real(rank, world_size, address, other=False):
    """Three sites of torchft, of which the last comes later, and the second is killed. Digests of
    agreed weights by round, and numbers of sites. other: the last has another model, which is the
    error that it returns, and nobody is killed."""
    store = compat.job_store()
    if rank == 2:
        store.wait(["two rounds"])
    members = managed(rank, address)
    if rank == 2:
        store.set("third", "")
    model, sites = nn.Linear(7, 3) if other and rank == 2 else make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if other and rank == 2:
        return raised_by(hipress.Outer, model, optimizer, "onebit_group", every=2, members=members)
    outer = hipress.Outer(model, optimizer, "onebit_group", every=2, members=members)

    def act():
        sites.append(hipress.report(outer).sites)
        if outer.rounds == 2 and rank < 2:
            store.set("two rounds", "")
            store.wait(["third"])  # it is known to the lighthouse
        if rank == 1 and 3 in sites and not other:
            os.kill(os.getpid(), signal.SIGKILL)

    seen = train(outer, model, optimizer, rank, 12, act)
    return seen, sites, outer.site.undone


def leaves(rank, world_size, nightly):
    """The second site leaves after two rounds: what it had not delivered, and what the first has
    taken over."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    members = hipress.TorchftMembers(FakeManager(rank, nightly, refused=0))
    outer = hipress.Outer(model, optimizer, "onebit_group", every=2, members=members)
    if rank == 1:
        train(outer, model, optimizer, rank, 2)
        debts, left = [], outer.site.left
        outer.site.left = lambda *args, **how: debts.append(left(*args, **how)) or debts[-1].clone()
        outer.leave()
        return [each.tolist() for each in debts], outer.rounds
    taken, (fragment,) = [], outer.site.fragments
    owe = fragment.keep_undelivered

    def take(values, *part):  # a part is what its own codec held back
        taken.extend([] if part else [values.tolist()])
        owe(values, *part)

    fragment.keep_undelivered = take
    train(outer, model, optimizer, rank, 4)
    return taken, outer.rounds


def lost_lighthouse(rank, world_size):
    """The error of a site whose lighthouse does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # it accepts, and says nothing
        members = managed(rank, f"http://127.0.0.1:{nobody.getsockname()[1]}", SILENCE)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        return raised_by(hipress.Outer, model, optimizer, members=members)
