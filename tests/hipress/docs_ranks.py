"""Ranks that run the Python of documentation pages, all pages in one pair of processes."""

import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import compll
import hipress
from tests.patience import HANG


def run_pages(rank, world_size, folder, pages):
    """Errors by page. pages: the port of a store, as torchrun keeps one, and blocks of each."""
    dist.destroy_process_group()
    os.chdir(folder)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
    }  # fmt: skip
    failed = {}
    for page, (port, blocks) in pages.items():
        os.environ["MASTER_PORT"] = str(port)
        try:
            run(blocks, page)
        except Exception:
            failed[page] = traceback.format_exc()
        meet(port, world_size, failed)
        if dist.is_initialized():  # a page that failed leaves its group
            dist.destroy_process_group()
    return failed


def meet(port, world_size, failed):
    """Wait until all ranks have ended a page. One that destroyed its group at once would break
    another's connecting."""
    store = dist.PrefixStore("met", dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    if store.add("ranks", 1) == world_size:
        store.set("all", "")
    try:
        store.wait(["all"], timedelta(seconds=HANG / 2))
    except dist.DistStoreError as error:  # the others wait for this rank within the page
        raise AssertionError("\n".join(failed.values())) from error


def run(blocks, name):
    """Run a page's blocks one after the other, with what a reader's script has around them."""
    names = given() | {"__name__": name}
    if not any("init_process_group" in block for block in blocks):
        dist.init_process_group("gloo")
    for block in blocks:
        exec(compile(block, name, "exec"), names)


def given():
    """The reader's own names, and modules that every script imports."""
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    return {
        "torch": torch, "dist": dist, "hipress": hipress, "compll": compll,
        "Net": net, "x": x, "y": x[:, :10].argmax(1), "batches": [(x, x[:, :10].argmax(1))] * 3,
        "criterion": torch.nn.functional.cross_entropy, "replicas": 2, "shards": 1, "sites": 2,
        "ranks": 1, "MyModel": Loss, "load_batch": lambda rank, step: (x,),
    }  # fmt: skip


def net():
    """The reader's model."""
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(64, 256), torch.nn.ReLU(), linear(256, 10))


class Loss(torch.nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        return self.layers(x).square().mean()
