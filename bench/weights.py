"""Versions of weights for inference workers: their size and speed, beside copies of all weights.

    python -m bench.weights

Trains a small language model from weights in bfloat16 by AdamW in float32, for some steps at each
rate, and publishes the last step. Prints the share of values that changed, bits for each value, and
MB of the model a second from `publish` until it is written and for `apply`, checks and the writing
of files included, best of three.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hipress
from hipress.weights.delta_files import Item, write_tensors
from hipress.weights.deltas import ENCODINGS

RATES = (1e-7, 1e-6, 1e-5, 1e-4)
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
    write_tensors(folder / "model.safetensors", items, {})


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


def main() -> None:
    torch.set_num_threads(1)
    print("| rate | changed | version | bits | times fewer | publish, MB/s | apply, MB/s |")
    print("|---|---|---|---|---|---|---|")
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
            print(
                f"| {rate:g} | {changed:.2%} | {encoding or 'all weights'} | {8 * size / count:.3g}"
                f" | {2 * count / size:.1f} | {publish:.0f} | {apply:.0f} |"
            )


if __name__ == "__main__":
    main()
