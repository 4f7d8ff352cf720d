# examples/train.py
import torch
import torch.distributed as dist

import hipress

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank has its own examples
x = torch.randn(4096, 256)
y = (x[:, :8].sum(1) > 0).long()
layers = torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2)
model = hipress.wrap(torch.nn.Sequential(*layers), "int4_group")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(50):
    batch = torch.randint(len(x), (64,))
    loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.2f}", hipress.report(model), sep="\n")
dist.destroy_process_group()
