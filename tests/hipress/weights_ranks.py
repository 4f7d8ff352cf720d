"""Ranks and killed processes of test_weights.py."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hipress
from hipress.weights import publisher as publisher_module
from hipress.weights import transport as transport_module
from tests.patience import HANG, SILENCE

SPECIAL = [float("nan"), -float("inf"), -0.0, 1e-40]


def tensors():
    """Tensors of all kinds: odd sizes, no rows, no elements, values that compare badly."""
    torch.manual_seed(0)
    made = {
        "weight": torch.randn(401, 33).bfloat16(),
        "norm": torch.randn(7),
        "scale": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(30, 20).t(),
        "count": torch.arange(5),
        "mask": torch.tensor([True, False]),
    }
    made["norm"][:4] = torch.tensor(SPECIAL)
    return made


def step(made, number):
    """Change some elements, as training does, NaN and zeros among them."""
    generator = torch.Generator().manual_seed(number)
    at = torch.randint(401, (20,), generator=generator)
    made["weight"][at, number % 33] *= 1.01
    made["weight"][number, :4] = torch.tensor(SPECIAL)
    made["norm"][number % 4] *= -1
    made["turned"][0, number] += 1
    made["count"] += 1


def save(made, folder):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in made.items()}, folder / "model.safetensors")


def bits(made):
    """Bytes of tensors, by name."""
    return {
        n: bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        for n, t in made.items()
    }


def stored(folder):
    return bits(load_file(folder / "model.safetensors"))


def killed(events, work, *args):
    """Run work, and kill this process at so many lines of hipress.weights."""
    left = events

    def trace(frame, event, _):
        nonlocal left
        if "hipress/weights/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work(*args)


def lines_of(work, *args):
    """The number of lines of hipress.weights that work runs."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "hipress/weights/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(*args)
    finally:
        sys.settrace(before)
    return count


def bring(checkpoint, source, version):
    hipress.Receiver(checkpoint, source).apply(version)


def publish_once(source):
    """Publish in this thread, as the other one is not traced."""
    made = tensors()
    publisher = hipress.Publisher(made, source)
    step(made, 1)
    publisher._snapshot(made)
    publisher._publish(1, None)


def model(shift=0.0):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(10, 13), nn.Tanh(), nn.Linear(13, 3, bias=False))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += shift
    return made


def change(made, number):
    """The same change of a model's whole or sharded parameters."""
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1 + 0.1 * number)


def sharded(rank, world_size, checkpoint, source, encoding, replicas):
    """Publish a model that FSDP2 shards; versions and checksums."""
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("r", "s"))
    made = model()
    fully_shard(made, mesh=mesh if replicas > 1 else mesh["s"])
    publisher = hipress.Publisher(made.state_dict(), source, encoding=encoding, anchor_every=2)
    for number in (1, 2, 3):
        change(made, number)
        assert publisher.publish() == number
    publisher.wait()
    state = publisher.state_dict()
    again = model(shift=5.0)
    fully_shard(again, mesh=mesh if replicas > 1 else mesh["s"])
    if rank == 0:
        bring(checkpoint, source, 3)
    dist.barrier()
    hipress.Receiver(checkpoint, source).load_into(again)
    for mine, other in zip(made.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local())
    publisher.close()
    return state


def trained(rank, world_size, folder):
    """Train by DDP and by hipress.shard, and publish each of three steps: DDP's rank 0, and all
    ranks of FSDP2. True for each way if a worker's model is the trained one in the end."""
    found = {}
    for way in ("ddp", "shard"):
        made, here = model(), Path(folder, way)
        if way == "ddp":
            trainer = nn.parallel.DistributedDataParallel(made)
        else:
            trainer = hipress.shard(fully_shard(made))
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        if rank == 0:
            save(dict(model().named_parameters()), here / "checkpoint")
        dist.barrier()
        publisher = None
        if rank == 0 or way == "shard":
            publisher = hipress.Publisher(dict(made.named_parameters()), here / "to")
        for number in (1, 2, 3):
            trainer(torch.randn(4, 10)).square().mean().backward()
            optimizer.step()
            if publisher:
                assert publisher.publish() == number
        if publisher:
            publisher.close()
        dist.barrier()
        whole = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in made.named_parameters()}
        if rank == 0:
            bring(here / "checkpoint", here / "to", 3)
        dist.barrier()
        worker = model(shift=1.0)
        hipress.Receiver(here / "checkpoint", here / "to").load_into(worker)
        found[way] = bits(dict(worker.named_parameters())) == bits(whole)
    return found


def failing(rank, world_size, folder):
    """Rank 1 has no room; errors of the first version, and the next one."""
    made = model()
    fully_shard(made)
    publisher = hipress.Publisher(made.state_dict(), folder)
    change(made, 1)
    write = publisher_module.delta_files.write_tensors

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        publisher_module.delta_files.write_tensors = full
    publisher.publish()
    try:
        publisher.wait()
    except hipress.HipressError as error:
        text = str(error)
    dist.barrier()  # rank 0 has removed what it began
    left = sorted(p.name for p in Path(folder).iterdir())
    dist.barrier()
    publisher_module.delta_files.write_tensors = write
    publisher.publish()
    return text, left, publisher.wait()


def reshaped(rank, world_size, folder):
    """Rank 1 publishes another tensor; the errors."""
    made = {"a": torch.zeros(4)}
    publisher = hipress.Publisher(made, folder, group=dist.group.WORLD)
    try:
        publisher.publish({"a": torch.zeros(4 + rank)})
        publisher.wait()
    except hipress.HipressError as error:
        return str(error)
    return ""


