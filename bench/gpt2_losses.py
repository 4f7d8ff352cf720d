"""Losses of GPT-2 small under compressors, by real ranks that share a GPU, or on the CPU.

    python -m bench.gpt2_losses                          # every cell that is not recorded, on a GPU
    python -m bench.gpt2_losses --method shard:int4_group+int8_group:ranks=2 --minutes 9
    python -m bench.gpt2_losses --rehearse               # ten steps of few tokens, on the CPU

A cell is a training of 930 steps of 65,536 tokens: AdamW with warm-up and cosine, clipping at 1,
bfloat16 autocast, context 512. Each rank is a process over gloo that takes its part of a step's
tokens, the same for any number of ranks; payloads travel by way of the host. Tokens are words of
the Python files that this interpreter and its packages ship; each fiftieth file is held out.
A training that is out of time leaves a checkpoint in FOLDER, from which the next call goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import hipress
from bench.commands import RESULTS, command_line, now, refusing
from bench.gpt2 import GPT2
from compll.files import replacing
from hipress.tools.run.corpus import tokenize

CELLS = RESULTS / "gpt2_losses.jsonl"
WORDS, WARM, RATE, HELD_OUT, FREEZE = 50_257, 90, 6e-4, 50, 0.15
#: way in, compressors, and ranks. The first is the baseline: torch's hook of 16 bits needs NCCL
METHODS = (
    *("wrap:bf16:ranks=2", "wrap:int4_group:ranks=2", "wrap:int4_group:ranks=8"),
    *("momentum:onebit_fine:ranks=2", "shard:int4_group+int8_group:ranks=2"),
    *("shard:int8_group+int8_group:ranks=2", "outer:int4_group:ranks=2"),
)
SEEDS = {METHODS[0]: (1, 2)}  # of others: 1
_METHOD = re.compile(r"(wrap|momentum|shard|outer):([\w+=.]+):ranks=(\d+)")


@dataclass(frozen=True)
class Scale:
    """Size of a training."""

    steps: int = 930
    context: int = 512  # tokens of a sequence
    sequences: int = 128  # in a step of all ranks
    layers: int = 12
    width: int = 768
    characters: int = 400_000_000  # of text, at most
    batches: int = 32  # of held-out words


def rehearsal(ranks: int) -> Scale:
    """Ten steps of few tokens; of many ranks with few layers, which fit into memory together."""
    layers = 12 if ranks == 2 else 2
    return Scale(10, context=64, sequences=8, layers=layers, characters=20_000_000, batches=1)


@dataclass
class Course:
    """A training so far, on one rank."""

    step: int = 0
    losses: list[float] | None = None
    sent: float = 0.0  # bytes
    seconds: float = 0.0
    host_seconds: float = 0.0  # of these, in calls of the host; the rest waits for the device
    loss: float = math.nan  # on held-out text, at the end


def words(characters: int, workers: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Numbers of the words to train on, and of held-out ones, by frequency from 1 on; 0 for rare
    ones."""
    files = _files(characters)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        counts = Counter[str]()
        for each in pool.imap_unordered(_count, files, 64):
            counts.update(each)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: WORDS - 1]
        numbers = {word: rank for rank, (word, _) in enumerate(ranked, 1)}
    with multiprocessing.get_context("fork").Pool(workers, _know, (numbers,)) as pool:
        texts = pool.map(_number, files, 64)
    held = [text for at, text in enumerate(texts) if at % HELD_OUT == 0]
    return np.concatenate([t for at, t in enumerate(texts) if at % HELD_OUT]), np.concatenate(held)


def _files(characters: int) -> list[Path]:
    """Python files of the interpreter and its packages, in a fixed order."""
    paths = sysconfig.get_paths()
    folders = sorted({paths["stdlib"], paths["purelib"], paths["platlib"]})
    every = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    order = np.random.default_rng(0).permutation(len(every))
    chosen, total = list[Path](), 0
    for number in order:
        total += every[number].stat().st_size
        if total > characters:
            break
        chosen.append(every[number])
    return chosen


def _count(path: Path) -> Counter[str]:
    return Counter(tokenize(path.read_text("utf-8", errors="replace")))


_numbers: dict[str, int] = {}  # of words, in a worker


def _know(numbers: dict[str, int]) -> None:
    _numbers.update(numbers)


def _number(path: Path) -> NDArray[np.uint16]:
    found = [_numbers.get(word, 0) for word in tokenize(path.read_text("utf-8", errors="replace"))]
    return np.array(found, np.uint16)


def batch(
    text: NDArray[np.uint16], draw: Sequence[int], sequences: int, context: int
) -> torch.Tensor:
    """Sequences from random places of a text, int64 [sequences, context]; the same for a draw."""
    starts = np.random.default_rng(draw).integers(0, len(text) - context, sequences)
    return torch.from_numpy(np.stack([text[at : at + context] for at in starts]).astype(np.int64))


