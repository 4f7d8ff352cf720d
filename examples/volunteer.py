# examples/volunteer.py
"""A volunteer: joins a training, leaves it, and keeps the weights that all agreed on.

    python volunteer.py HOST:29600 --name amsterdam --steps 400

Ctrl-C leaves sooner. The store runs on a machine that stays, and needs only torch:

    python -c "import time; from torch.distributed import TCPStore
    store = TCPStore('0.0.0.0', 29600, is_master=True, wait_for_workers=False); time.sleep(1e9)"
"""

import argparse
import logging
import signal

import torch
from torch import nn
from torch.distributed import TCPStore

import hipress

EVERY, FILE = 20, "agreed.pt"


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--name")
    parser.add_argument("--steps", type=int, default=400)
    return parser.parse_args()


def batch_of(seed):
    """A batch of this site's own data; seeds below zero are for evaluation."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed + 2**20))
    return x, x.sin().sum(1, keepdim=True)


def train(model, optimizer, outer, steps):
    """Train until the steps are done, or until Ctrl-C."""
    stopped = []
    before = signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    first = int(torch.randint(2**40, ()))  # another on each site
    for step in range(first, first + steps):
        if stopped:
            break
        x, y = batch_of(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        outer.step()
    signal.signal(signal.SIGINT, before)  # a second Ctrl-C ends at once


def main():
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # tells of sites
    host, _, port = given.store.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    members = hipress.StoreMembers(store, patience=60)
    outer = hipress.Outer(model, optimizer, every=EVERY, members=members, name=given.name)
    print(hipress.report(outer))
    train(model, optimizer, outer, given.steps)

    outer.leave()  # the others take over what this site has not delivered
    model.load_state_dict(outer.agreed(), strict=False)  # buffers stay as they are here
    torch.save(model.state_dict(), FILE)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(batch_of(-1)[0]), batch_of(-1)[1])
    print(f"loss of what all agreed on: {loss:.4f}, after {outer.rounds} rounds, in {FILE}")


if __name__ == "__main__":
    main()
