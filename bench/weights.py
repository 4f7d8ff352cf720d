"""Versions of weights for inference workers: their size, speed and time over a link.

    python -m bench.weights [--output FILE]

Trains a small language model from weights in bfloat16 by AdamW in float32, for some steps at each
rate, and publishes the last step. Writes the share of values that changed, bits for each value, and
MB of the model a second from `publish` until it is written and for `apply`, checks and the writing
of files included; and between emulated hosts the seconds from `publish` until a worker's model has
the weights, beside those of `torch.distributed.broadcast` of all weights. Best of three each.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

import hipress
from bench.commands import RESULTS, command_line, now, refusing
from bench.netns import Network, NetworkError, require, run_everywhere
from compll.files import write_json
from hipress.tools.run.ending import orderly_end
from hipress.weights.delta_files import Item, write_tensors
from hipress.weights.deltas import ENCODINGS
from hipress.weights.folders import lasting

RATES = (1e-7, 1e-6, 1e-5, 1e-4)
LINKS = ("1gbit", "100mbit")
STEPS, TRIES, VOCABULARY, WIDTH = 8, 3, 4096, 256
State = dict[str, torch.Tensor]


class Language(nn.Module):
    """A transformer that predicts the next of its tokens, 3.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: torch.Tensor = self.head(self.layers(self.embed(tokens), mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def rounded(model: nn.Module) -> State:
    """Weights as they are published."""
    return {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}


def last_step(rate: float) -> tuple[State, State]:
    """Weights before and after the last of some steps at a rate."""
    torch.manual_seed(0)
    model = Language()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
            parameter.copy_(parameter.bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    state = rounded(model)
    before = state
    for _ in range(STEPS):
        before = state
        tokens = torch.rand(8, 64, generator=generator).square() * VOCABULARY  # some are frequent
        optimizer.zero_grad()
        model(tokens.long()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = rounded(model)
    return before, state


def save(state: State, folder: Path) -> None:
    """Write all weights as a checkpoint."""
    folder.mkdir(parents=True)
    items = {
        n: Item("BF16", tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for n, t in state.items()
    }
    with lasting(folder / "model.safetensors") as file:
        write_tensors(file, items, {})


def seconds(work: Callable[[], object]) -> float:
    """Seconds that work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measured(before: State, after: State, encoding: str, root: Path) -> tuple[int, float, float]:
    """Bytes of a version, and seconds to publish and to apply it; encoding "": all weights."""
    save(before, root / "checkpoint")
    if not encoding:
        writing = seconds(lambda: save(after, root / "copy"))
        copying = seconds(lambda: shutil.copytree(root / "copy", root / "worker"))
        return size_of(root / "copy"), writing, copying
    now = {name: tensor.clone() for name, tensor in before.items()}
    with hipress.Publisher(now, root / "to", encoding=encoding) as publisher:
        publishing = seconds(lambda: (publisher.publish(after), publisher.wait()))
    receiver = hipress.Receiver(root / "checkpoint", root / "to")
    applying = seconds(lambda: receiver.apply(1))
    receiver.verify()
    return size_of(root / "to"), publishing, applying


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def speeds() -> list[dict[str, Any]]:
    """Sizes and speeds of versions, and of copies of all weights, by rate."""
    rows = []
    for rate in RATES:
        before, after = last_step(rate)
        count = sum(tensor.numel() for tensor in after.values())
        changed = sum(int((after[n] != before[n]).sum()) for n in after) / count
        for encoding in (*ENCODINGS, ""):
            tries = []
            for _ in range(TRIES):
                with tempfile.TemporaryDirectory() as folder:
                    tries.append(measured(before, after, encoding, Path(folder)))
            size = tries[0][0]
            publish, apply = (2e-6 * count / min(each[i] for each in tries) for i in (1, 2))
            rows.append(
                {"rate": rate, "changed": changed, "version": encoding or "all weights",
                 "bits": 8 * size / count, "fewer": 2 * count / size,
                 "publish": publish, "apply": apply}
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def over(link: str, states: Path) -> dict[str, Any]:
    """Seconds of the rates' versions, and of a broadcast, between two hosts on a link."""
    program = [sys.executable, "-m", "bench.weights", "host", str(states)]
    with Network(2, link) as network:
        if run_everywhere(network, program):
            raise NetworkError("a host failed, see above")
    found: dict[str, Any] = json.loads((states / "seconds.json").read_text())
    print(link, found, flush=True)
    return {"link": link, **found}


def host(states: Path) -> dict[str, float]:
    """A host of two: the trainer publishes and broadcasts, the worker loads into a model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for rate in RATES:
        before, after = torch.load(states / f"{rate:g}.pt")
        found[f"{rate:g}"] = min(updated(before, after) for _ in range(TRIES))
    model = Language().bfloat16()

    def broadcast() -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)

    return {**found, "broadcast": min(timed(broadcast, broadcast) for _ in range(TRIES))}


def updated(before: State, after: State) -> float:
    """Seconds from `publish` on host 0 until the model of host 1 has a version."""
    trainer = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        root, group = Path(folder), dist.group.WORLD
        if trainer:
            with hipress.Publisher(before, root / "to", transport=group) as publisher:
                return timed(lambda: None, lambda: publisher.publish(after))
        save(before, root / "checkpoint")
        receiver = hipress.Receiver(root / "checkpoint", root / "from", transport=group)
        model = Language().bfloat16()

        def load() -> None:
            receiver.wait(1)
            receiver.apply(1)
            receiver.load_into(model)

        return timed(load, lambda: None)


def timed(receive: Callable[[], object], send: Callable[[], object]) -> float:
    """Seconds from the beginning on host 0 to the end on host 1: they share a clock."""
    dist.barrier()
    times = torch.zeros(2, dtype=torch.float64)
    if dist.get_rank() == 0:
        times[0] = time.monotonic()
        send()
    else:
        receive()
        times[1] = time.monotonic()
    dist.all_reduce(times)
    return float(times[1] - times[0])


app = typer.Typer(help=__doc__, add_completion=False)
Output = Annotated[Path, typer.Option(help="Results.")]


@app.callback(invoke_without_command=True)
def main(context: typer.Context, output: Output = RESULTS / "weights.json") -> None:
    """Measure all, and write the results."""
    if context.invoked_subcommand is not None:
        return
    with refusing():
        require(2, LINKS[0], least=2)
    torch.set_num_threads(1)
    about = {"date": now(), "command": command_line("bench.weights"), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        for rate in RATES:
            torch.save(last_step(rate), Path(folder, f"{rate:g}.pt"))
        links = [over(link, Path(folder)) for link in LINKS]
    write_json(output, {"about": about, "speeds": speeds(), "links": links})


@app.command(name="host", hidden=True)
def on_host(states: Path) -> None:
    """A host of two: started by the measurement."""
    found = host(states)
    if dist.get_rank() == 1:
        (states / "seconds.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with orderly_end("bench.weights"):
        app()
