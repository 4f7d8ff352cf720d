# examples/elastic.py
"""Training that goes on with as many ranks as are left, or more, from its last checkpoint.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --nproc-per-node 1 \
        --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 elastic.py

Without that variable gloo, started again, would look for the processes that ended (pytorch#135712).
All ranks need the same folder `checkpoints`. FSDP2 shards the model over two ranks if their number
is even, and hipress averages the replicas. The first argument is the number of steps, else 60.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import hipress

FOLDER, EVERY, BATCH = Path("checkpoints"), 10, 60


class Training:
    """Model, optimizer and step, as a checkpoint holds them beside the state of hipress."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": self.step}

    def load_state_dict(self, state):
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        self.step = state["step"]


def last_checkpoint():
    """The last folder that is complete: torch writes .metadata when all ranks have written."""
    return max((file.parent for file in FOLDER.glob("*/.metadata")), default=None)


def batch_of(step):
    """This rank's share of a step's batch, which is the same for any number of ranks."""
    x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return x[mine], (x[:, :8].sum(1) > 0).long()[mine]


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shards = 2 if ranks % 2 == 0 else 1
names = ("replicate", "shard")
mesh = dist.init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=names)

torch.manual_seed(0)
linear = torch.nn.Linear
model = torch.nn.Sequential(linear(64, 256), torch.nn.ReLU(), linear(256, 2))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
group = mesh["replicate"].get_group()
sync = hipress.Synchronizer(model, "topk", ratio=0.1, process_group=group)

training = Training(model, optimizer)
checkpoint = {"training": training, "hipress": hipress.Stateful(sync)}
last = last_checkpoint()
if last is not None:
    dcp.load(checkpoint, checkpoint_id=last)
while training.step < (int(sys.argv[1]) if len(sys.argv) > 1 else 60):
    x, y = batch_of(training.step)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    sync.step()
    optimizer.step()
    training.step += 1
    if training.step % EVERY == 0:
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            print(f"step {training.step}, {ranks} ranks: loss {loss / ranks:.3f}", flush=True)
        dcp.save(checkpoint, checkpoint_id=FOLDER / f"{training.step:06}")
dist.destroy_process_group()
