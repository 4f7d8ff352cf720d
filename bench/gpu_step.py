"""A training step of GPT-2 small on one rank of several, with all but the wire, and DDP's own.

    python -m bench.gpu_step [int4_group topk] [--ranks 2,8] [--batch 8] [--length 512]

Needs a GPU and CuPy. A step is forward and backward pass under bfloat16 autocast, and AdamW's, of a
model that `hipress.wrap` returned. The other ranks do not exist (see bench/absent.py): received
messages are whatever lies in memory, so compressors have payloads of fixed lengths; the host's work
is that of the given number of ranks. `ddp` is DDP without hipress, whose all-reduce does nothing.
`gpu_mb` is the most memory of the GPU in use, states and payloads included.
Results: gpu_step.json.
"""

import gc
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hipress
from bench.absent import alone
from bench.commands import RESULTS, command_line, refusing
from bench.gpt2 import GPT2
from bench.gpu_times import require_gpu
from casync.codec import Codec
from compll.files import write_json
from hipress.codecs import compile_codec
from hipress.tools.refusals import check_output

WARM = 4  # steps: DDP makes new buckets after the first, programs are captured in the third
DDP = "ddp"


def measure(
    ddp: nn.Module, tokens: torch.Tensor, repeat: int, warm: int = WARM
) -> tuple[float, float]:
    """Median milliseconds of a step, and of the host's part of it."""
    wait: Callable[[], None] = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    whole, host = [], []
    for _ in range(warm + repeat):
        ddp.zero_grad(set_to_none=False)
        wait()
        begin = perf_counter()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss = ddp(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        host.append(1e3 * (perf_counter() - begin))
        wait()
        whole.append(1e3 * (perf_counter() - begin))
    return statistics.median(whole[warm:]), statistics.median(host[warm:])


def rows(
    make: Callable[[], nn.Module],
    tokens: torch.Tensor,
    codecs: Mapping[str, Codec],
    repeat: int,
    *,
    ranks: int,
    captures: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:
    """Rows of DDP and of each codec, with and without capture, for one of `ranks` ranks."""
    for name, capture in [(DDP, False), *((name, how) for name in codecs for how in captures)]:
        with alone(ranks):
            if torch.cuda.is_available():
                gc.collect()  # the last row's model
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if name == DDP:
                ms, host = measure(DistributedDataParallel(make()), tokens, repeat)
            else:
                ddp = hipress.wrap(
                    make(), codecs[name], strategy="ps", transport="nccl4py", capture=capture
                )
                ms, host = measure(ddp, tokens, repeat)
                hipress.detach(ddp)
                del ddp
        which = {"codec": name, "ranks": ranks, "captured": capture}
        most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        took = {"ms": round(ms, 3), "host_ms": round(host, 3), "gpu_mb": round(1e-6 * most)}
        yield which | took


def _gpt2(device: torch.device) -> nn.Module:
    """GPT-2 small with random weights."""
    return GPT2().to(device)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="compressors of fixed lengths")] = None,
    ranks: Annotated[str, typer.Option(help="of which this is one")] = "2",
    batch: Annotated[int, typer.Option(help="sequences", min=1)] = 8,
    length: Annotated[int, typer.Option(help="tokens of each", min=2)] = 512,
    repeat: Annotated[int, typer.Option(help="timed steps; the median counts", min=1)] = 21,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Measure a step of GPT-2 small."""
    with refusing():
        require_gpu()
        check_output(output)
        sizes = [int(size) for size in ranks.split(",")]
    device = torch.device("cuda", torch.cuda.current_device())
    codecs = {name: compile_codec(name, {}, "cuda") for name in names or ["int4_group", "topk"]}
    tokens = torch.randint(50257, (batch, length), device=device)
    measured = []
    for size in sizes:
        for row in rows(partial(_gpt2, device), tokens, codecs, repeat, ranks=size):
            measured.append(row)
            typer.echo(json.dumps(row))
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
             "date": date.today().isoformat(), "command": command_line("bench.gpu_step"),
             "ranks": sizes, "batch": batch, "length": length, "repeat": repeat}  # fmt: skip
    write_json(output / "gpu_step.json", {**about, "rows": measured})


if __name__ == "__main__":
    typer.run(main)
