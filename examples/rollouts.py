# examples/rollouts.py
"""Reinforcement learning by a trainer and a worker, which share a folder and nothing else.

    python rollouts.py trainer run & python rollouts.py worker run

The worker acts by the weights of its checkpoint, in bfloat16, and writes down what it did. The
trainer learns from that, and publishes the bits of its weights that changed. Needs safetensors.
"""

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import hipress

VERSIONS, ACTIONS = 20, 8


def policy():
    """Weights at the beginning, the same on both sides, as of a model that both have loaded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ACTIONS, 64), nn.Tanh(), nn.Linear(64, ACTIONS))


def train(run):
    """Learn from the worker's actions (REINFORCE), and publish each step."""
    model = policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.04)
    weights = dict(model.named_parameters())
    with hipress.Publisher(weights, run / "versions", dtype=torch.bfloat16) as publisher:
        for version in range(VERSIONS):
            states, actions, rewards = taken(run / f"rollout{version}.pt")
            log_probabilities = model(states).log_softmax(1).gather(1, actions[:, None])[:, 0]
            optimizer.zero_grad()
            (log_probabilities * (rewards.mean() - rewards)).mean().backward()
            optimizer.step()
            publisher.publish()


def taken(path, seconds=300):
    """The worker's states, actions and rewards."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no {path} after {seconds} s: does the worker run?")
        time.sleep(0.01)
    return torch.load(path)


def act(run):
    """Act by each version, and take the next one."""
    model = policy().bfloat16()
    checkpoint = run / "worker"  # on a disk of its own
    checkpoint.mkdir(parents=True)
    save_file(model.state_dict(), checkpoint / "model.safetensors")
    with hipress.Receiver(checkpoint, run / "versions") as receiver:
        for version in range(VERSIONS):
            states = torch.randn(256, ACTIONS)
            with torch.no_grad():
                probabilities = model(states.bfloat16()).float().softmax(1)
            actions = probabilities.multinomial(1)[:, 0]
            rewards = (actions == states.argmax(1)).float()
            print(f"version {version}: reward {rewards.mean():.2f}", flush=True)
            part = run / "rollout.part"
            torch.save((states, actions, rewards), part)
            part.rename(run / f"rollout{version}.pt")
            receiver.wait(version + 1)
            receiver.apply(version + 1)
            receiver.load_into(model)
        receiver.verify()


if __name__ == "__main__":
    {"trainer": train, "worker": act}[sys.argv[1]](Path(sys.argv[2]))
