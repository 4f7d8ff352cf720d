"""Four sites that train while others are killed, stopped, leave, come and refuse to commit, and
their store is silent for a while.

python -m tests.hipress.churn 40 60 1          # events, rounds, seed
python -m tests.hipress.churn 0 60 1 0.9       # and outer momentum

[Note: sums] Sites compare what they have delivered by a single number: the sum of all elements,
with signs drawn at random. A `sum` below is such a number.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import hipress
from hipress.errors import SyncError
from tests.hipress.common import data, digest, make
from tests.hipress.launch import CONTEXT
from tests.patience import HANG

SITES = 4
PATIENCE = 5.0  # seconds
EVENTS = ("kill", "stop", "leave", "refuse", "silence")
LAST = 5  # rounds whose losses count
MOMENTUM = 0.5  # of the outer optimizer; with 0.9 losses jump: docs/measurements/regions.md
TOLERANCE = 1e-4  # of a gap of sums, by rounding, which is up to 2e-6
SILENCE = 0.6 * PATIENCE  # of the store
STOP = 1.5 * PATIENCE  # of a site


class Line(NamedTuple):
    """A site after a round."""

    round: int  # rounds that have ended
    agreed: str  # digest of agreed weights
    loss: float  # of its last step
    steps: int  # of its own, so far
    counted: bool  # False for a newcomer's first round: it has sent nothing
    sites: int  # of the round; 0 for a site that has left
    undone: int  # rounds so far
    sent: float  # sum: what its steps have changed so far, less what it has not delivered
    momentum: float  # sum: of the outer optimizer
    left: float  # norm of what it has not delivered, or has handed over


class Event(NamedTuple):
    """Something that happens to a site, or to the store."""

    round: int  # rounds that had ended
    kind: str  # of EVENTS
    site: int


def keep(pipe) -> None:
    """Keep the store; the parent gets its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def site(port: int, number: int, folder: str, seed: int, momentum: float) -> None:
    """Train until the parent says so; a line for each new round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    model, here = make(), Path(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    members = hipress.StoreMembers(store, expected=SITES, patience=PATIENCE)
    commit = members.commit

    def maybe(error):
        asked = here / f"refuse-{number}"
        if asked.exists():
            asked.unlink()
            error = error or SyncError("refused for a test")
        nonlocal in_round
        in_round = commit(error)
        return in_round

    members.commit, in_round = maybe, False
    outer = hipress.Outer(
        model, optimizer, "onebit_group", every=4, members=members,
        outer=hipress.OuterSGD(momentum=momentum),
    )  # fmt: skip
    (fragment,) = outer.site.fragments
    signs = torch.randint(2, (fragment.elements,), generator=torch.Generator().manual_seed(0))
    signs = signs.double().mul_(2).sub_(1)

    def total(values: torch.Tensor) -> float:
        return float(signs @ values.double())

    def tell(counted: bool = True, handed_over: bool = False) -> None:
        left, agreed = outer.site.left(fragment), nn.ParameterList([nn.Parameter(fragment.agreed)])
        line = Line(
            outer.rounds, digest(agreed), loss, step, counted, hipress.report(outer).sites,
            outer.site.undone, moved - (0.0 if handed_over else total(left)),
            total(fragment.momentum),
            float(left.norm()),
        )  # fmt: skip
        with (here / f"site-{number}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    step, moved, loss, known = 0, 0.0, math.nan, outer.rounds
    if in_round:
        tell(counted=False)
    while not (here / "done").exists():
        if (here / f"leave-{number}").exists():
            outer.leave()
            tell(handed_over=True)
            return
        x, y = data(number, 1000 * seed + step)
        optimizer.zero_grad()
        error = nn.functional.mse_loss(model(x), y)
        error.backward()
        before = total(fragment.weights())
        optimizer.step()
        moved += before - total(fragment.weights())
        step, loss = step + 1, float(error.detach())
        outer.step()
        if in_round and outer.rounds != known and not (here / "done").exists():
            known = outer.rounds
            tell()


@dataclass
class Churn:
    """Processes of sites, and what they told."""

    folder: Path
    seed: int  # of data
    momentum: float
    processes: dict[int, object] = field(default_factory=dict)  # of sites that should live
    leaving: list[object] = field(default_factory=list)  # and of those that were asked to leave
    stopped: dict[int, float] = field(default_factory=dict)  # when a process goes on, by its id
    started: int = 0

    def __post_init__(self) -> None:
        self.pipe, there = CONTEXT.Pipe()
        self.keeper = CONTEXT.Process(target=keep, args=(there,))
        self.keeper.start()
        self.port = self.pipe.recv()

    def start(self) -> None:
        args = self.port, self.started, str(self.folder), self.seed, self.momentum
        process = CONTEXT.Process(target=site, args=args)
        process.start()
        self.processes[self.started] = process
        self.started += 1

    def lines(self) -> dict[int, list[Line]]:
        found = {}
        for number in range(self.started):
            path = self.folder / f"site-{number}"
            text = path.read_text() if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]  # a killed site may have written a part
            if whole:
                found[number] = [Line(*json.loads(line)) for line in whole.splitlines()]
        return found

    def rounds(self) -> int:
        return max((lines[-1].round for lines in self.lines().values()), default=0)

    def able(self) -> list[int]:
        """Sites to which something may happen: another one that trains has agreed weights."""
        able = {n for n, process in self.processes.items() if process.pid not in self.stopped}
        knowing = self.lines().keys() & able  # newcomers have nothing to go on from
        return sorted(one for one in able if knowing - {one})

    def act(self, event: str, number: int) -> None:
        process = self.processes[number]
        if event == "stop":
            self.stop(process, STOP)
        elif event == "silence":
            self.stop(self.keeper, SILENCE)
        elif event == "refuse":
            (self.folder / f"refuse-{number}").touch()
        else:
            del self.processes[number]
            if event == "kill":
                process.kill()
                process.join()
            else:
                (self.folder / f"leave-{number}").touch()
                self.leaving.append(process)
            self.start()  # another site comes

    def stop(self, process: object, seconds: float) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        self.stopped[process.pid] = time.monotonic() + seconds

    def ended(self) -> list[object]:
        """Sites that ended though they should live, or while they left."""
        failed = [each for each in self.leaving if each.exitcode]
        return [*failed, *(p for p in self.processes.values() if p.exitcode is not None)]

    def go_on(self) -> None:
        """Let stopped processes run whose time is over."""
        for pid, end in list(self.stopped.items()):
            if time.monotonic() > end:
                os.kill(pid, signal.SIGCONT)
                del self.stopped[pid]

    def end(self) -> None:
        """End all processes, also stopped ones."""
        for process in (*self.processes.values(), *self.leaving, self.keeper):
            process.kill()
            process.join()


def run(
    events: int, rounds: int, seed: int, momentum: float = MOMENTUM
) -> tuple[dict[int, list[Line]], list[Event]]:
    """Lines of all sites, and the events. Raises AssertionError if rounds do not end."""
    draw, acted = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        churn = Churn(Path(folder), seed, momentum)
        try:
            for _ in range(SITES):
                churn.start()
            moved, before = time.monotonic(), 0
            for number in range(1, events + 2):
                goal = rounds * number // (events + 1)
                while churn.rounds() < goal:
                    churn.go_on()
                    time.sleep(0.1)
                    if churn.rounds() != before:
                        before, moved = churn.rounds(), time.monotonic()
                    assert not churn.ended(), f"of themselves: {churn.ended()}"
                    assert time.monotonic() < moved + HANG, f"no round after {before}"
                if number <= events and (able := churn.able()):
                    event = Event(churn.rounds(), draw.choice(EVENTS), draw.choice(able))
                    acted.append(event)
                    churn.act(event.kind, event.site)
            (churn.folder / "done").touch()
            return churn.lines(), acted
        finally:
            churn.end()


def by_round(lines: dict[int, list[Line]]) -> dict[int, list[tuple[Line, Line]]]:
    """Lines of the sites that were in a round, each with that of its site before."""
    found: dict[int, list[tuple[Line, Line]]] = {}
    for each in lines.values():
        first = each[0]._replace(sent=0.0)  # of before its first round
        for before, line in pairwise([first, *each]):
            found.setdefault(line.round, []).append((before, line))
    return dict(sorted(found.items()))


def disagreements(lines: dict[int, list[Line]]) -> list[int]:
    """Rounds after which sites had different agreed weights."""
    rounds = by_round(lines).items()
    return [r for r, found in rounds if len({line.agreed for _, line in found}) > 1]


def gaps(lines: dict[int, list[Line]], momentum: float = MOMENTUM) -> dict[int, float]:
    """The sum that the sites of a round delivered, less that by which agreed weights then went on.
    By round, and zero but for rounding, unless a part was lost or counted twice. Rounds of which a
    killed site told nothing are left out."""
    rounds, gaps = by_round(lines), {}
    for number, found in rounds.items():
        if len(found) == max(line.sites for _, line in found) and number - 1 in rounds:
            sent = sum(line.sent - before.sent for before, line in found)
            average = found[0][1].momentum - momentum * rounds[number - 1][0][1].momentum
            gaps[number] = sent - average * sum(line.counted for _, line in found)
    return gaps


def losses(lines: dict[int, list[Line]], rounds: int) -> dict[int, list[float]]:
    """Losses in the last rounds, by site."""
    found = {
        number: [line.loss for line in each if line.round > rounds - LAST and line.steps]
        for number, each in lines.items()
    }
    return {number: each for number, each in found.items() if each}


def mean_loss(lines: dict[int, list[Line]], rounds: int) -> float:
    """Mean of the losses in the last rounds."""
    return statistics.fmean(loss for each in losses(lines, rounds).values() for loss in each)


def told(lines: dict[int, list[Line]], rounds: int, momentum: float = MOMENTUM) -> str:
    """Text on a churn, with all that stands out."""
    known = [(line.loss, n, line.round) for n, each in lines.items() for line in each if line.steps]
    loss, site, number = max(each for each in known if each[2] > rounds // 4)
    found = {n: [round(each, 4) for each in some] for n, some in losses(lines, rounds).items()}
    checked = gaps(lines, momentum)
    lost = {number: gap for number, gap in checked.items() if abs(gap) > TOLERANCE}
    return (
        f"rounds on which sites disagree: {disagreements(lines)}\n"
        f"gaps of sums, of {len(checked)} rounds: {lost}\n"
        f"loss {mean_loss(lines, rounds):.4f}, of the last rounds by site: {found}\n"
        f"the largest after a quarter of the rounds: {loss:.4f}, of site {site} in round {number}"
    )


if __name__ == "__main__":
    events, rounds, seed = map(int, sys.argv[1:4])
    momentum = float(sys.argv[4]) if len(sys.argv) > 4 else MOMENTUM
    begin = time.monotonic()
    found, acted = run(events, rounds, seed, momentum)
    print(", ".join(f"{event.round} {event.kind} {event.site}" for event in acted))
    print(f"{len(found)} sites, {time.monotonic() - begin:.0f} s")
    print(told(found, rounds, momentum))
