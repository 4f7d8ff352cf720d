"""Memory of "auto" beside that of a named compressor and of DDP, on two ranks that share a GPU.

    python -m bench.gpu_peak [--rehearse] [--steps 60] [--output FOLDER]

Each method trains the demo's model in new processes, over gloo. At each mark: MB of the first
rank's process that are its own, and that are files of libraries; MB of the GPU that torch has in
use, and the most so far. Results: gpu_peak.json. --rehearse: a small model on the CPU.
"""

from __future__ import annotations

import json
import re
import tempfile
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import hipress
from bench.commands import RESULTS, command_line, refusing
from hipress.tools.refusals import check_output

METHODS = ("ddp", "int4_group", "auto")
WIDTH, DEPTH, BATCH = 1024, 12, 64  # 50 MB of gradients
LIBRARIES = ("libLLVM", "libllvmlite", "libnvrtc", "libnccl", "libcublas", "libtorch")
MB = 1e-6


def memory(device: torch.device) -> dict[str, Any]:
    """MB of this process, and of the device."""
    smaps = Path("/proc/self/smaps").read_text()
    files, own, name = dict[str, float](), 0.0, ""
    for line in smaps.splitlines():
        head = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)", line)
        if head:
            name = head[1]
        elif line.startswith("Rss:"):
            size = 1024 * MB * int(line.split()[1])
            if name.startswith("/") and not name.startswith(("/dev/zero", "/memfd")):
                known = next((each for each in LIBRARIES if each in name), "others")
                files[known] = files.get(known, 0.0) + size
            else:
                own += size
    whole: dict[str, Any] = {"own": round(own), "files": {k: round(v) for k, v in files.items()}}
    if device.type == "cuda":
        torch.cuda.synchronize()
        whole["gpu"] = round(MB * torch.cuda.memory_allocated())
        whole["gpu_most"] = round(MB * torch.cuda.max_memory_allocated())
    return whole


def train(rank: int, store: str, out: str, method: str, steps: int, width: int) -> None:
    """Runs on each rank; the first writes its marks."""
    torch.set_num_threads(2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(DEPTH))
    model = nn.Sequential(*layers).to(device)
    marks = {"model": memory(device)}
    if method == "ddp":
        ddp: nn.Module = DistributedDataParallel(model)
    else:
        transport = "staged" if device.type == "cuda" else "auto"  # gloo moves host memory
        ddp = hipress.wrap(model, method, transport=transport)
    marks["wrapped"] = memory(device)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    x = torch.randn(BATCH, width, device=device)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        if step in (2, steps - 1):
            marks[f"step {step}"] = memory(device)
    tried = () if method == "ddp" else getattr(hipress.report(ddp), "tried", ())
    plans = [each.plan for each in tried]
    if rank == 0:
        Path(out).write_text(json.dumps({"method": method, "marks": marks, "tried": plans}))
    dist.destroy_process_group()


def main(
    rehearse: Annotated[bool, typer.Option("--rehearse", help="small, on the CPU")] = False,
    steps: Annotated[int, typer.Option(min=4, help="so many that the trial ends")] = 100,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Measure and write gpu_peak.json."""
    with refusing():
        check_output(output)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            paths, out = f"{folder}/{method}", f"{folder}/{method}.json"
            width = 128 if rehearse else WIDTH
            start_processes(train, (paths, out, method, steps, width), 2)  # type: ignore[no-untyped-call]
            rows.append(json.loads(Path(out).read_text()))
            last = {mark: each for mark, each in rows[-1]["marks"].items() if "step" in mark}
            typer.echo(f"{method}: {json.dumps(last)}")
    about = {"date": date.today().isoformat(), "command": command_line("bench.gpu_peak")}
    (output / "gpu_peak.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
