"""Ranks of test_frameworks.py."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress.integrations import accelerate, files
from tests.compll.test_files import room_for
from tests.hipress.common import data, left, make, raised_by
from tests.patience import SILENCE

OPTIONS = {"ratio": 0.1, "min_size": 0, "timeout": SILENCE}


def attached(hooks, resume=None):
    """A model to which Accelerate's hook was attached."""
    accelerator = SimpleNamespace(register_save_state_pre_hook=hooks.append)
    model = DistributedDataParallel(make())
    accelerate.attach(accelerator, model, "topk", resume=resume, **OPTIONS)
    return model


def backward(model, rank):
    """A step's backward pass."""
    x, y = data(rank, 0)
    (model(x) - y).square().sum().backward()


def resumes_by_accelerate(rank, world_size, folder, case):
    """The error of a rank that resumes, "" without, and True if it has residuals before its first
    step. case: what happened to rank 1's file."""
    hooks = []
    model = attached(hooks)
    backward(model, rank)
    hooks[0]([model], [], folder)
    hipress.detach(model)
    hooks[0]([model], [], f"{folder}/detached")
    dist.barrier()
    mine = files.file_of(folder)
    if rank == 1 and case == "missing":
        mine.unlink()
    if rank == 1 and case == "damaged":
        mine.write_bytes(b"0")
    resume = None if rank == 1 and case == "no folder" else folder
    try:
        model = attached([], resume)
    except hipress.HipressError as error:
        return f"{type(error).__name__}: {error}", False
    had = any(left(model).values())
    backward(model, rank)
    return "", had


def not_prepared(rank, world_size):
    """The errors of attaching to models that no framework has prepared for DDP."""
    model, trainer = make(), SimpleNamespace(strategy=SimpleNamespace(model=make()))
    found = [raised_by(accelerate.attach, SimpleNamespace(), model, "topk", **OPTIONS)]
    from hipress.integrations import lightning, transformers

    found.append(raised_by(lightning.HiPress("topk").on_train_start, trainer, None))
    other = transformers.HiPress(SimpleNamespace(model_wrapped=model), "topk")
    found.append(raised_by(other.on_train_begin, None, None, None))
    return found


def compiled(rank, world_size):
    """True if a compiled DDP module is compressed after Accelerate's attach."""
    model = torch.compile(DistributedDataParallel(make()), backend="eager")
    hooks = SimpleNamespace(register_save_state_pre_hook=lambda hook: None)
    accelerate.attach(hooks, model, "topk", **OPTIONS)
    return hipress.report(model).installed


def without_room(rank, world_size, folder):
    """The error of a rank that saves without room, the files then, and whether the first loads."""
    model, file = attached([]), files.file_of(folder)
    backward(model, rank)
    files.save(model, file)
    before = torch.load(file)["counter"]
    backward(model, rank)
    with room_for(4096):
        error = raised_by(files.save, model, file)
    files.load(model, file)
    dist.barrier()
    return error, sorted(os.listdir(folder)), torch.load(file)["counter"] == before == 1


def trained_elsewhere(rank, world_size, folder):
    """The names of files of two trainings by Transformers in a folder, and whether the first loads
    residuals as it goes on, as a third, of another folder, does not."""
    from hipress.integrations.transformers import HiPress

    def callback(state, output):
        model = DistributedDataParallel(make())
        trainer = SimpleNamespace(model_wrapped=model, optimizer=None)
        made, args = HiPress(trainer, "topk", **OPTIONS), SimpleNamespace(output_dir=output)
        made.on_train_begin(args, state, None)
        return model, lambda: made.on_save(args, state, None)

    first, second = (SimpleNamespace(global_step=0, stateful_callbacks={}) for _ in range(2))
    for state in (first, second):
        model, save = callback(state, folder)
        backward(model, rank)
        state.global_step = 1
        save()
    dist.barrier()
    found = sorted(os.listdir(f"{folder}/checkpoint-1"))
    again = [any(left(callback(state, output)[0]).values()) for state, output in (
        (first, folder), (first, f"{folder}/other"),
    )]  # fmt: skip
    return found, again
