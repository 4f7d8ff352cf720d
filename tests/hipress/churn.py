"""Four sites that train while others are killed, stopped, leave, come and refuse to commit, and
their store is silent for a while.

python -m tests.hipress.churn 40 60 1      # events, rounds, seed
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

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
SILENCE = 0.6 * PATIENCE  # of the store
STOP = 1.5 * PATIENCE  # of a site


def keep(pipe) -> None:
    """Keep the store; the parent gets its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def site(port: int, number: int, folder: str) -> None:
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
        return commit(error)

    members.commit = maybe
    outer = hipress.Outer(model, optimizer, "onebit_group", every=4, members=members)
    step, known = 0, None
    while not (here / "done").exists():
        if (here / f"leave-{number}").exists():
            outer.leave()
            return
        x, y = data(number, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        outer.step()
        step += 1
        if outer.rounds != known and not (here / "done").exists():
            known = outer.rounds
            flat = nn.Parameter(torch.cat([f.agreed for f in outer.fragments]))
            line = [known, digest(nn.ParameterList([flat])), float(loss.detach())]
            with (here / f"site-{number}").open("a") as file:
                file.write(json.dumps(line) + "\n")


@dataclass
class Churn:
    """Processes of sites, and what they told."""

    folder: Path
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
        process = CONTEXT.Process(target=site, args=(self.port, self.started, str(self.folder)))
        process.start()
        self.processes[self.started] = process
        self.started += 1

    def lines(self) -> dict[int, list]:
        found = {}
        for number in range(self.started):
            path = self.folder / f"site-{number}"
            text = path.read_text() if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]  # a killed site may have written a part
            if whole:
                found[number] = [json.loads(line) for line in whole.splitlines()]
        return found

    def rounds(self) -> int:
        return max((line[-1][0] for line in self.lines().values()), default=0)

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


def run(events: int, rounds: int, seed: int) -> tuple[dict[int, list], Counter[str]]:
    """Lines of all sites, and the events by kind. Raises AssertionError if rounds do not end."""
    draw, told = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as folder:
        churn = Churn(Path(folder))
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
                    event = draw.choice(EVENTS)
                    told[event] += 1
                    churn.act(event, draw.choice(able))
            (churn.folder / "done").touch()
            return churn.lines(), told
        finally:
            churn.end()


def disagreements(lines: dict[int, list]) -> list[int]:
    """Rounds after which sites had different agreed weights."""
    found: dict[int, set[str]] = {}
    for each in lines.values():
        for number, weights, _ in each:
            found.setdefault(number, set()).add(weights)
    return sorted(number for number, weights in found.items() if len(weights) > 1)


def last_loss(lines: dict[int, list], rounds: int) -> float:
    """Mean loss of all sites in the last rounds. A newcomer's first one is of its own weights."""
    known = [line for each in lines.values() for line in each[1:]]
    found = [loss for number, _, loss in known if number > rounds - 5]
    return sum(found) / len(found)


if __name__ == "__main__":
    events, rounds, seed = map(int, sys.argv[1:])
    begin = time.monotonic()
    found, told = run(events, rounds, seed)
    quiet, _ = run(0, rounds, seed)
    print(f"{dict(told)}, {len(found)} sites, {time.monotonic() - begin:.0f} s")
    print(f"rounds on which sites disagree: {disagreements(found)}")
    print(f"loss {last_loss(found, rounds):.4f}, undisturbed {last_loss(quiet, rounds):.4f}")
