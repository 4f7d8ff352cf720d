"""Sites of test_members.py, which come and go."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import hipress
from hipress import compat
from hipress.errors import HipressError, SyncError
from hipress.outer.fragments import Fragment
from hipress.outer.meeting import GIVE_TRIES, GIVING
from hipress.outer.rounds import Round
from hipress.ranks.coordinator import Coordinator
from tests.hipress.common import RaisedAfter, data, digest, error_of, make, raised_by
from tests.patience import SILENCE, wait_until

PATIENCE = 60.0


class Site:
    """A site that trains, and what it saw: digests of agreed weights, by round."""

    def __init__(self, number, compressor="onebit_group", patience=PATIENCE, expected=1, **options):
        self.store = compat.another_client(compat.job_store())
        members = hipress.StoreMembers(self.store, expected=expected, patience=patience)
        self.number, self.model = number, options.pop("model", None) or make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.outer = hipress.Outer(
            self.model, self.optimizer, compressor, members=members, **{"every": 2, **options}
        )
        self.seen = {self.outer.rounds: self.agreed()}
        self.losses, self.sites = [], []

    def agreed(self):
        flat = torch.cat([f.agreed for f in self.outer.site.fragments])
        return digest(nn.ParameterList([nn.Parameter(flat)]))

    def step(self, number):
        x, y = data(self.number, number)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.losses.append(float(loss.detach()))
        self.optimizer.step()
        self.outer.step()
        self.seen[self.outer.rounds] = self.agreed()
        self.sites.append(hipress.report(self.outer).sites)

    def until(self, rounds):
        """Train until that many rounds are over."""
        number = 0
        while self.outer.rounds < rounds:
            self.step(number)
            number += 1


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def dies(rank, world_size, compressor, options):
    """The last site is killed as it has sent a part of its third round; rounds of the others."""
    site = Site(rank, compressor, expected=world_size, **options)
    if rank == world_size - 1:
        site.until(2)
        started = Round.start

        def sends(round_):
            started(round_)
            kill()

        Round.start = sends
    site.until(6)
    return site.seen, digest(site.model), site.outer.site.undone, site.sites


def alone(rank, world_size):
    """Two sites, one of which is killed; the other trains on by itself."""
    site = Site(rank, expected=2)
    site.until(2)
    if rank == 1:
        kill()
    site.until(5)
    return site.sites, site.outer.rounds, site.losses


def undo(outer, rounds):
    """Undo the next rounds of a site."""
    members, last = outer.site.members, outer.site.undone + rounds
    commit = members.commit
    members.commit = lambda error: commit(
        error or (SyncError("undone for a test") if outer.site.undone < last else None)
    )


def joins_and_leaves(rank, world_size, failures):
    """The third site comes at round 2 and leaves two rounds later, after some that it undoes; then
    the one that takes over what it has not delivered fails so many times. Digests by round; what it
    had not delivered, and what others have taken over."""
    store = compat.job_store()
    if rank == 2:
        store.wait(["two rounds"])
        site = Site(rank)
        begin = site.outer.rounds
        site.until(begin + 1)
        last = site.outer.site.undone + GIVE_TRIES
        undo(site.outer, GIVE_TRIES)
        while site.outer.site.undone < last:
            site.step(0)
        left, debts = site.outer.site.left, []
        site.outer.site.left = lambda *args, **how: (
            debts.append(left(*args, **how)) or debts[-1].clone()
        )
        site.outer.leave()
        return site.seen, begin, raised_by(site.outer.step), debts[-1].tolist()
    site = Site(rank, expected=2)
    taken, owe, wait_for_all, failed = [], Fragment.keep_undelivered, Coordinator.wait_for_all, []

    def take(self, values, *part):
        if not part:  # else a codec of this site held it back
            taken.append(values.tolist())
        owe(self, values, *part)

    def fail(self, what):
        wait_for_all(self, what)
        if what == GIVING and len(failed) < failures:
            failed.append(True)
            raise HipressError("a failure at the last moment")

    Fragment.keep_undelivered, Coordinator.wait_for_all = take, fail
    site.until(2)
    store.set("two rounds", "")
    while 3 not in site.sites or site.sites[-1] == 3:
        site.until(site.outer.rounds + 1)
    return site.seen, site.sites, taken


def refused(rank, world_size):
    """A site with another model comes to two others: its error, and their rounds."""
    store = compat.job_store()
    if rank == 2:
        store.wait(["two rounds"])
        return raised_by(Site, rank, model=nn.Linear(7, 3))
    site = Site(rank, expected=2)
    site.until(2)
    store.set("two rounds", "")
    while not site.outer.site.undone:
        site.step(0)
    site.until(site.outer.rounds + 2)
    return site.seen, site.outer.site.undone


def diverges(rank, world_size):
    """The last site has a NaN after two rounds: its error; the rounds of the others, and True if
    what they agreed on is finite."""
    site = Site(rank, expected=world_size)
    site.until(2)
    if rank == world_size - 1:
        with torch.no_grad():
            site.model.last.bias[0] = float("nan")
        return raised_by(site.until, 3)
    site.until(5)
    return site.seen, all(f.agreed.isfinite().all() for f in site.outer.site.fragments)


def newcomers(rank, world_size, clip):
    """A site has a round alone; the others come to its second. Agreed weights after that, of a
    site whose weights went down by 1 before each round, and what they are to be."""
    store = compat.job_store()
    if rank:
        store.wait(["a round alone"])
    site = Site(rank, "none", every=1, clip=clip, outer=hipress.OuterSGD(1.0, 0.0))
    if rank == 0:
        (fragment,), begin = site.outer.site.fragments, site.outer.site.fragments[0].agreed.clone()
        for number in range(1, 3):
            fragment.write(begin - number)
            if number == 2:
                store.set("a round alone", "")
                wait_until(lambda: len(site.outer.site.members._come_to(2)[0]) == world_size - 1)
            site.outer.step()
        return (begin - 2).tolist(), fragment.agreed.tolist(), site.outer.report().sites
    return site.outer.site.fragments[0].agreed.tolist()


def slow(rank, world_size):
    """The third site trains no more until the others have had two rounds without it. Digests by
    round, and numbers of sites."""
    store = compat.job_store()
    site = Site(rank, expected=3, patience=SILENCE)
    site.until(2)
    if rank == 2:
        store.wait(["gone on"])
    else:
        site.until(4)
        store.set("gone on", "")
    while site.outer.rounds < 5 or site.sites[-1] < 3:
        site.step(0)
    return site.seen, site.sites


def dropped(rank, world_size):
    """The second site drops its Outer, and the threads of that end. Numbers of sites of the first,
    and the seconds of its next round."""
    store = compat.job_store()
    before = {*threading.enumerate()}
    site = Site(rank, every=1, expected=2)
    site.step(0)
    if rank == 0:
        store.wait(["dropped"])
        start = time.monotonic()
        site.step(1)
        store.set("over", "")
        return site.sites, time.monotonic() - start
    members = site.outer.site.members  # which a caller may keep
    del site
    gc.collect()
    wait_until(lambda: {t.name for t in {*threading.enumerate()} - before} <= {"hipress-door"})
    store.set("dropped", "")
    store.wait(["over"])
    return members.id


def fails_in_a_site(rank, world_size, fault, wrong):
    """The errors of the ranks of a site, one of which is wrong, and lives on."""
    store = compat.another_client(compat.job_store())
    members = hipress.StoreMembers(store, patience=PATIENCE, site=dist.group.WORLD)
    model = make()

    def trains():
        other = make() if fault == "another optimizer" and rank == wrong else model
        optimizer = torch.optim.SGD(other.parameters(), lr=0.02)
        outer = hipress.Outer(model, optimizer, every=1, members=members)
        outer.step()
        if rank == wrong:
            if fault == "an interrupt":
                outer.site.model.snapshot.refuse_changes = interrupt
            with torch.no_grad():
                model.last.bias[0] = float("nan")
        outer.step()

    try:
        return error_of(trains)
    except KeyboardInterrupt:
        return RaisedAfter("KeyboardInterrupt", "", 0.0)


def interrupt(model):
    raise KeyboardInterrupt


def sites_of_two(rank, world_size):
    """Three sites of two ranks, each by wrap within it; the last site is killed."""
    groups = [dist.new_group([2 * site, 2 * site + 1]) for site in range(3)]
    group = groups[rank // 2]
    model = hipress.wrap(make(), "int4_group", process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    store = compat.another_client(compat.job_store())
    members = hipress.StoreMembers(store, expected=3, patience=PATIENCE, site=group)
    outer = hipress.Outer(model, optimizer, "onebit_group", every=2, members=members)
    number = 0
    while outer.rounds < 5:
        x, y = data(rank, number)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        outer.step()
        number += 1
        if outer.rounds == 2 and rank > 3:
            kill()
    return digest(model), hipress.report(outer).sites