def rate(step: int, steps: int) -> float:
    """The share of the rate in a step: up for WARM steps, or a tenth, then a cosine to a tenth."""
    warm = min(WARM, max(1, steps // 10))
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Training:
    """A model that trains by a method, on one rank."""

    def __init__(self, method: str, seed: int, scale: Scale, device: torch.device) -> None:
        way, compressor = _parsed(method)[:2]
        torch.manual_seed(seed)
        plain = GPT2(scale.layers, scale.width, positions=scale.context).to(device)
        self.model: nn.Module = plain
        self.sync: Any = None  # what hipress reports on
        self.clip: Callable[[], object] = lambda: None
        self.after: Callable[[], None] = lambda: None  # called after each step of the optimizer
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
        if way == "momentum":
            frozen = round(FREEZE * scale.steps)
            kind = partial(hipress.optim.AdamW, freeze=frozen, max_norm=1.0)
        options: dict[str, Any] = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": 0.1}
        if way == "shard":
            for block in plain.transformer["h"]:  # type: ignore[attr-defined]
                fully_shard(block)
            gradients, weights = compressor.split("+")
            fully_shard(plain)
            hipress.shard(plain, reduce_scatter=gradients, all_gather=weights)
            self.sync = plain
            self.optimizer = kind(plain.parameters(), **options)
            self.clip = partial(nn.utils.clip_grad_norm_, [*plain.parameters()], 1.0)
            return
        self.optimizer = kind(plain.parameters(), **options)
        if way != "momentum":  # whose optimizer clips
            self.clip = partial(nn.utils.clip_grad_norm_, [*plain.parameters()], 1.0)
        if way == "outer":
            self.sync = hipress.Outer(plain, self.optimizer, compressor, every=30)
            self.after = self.sync.step
        else:
            optimizer = self.optimizer if way == "momentum" else None
            self.model = self.sync = hipress.wrap(plain, compressor, optimizer=optimizer)

    def state(self) -> dict[str, Any]:
        """This rank's states, for a checkpoint."""
        own = {} if self.sync is None else {"hipress": hipress.state_dict(self.sync)}
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **own
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from these."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.sync is not None:
            hipress.load_state_dict(self.sync, state["hipress"])


def train(
    training: Training,
    course: Course,
    text: NDArray[np.uint16],
    seed: int,
    scale: Scale,
    device: torch.device,
    until: float,
) -> None:
    """Take the steps that are left, but none that begins after `until`, a time of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = course.losses = course.losses or []
    mine = scale.sequences // ranks
    while course.step < scale.steps and _together(time.time() < until):
        begin = time.perf_counter()
        every = batch(text, (seed, course.step), scale.sequences, scale.context)
        tokens = every[rank * mine : (rank + 1) * mine].to(device)
        for group in training.optimizer.param_groups:
            group["lr"] = RATE * rate(course.step, scale.steps)
        training.optimizer.zero_grad()
        loss = training.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        training.clip()
        training.optimizer.step()
        training.after()
        course.step += 1
        course.host_seconds += time.perf_counter() - begin
        losses.append(float(loss.detach()))
        course.seconds += time.perf_counter() - begin


def _together(goes_on: bool) -> bool:
    """True if all ranks go on."""
    flag = torch.tensor(float(goes_on))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _most(step: int) -> int:
    """The step of the rank that is farthest."""
    most = torch.tensor(step)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def evaluate(training: Training, text: NDArray[np.uint16], scale: Scale, device: Any) -> float:
    """The mean loss on held-out words, of all ranks: the same words on each."""
    with torch.no_grad():
        found = [
            float(training.model(input_ids=t, labels=t).loss)
            for t in (
                batch(text, (0, number), 8, scale.context).to(device)
                for number in range(scale.batches)
            )
        ]
    mean = torch.tensor(statistics.fmean(found))
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _rank(
    rank: int, ranks: int, method: str, seed: int, scale: Scale, where: dict[str, Any]
) -> None:
    """A rank's part of a cell, which ends with a file `RANK.pt` in the folder."""
    folder, device = Path(where["folder"]), torch.device(where["device"])
    if device.type == "cpu":
        torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/rendezvous-{where['run']}"
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=store, rank=rank, world_size=ranks,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    text, held = np.load(folder / "text.npy"), np.load(folder / "held.npy")
    file = folder / f"{rank}.pt"
    saved = torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
    course = Course(**saved.get("course", {}))
    step = course.step if saved else -1
    if not _together(step == _most(step)):
        raise ValueError(f"the ranks' checkpoints are of different steps: delete {folder}")
    if course.step < scale.steps:
        training = Training(method, seed, scale, device)
        if saved:
            training.load(saved["training"])
        autocast = (
            torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()
        )
        with autocast:
            train(training, course, text, seed, scale, device, where["until"])
            if course.step == scale.steps:
                course.loss = evaluate(training, held, scale, device)
        if training.sync is not None:
            report = hipress.report(training.sync).to_dict()
            course.sent += report["sent_bytes" if "sent_bytes" in report else "bytes_sent"]
        whole = course.step == scale.steps
        saved = {"course": asdict(course), "training": {} if whole else training.state()}
        with replacing(file) as begun:
            torch.save(saved, begun)
    dist.destroy_process_group()


def _parsed(method: str) -> tuple[str, str, int]:
    """Way, compressors and number of ranks of a method. Raises ValueError."""
    found = _METHOD.fullmatch(method)
    if found is None:
        raise ValueError(f"unknown method {method!r}; one is {METHODS[1]!r}")
    if Scale.sequences % int(found[3]):
        raise ValueError(f"{method!r}: {Scale.sequences} sequences do not divide by its ranks")
    return found[1], found[2], int(found[3])


def measure(
    method: str, seed: int, scale: Scale, device: str, folder: Path, until: float
) -> dict[str, Any] | None:
    """Train until the end, or until the time is over; then None. folder: of the texts, and of the
    cell's checkpoint."""
    ranks = _parsed(method)[2]
    own = folder / f"{method}-{seed}-{scale.steps}".replace(":", "-")
    own.mkdir(exist_ok=True)
    for name in ("text.npy", "held.npy"):
        if not (own / name).exists():
            (own / name).symlink_to(folder / name)
    where = {"folder": str(own), "device": device, "until": until, "run": time.time_ns()}
    arguments = (ranks, method, seed, scale, where)
    start_processes(_rank, arguments, ranks)  # type: ignore[no-untyped-call]
    files = [torch.load(own / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    courses = [Course(**each["course"]) for each in files]
    first = courses[0]
    if first.step < scale.steps:
        return None
    steps = list(zip(*(each.losses or [] for each in courses), strict=True))
    tens = [
        statistics.fmean(map(statistics.fmean, steps[at : at + 10]))
        for at in range(0, len(steps), 10)
    ]
    return {
        "method": method, "seed": seed, "steps": scale.steps,
        "tokens": scale.sequences * scale.context,
        "loss": round(first.loss, 4), "curve": [round(each, 3) for each in tens],
        "bits": round(8 * first.sent / scale.steps / 124_439_808, 3),
        "ms": round(1e3 * first.seconds / scale.steps, 1),
        "host_ms": round(1e3 * first.host_seconds / scale.steps, 1),
    }  # fmt: skip


def missing(methods: Sequence[str], known: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """Methods and seeds that are not recorded."""
    have = {(each["method"], each["seed"]) for each in known}
    for method in methods:
        for seed in SEEDS.get(method, (1,)):
            if (method, seed) not in have:
                yield method, seed


def read(path: Path) -> list[dict[str, Any]]:
    """Recorded cells."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(
    method: Annotated[list[str] | None, typer.Option(help="by default all of METHODS")] = None,
    device: Annotated[str, typer.Option(help="of all ranks")] = "cuda",
    rehearse: Annotated[bool, typer.Option("--rehearse", help="ten steps on the CPU")] = False,
    minutes: Annotated[float, typer.Option(help="after which no step begins")] = math.inf,
    folder: Annotated[Path, typer.Option(help="texts and checkpoints")] = Path("/tmp/gpt2-losses"),
    output: Annotated[Path, typer.Option(help="JSON lines of results")] = CELLS,
) -> None:
    """Train GPT-2 small by methods whose losses are not recorded."""
    until = time.time() + 60 * min(minutes, 1e6)
    device = "cpu" if rehearse else device
    with refusing():
        for each in method or METHODS:
            _parsed(each)
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device: --rehearse takes ten steps on the CPU")
        folder.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
    if not (folder / "held.npy").exists():
        size = rehearsal(2) if rehearse else Scale()
        text, held = words(size.characters, os.cpu_count() or 1)
        np.save(folder / "text.npy", text)
        np.save(folder / "held.npy", held)
    text = np.load(folder / "text.npy")
    data = hashlib.sha256(text.tobytes()).hexdigest()[:8]
    print(f"{len(text):,} words to train on ({data})")
    for one, seed in missing(method or METHODS, read(output)):
        scale = rehearsal(_parsed(one)[2]) if rehearse else Scale()
        cell = measure(one, seed, scale, device, folder, until)
        if cell is None:
            print(f"{one} seed {seed}: out of time, its checkpoint is in {folder}")
            return
        about = {"data": data, "words": len(text), "date": now(),
                 "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                 "command": command_line("bench.gpt2_losses"),
                 "versions": {name: version(name) for name in ("hipress", "torch")}}  # fmt: skip
        with output.open("a") as file:
            file.write(json.dumps(cell | about) + "\n")
        print(f"{one} seed {seed}: {cell['loss']:.4f}, {cell['ms']} ms a step")


if __name__ == "__main__":
    typer.run(main)
