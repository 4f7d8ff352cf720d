"""Ranks of test_failures.py."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compll
import hipress
from compll.runtime.library import specs_dir
from hipress.engine import verify
from hipress.session import session_of
from tests.hipress.common import codec, digest, error_of, make, raised_by, train
from tests.hipress.fakes import Int8
from tests.patience import HANG, SILENCE, wait_until


def mismatches(rank, world_size):
    """Errors of each rank if one of them is configured differently."""
    found, kept = {}, []  # so that no rank closes connections that others are still making
    odd = rank == world_size - 1

    def wrap(*args, **options):
        kept.append(hipress.wrap(*args, **options))

    def attempt(title, name, model=None, **options):
        found[title] = error_of(wrap, model or make(), codec(name), timeout=HANG, **options)

    attempt("codec", "half" if odd else "int8")
    attempt("strategy", "int8", strategy="ring" if odd else "ps")
    attempt("seed", "int8", seed=int(odd))
    compll.PAYLOAD_FORMAT += odd
    attempt("format", "int8")
    compll.PAYLOAD_FORMAT -= odd
    attempt("exclude", "int8", exclude=["last.*"] if odd else [])
    attempt("order", "int8", exclude=["last.*", "scale"][:: -1 if odd else 1])
    shape = make()
    if odd:
        shape.second = nn.Linear(131, 302)
    attempt("shape", "int8", shape)
    layout = nn.Conv2d(3, 8, 3)
    attempt("layout", "int8", layout.to(memory_format=torch.channels_last) if odd else layout)
    buffered = nn.Sequential(nn.Linear(3, 3 + odd).requires_grad_(False), make(), nn.BatchNorm1d(3))
    attempt("frozen", "int8", buffered)
    attempt("buffer", "int8", nn.Sequential(make(), nn.BatchNorm1d(3 + odd, affine=False)))
    attempt("broken", "int8", exclude=["typo*"] if odd else [])
    attempt("scope", "int8", scope="tensr" if odd else "tensor")
    attempt("exclude_type", "int8", exclude=3 if odd else [])
    attempt("model", "int8", "x" if odd else None)
    attempt("ddp_kwargs", "int8", ddp_kwargs={"bucket_cap": 1} if odd else None)
    attempt("mixed", "int8", ddp_kwargs={"mixed_precision": object()} if odd else None)
    attempt("ddp_kwargs_type", "int8", ddp_kwargs=3 if odd else None)
    attempt("ddp_value", "int8", ddp_kwargs={"bucket_cap_mb": 1 + odd})
    attempt("residual_by_name", "topk", **({"residual": "bfloat16"} if odd else {}))
    for title, params in {"residual": {"residual": "bfloat16"}, "ratio": {"ratio": 0.25}}.items():
        compiled = compll.compile("topk", "reference", **(params if odd else {}))
        found[title] = error_of(wrap, make(), compiled, timeout=HANG)
    alike = "topk" if odd else compll.compile("topk", ratio=0.01)
    found["alike"] = error_of(wrap, make(), alike, timeout=HANG)
    as_text = str(specs_dir() / "topk.yaml")
    by_path = "topk" if odd else as_text
    found["path"] = error_of(wrap, make(), by_path, timeout=HANG)
    found["path_object"] = error_of(
        wrap, make(), specs_dir() / "topk.yaml" if odd else as_text, timeout=HANG
    )
    found["numpy"] = error_of(
        wrap, make(), codec("int8"), timeout=HANG,
        **({"seed": np.int64(3), "min_size": np.int32(5)} if odd else {"seed": 3, "min_size": 5}),
    )  # fmt: skip
    found["written"] = error_of(
        wrap, make(), "topk", timeout=HANG, **({} if odd else {"ratio": 0.01})
    )
    attempt("target", "topk" if odd else "int8", **({"target": "cuda"} if odd else {}))
    with tempfile.TemporaryDirectory() as folder:
        found["spec"] = _other_text(folder, odd)
    if not odd:  # the odd one never arrives
        found["absent"] = error_of(wrap, make(), codec("int8"), timeout=SILENCE)
    return found


def _other_text(folder, odd):
    """A spec whose file has the same name on all ranks, and another text on one."""
    text = (specs_dir() / "topk.yaml").read_text()
    with contextlib.chdir(folder):
        with open("d.yaml", "w") as file:
            file.write(text.replace("about:", "about: Other.", 1) if odd else text)
        return error_of(hipress.wrap, make(), "d.yaml", timeout=HANG)


def silent_hashes(rank, world_size):
    """The last rank takes part in a step, but compares no hashes."""
    store = dist.distributed_c10d._get_default_store()
    ddp = hipress.wrap(make(), codec("int8"), timeout=SILENCE, verify=True)
    if rank == world_size - 1:

        def late(*_):
            store.wait([f"done/{other}" for other in range(rank)])
            raise RuntimeError("too late")

        verify.gather = late
    found = error_of(train, ddp, rank, range(1))
    store.set(f"done/{rank}", "")
    return found


def restore(rank, world_size):
    """The last rank takes no part in a step; the others' errors. Nothing is left of the module."""
    import gc
    import weakref

    def threads():
        return len(os.listdir("/proc/self/task"))

    store = dist.distributed_c10d._get_default_store()
    train(DistributedDataParallel(make()), rank, range(1))  # starts autograd's and DDP's threads
    before = threads()
    ddp = hipress.wrap(make(), codec("int8"), timeout=SILENCE)
    alive = weakref.ref(ddp)
    if rank == world_size - 1:
        store.wait([f"done/{other}" for other in range(rank)])
        return None
    logging.disable(logging.CRITICAL)
    failed = error_of(train, ddp, rank, range(1))[0], error_of(train, ddp, rank, range(1))[0]
    store.set(f"done/{rank}", "")
    del ddp
    gc.collect()
    wait_until(lambda: alive() is None)  # a lane may have the last reference
    wait_until(lambda: threads() == before + 1)  # that of the door, which a process keeps
    return failed