def ending(rank, world_size, folder):
    """Rank 1 ends before it publishes; the error of rank 0."""
    made = {"a": torch.zeros(4)}
    publisher = hipress.Publisher(made, folder, group=dist.group.WORLD)
    if rank == 1:
        os._exit(1)
    publisher.publish()
    try:
        publisher.wait()
    except hipress.HipressError as error:
        return str(error)
    return ""


def sent(rank, world_size, folder, encoding):
    """Rank 0 publishes to the others, which share no folder with it; the bits of their checkpoints
    after each of three versions, and folders that are left."""
    here, made = Path(folder, str(rank)), tensors()
    if rank == 0:
        with hipress.Publisher(
            made, here / "to", encoding=encoding, transport=dist.group.WORLD, timeout=HANG
        ) as publisher:
            found = []
            for number in (1, 2, 3):
                step(made, number)
                publisher.publish()
                found.append(bits(made))
        return found
    save(made, here / "checkpoint")
    receiver = hipress.Receiver(
        here / "checkpoint", here / "from", transport=dist.group.WORLD, timeout=HANG
    )
    found = []
    for number in (1, 2, 3):
        receiver.wait(number, HANG)
        receiver.prefetch(number)
        receiver.apply(number)
        found.append(stored(here / "checkpoint"))
    receiver.verify()
    return found


def sent_to_those_behind(rank, world_size, folder):
    """Ranks 0 and 1 have published together; ranks 2 and 3 come later, with the first checkpoint
    and with the first version. The bits of a next version, and folders of receivers before it."""
    here, made = Path(folder, str(rank)), tensors()
    trainers, apart = dist.new_group([0, 1]), dist.new_group([0, 2, 3])
    if rank < 2:
        publisher = hipress.Publisher(made, Path(folder, "to"), group=trainers)
        for number in (1, 2):
            step(made, number)
            publisher.publish()
        state = publisher.state_dict()
        publisher.close()
        dist.barrier()
        publisher = hipress.Publisher(made, Path(folder, "to"), group=trainers, transport=apart)
        publisher.load_state_dict(state)
        dist.barrier()
        step(made, 3)
        publisher.publish()
        publisher.close()
        return bits(made), []
    save(made, here / "checkpoint")
    dist.barrier()
    if rank == 3:
        bring(here / "checkpoint", Path(folder, "to"), 1)
    receiver = hipress.Receiver(here / "checkpoint", here / "from", transport=apart)
    receiver.wait(2, HANG)
    had = sorted(path.name for path in (here / "from").iterdir())
    dist.barrier()
    receiver.wait(3, HANG)
    receiver.apply(3)
    return stored(here / "checkpoint"), had


def sent_in_vain(rank, world_size, folder, how):
    """Rank 0 publishes to the others, of which rank 1 has no room, leaves, is killed, or comes with
    a later version; all others' errors."""
    here, made = Path(folder, str(rank)), tensors()
    save(made, here / "checkpoint")
    options = {"transport": dist.group.WORLD, "timeout": SILENCE if how == "silent" else HANG}
    logging.disable(logging.CRITICAL)
    try:
        if rank == 0:
            publisher = hipress.Publisher(made, here / "to", **options)
            step(made, 1)
            if how == "silent":
                dist.barrier()
            publisher.publish()
            publisher.wait()
        given = {"version": 5} if how == "late" and rank == 1 else {}
        receiver = hipress.Receiver(here / "checkpoint", here / "from", **given, **options)
        if rank == 1 and how == "full":
            (here / "from").write_text("no folder")
        elif rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 1 and how == "left":
            receiver.close()
        receiver.wait(2, HANG)
    except (hipress.HipressError, OSError) as error:
        if how == "silent" and rank:
            dist.barrier()
        return f"{type(error).__name__}: {error}"
    return ""


def many_blocks(rank, world_size, folder):
    """Send several blocks of the largest length, with float32 of all kinds."""
    transport_module.LARGEST = 1 << 18
    torch.manual_seed(0)
    here = Path(folder, str(rank))
    made = {"all": torch.randint(-(2**31), 2**31, (900_001,)).int()}
    save(made, here / "checkpoint")
    if rank == 0:
        publisher = hipress.Publisher(
            {"all": made["all"].clone()}, here / "to", transport=dist.group.WORLD
        )
        made["all"] = torch.randint(-(2**31), 2**31, (900_001,)).int()
        publisher.publish(made)
        publisher.close()
        return bits(made), 0
    receiver = hipress.Receiver(here / "checkpoint", here / "from", transport=dist.group.WORLD)
    receiver.wait(1, HANG)
    receiver.apply(1)
    size = sum(p.stat().st_size for p in (here / "from" / "weight_v000001").iterdir())
    return stored(here / "checkpoint"), size


def sent_again(rank, world_size, folder):
    """Transports one after the other in the same processes; versions that arrived."""
    found = []
    for number in range(3):
        here, made = Path(folder, str(rank), str(number)), tensors()
        if rank == 0:
            with hipress.Publisher(made, here / "to", transport=dist.group.WORLD) as publisher:
                step(made, 1)
                found.append(publisher.publish())
            continue
        save(made, here / "checkpoint")
        with hipress.Receiver(
            here / "checkpoint", here / "from", transport=dist.group.WORLD
        ) as receiver:
            receiver.wait(1, HANG)
            receiver.apply(1)
            found.append(receiver.version)
    return found
