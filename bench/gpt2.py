"""GPT-2 in plain torch, with the parameters' names of transformers, which a machine may lack."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Output:
    """The mean loss of the next token."""

    loss: torch.Tensor


class Linear(nn.Module):
    """y = x W + b, W: [inputs, outputs], as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Causal attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Linear(width, 3 * width), Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(x).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class Block(nn.Module):
    """Attention, then two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.ModuleDict(
            {"c_fc": Linear(width, 4 * width), "c_proj": Linear(4 * width, width)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        wide = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        y: torch.Tensor = x + self.mlp["c_proj"](wide)
        return y


class GPT2(nn.Module):
    """GPT-2; by default small, with 124.4 million parameters. The head is the words' embedding."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257,
        positions: int = 1024,
    ) -> None:  # fmt: skip
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(words, width), "wpe": nn.Embedding(positions, width),
            "h": nn.ModuleList(Block(width, heads) for _ in range(layers)),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        for name in ("wte", "wpe"):
            nn.init.normal_(self.transformer[name].weight, std=0.02)  # type: ignore[arg-type]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        """The loss. Both are int64 [sequences, tokens]; a label is the token at its place."""
        parts = self.transformer
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = parts["wte"](input_ids) + parts["wpe"](places)
        for block in parts["h"]:  # type: ignore[attr-defined]
            x = block(x)
        logits = parts["ln_f"](x)[:, :-1] @ parts["wte"].weight.T
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