def diverging(rank, world_size):
    """A rank decodes differently; verify=True detects it."""
    ddp = hipress.wrap(make(), Int8(skew=1.0 * (rank == 1)), verify=True)
    logging.disable(logging.CRITICAL)
    return raised_by(train, ddp, rank, range(2))


def damaged(rank, world_size):
    """A bit of a message from the last rank is flipped on its way, in the second step."""
    ddp = hipress.wrap(make(), codec("int8"), checksum=True, timeout=HANG)
    train(ddp, rank, range(1))
    if rank == world_size - 1:
        transport = session_of(ddp).engine.channels.channel(hosted=False)._executor._transport
        send = transport.post_send

        def damage(data, peer, channel):
            data[len(data) // 2] ^= 16
            return send(data, peer, channel)

        transport.post_send = damage
    return error_of(train, ddp, rank, range(1, 3))


def skipped(rank, world_size):
    """Rank 1 skips an optimizer's step; verify=True reports it in the next step."""
    ddp = hipress.wrap(make(), codec("int8"), verify=True, timeout=HANG)
    if rank == 1:
        torch.optim.SGD.step = lambda self: None
    return raised_by(train, ddp, rank, range(3))


class Raising(torch.optim.SGD):
    """Raises in its second step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise ValueError("no step")
        return super().step(closure)


def optimizer_raises(rank, world_size, ranks):
    """An optimizer's step raises on some ranks, whose programs go on; errors of the next steps."""
    ddp = hipress.wrap(make(), codec("int8"), timeout=HANG)
    kind = Raising if rank in ranks else torch.optim.SGD
    optimizer, found = kind(ddp.parameters(), lr=0.01), []

    def step():
        ddp.zero_grad()
        ddp(torch.randn(4, 7)).square().mean().backward()

    for _ in range(4):
        found.append(raised_by(step))
        with contextlib.suppress(ValueError):
            optimizer.step()
    return found


def closures(rank, world_size):
    """Backward passes within an optimizer's step, as in L-BFGS and Lightning."""
    ddp = hipress.wrap(make(), codec("int8"), timeout=HANG)
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = ddp(torch.ones(4, 7) * (rank + 1)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return hipress.report(ddp).measured.steps, digest(ddp)
