"""Networks that no package has, after their papers: shapes and order of the work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["UGATIT", "Translation", "Words", "ugatit_loss"]


class Words(nn.Module):
    """The word language model of PyTorch's examples: an embedding, an LSTM, a decoder."""

    def __init__(self, vocabulary: int, width: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, vocabulary)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Words [length, batch] to logits."""
        out: torch.Tensor = self.decoder(self.rnn(self.encoder(words))[0])
        return out


class Translation(nn.Module):
    """Transformer (base) with one embedding for source, target and output (Vaswani et al. 2017)."""

    def __init__(self, vocabulary: int = 33708, width: int = 512, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, 8, layers, layers, 4 * width, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Words [batch, length] of both languages to logits."""
        out: torch.Tensor = self.body(self.embedding(source), self.embedding(target))
        return out @ self.embedding.weight.t()


def _convolution(into: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(into, out, kernel, stride, kernel // 2, bias=False)


class _Mixed(nn.Module):
    """A learned mean of instance and layer normalization."""

    def __init__(self, width: int, affine: bool) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.empty(1, width, 1, 1))
        if affine:
            self.gamma, self.beta = (nn.Parameter(torch.empty(1, width, 1, 1)) for _ in range(2))

    def forward(
        self, x: torch.Tensor, gamma: torch.Tensor | None = None, beta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalized x [batch, width, height, width]; scale and shift are given, or its own."""
        one, other = ((x - x.mean(d, True)) * x.var(d, keepdim=True).add(1e-5).rsqrt()
                      for d in ((2, 3), (1, 2, 3)))  # fmt: skip
        mixed = self.rho * one + (1 - self.rho) * other
        if gamma is None or beta is None:
            return mixed * self.gamma + self.beta
        return mixed * gamma[:, :, None, None] + beta[:, :, None, None]


class _Attention(nn.Module):
    """Channels weighted by the features by which the discriminator tells the domains apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.average, self.largest = (nn.Linear(width, 1, bias=False) for _ in range(2))
        self.mix = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted x, and logits of the domain."""
        logits = torch.cat([self.average(x.mean((2, 3))), self.largest(x.amax((2, 3)))], 1)
        ways = (self.average, self.largest)
        x = torch.cat([x * each.weight[:, :, None, None] for each in ways], 1)
        return self.mix(x), logits


class _Block(nn.Module):
    """A residual block with given scale and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = (_convolution(width, width, 3) for _ in range(2))
        self.first, self.second = (_Mixed(width, False) for _ in range(2))

    def forward(self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Images with as many channels as the input."""
        inner: torch.Tensor = self.first(self.one(x), gamma, beta).relu()
        added: torch.Tensor = x + self.second(self.other(inner), gamma, beta)
        return added


class _Generator(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 4, side: int = 256) -> None:
        super().__init__()
        w = 4 * width
        self.down = nn.Sequential(
            _convolution(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU(),
            _convolution(width, w // 2, 3, 2), nn.InstanceNorm2d(w // 2), nn.ReLU(),
            _convolution(w // 2, w, 3, 2), nn.InstanceNorm2d(w), nn.ReLU(),
        )  # fmt: skip
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _convolution(w, w, 3), nn.InstanceNorm2d(w), nn.ReLU(),
                _convolution(w, w, 3), nn.InstanceNorm2d(w),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.attention = _Attention(w)
        self.scales = nn.Sequential(
            nn.Linear((side // 4) ** 2 * w, w, bias=False), nn.ReLU(),
            nn.Linear(w, w, bias=False), nn.ReLU(),
        )  # fmt: skip
        self.gamma, self.beta = (nn.Linear(w, w, bias=False) for _ in range(2))
        self.up = nn.ModuleList(_Block(w) for _ in range(blocks))
        self.out = nn.Sequential(
            nn.Upsample(scale_factor=2), _convolution(w, w // 2, 3), _Mixed(w // 2, True),
            nn.ReLU(), nn.Upsample(scale_factor=2), _convolution(w // 2, width, 3),
            _Mixed(width, True), nn.ReLU(), _convolution(width, 3, 7), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images of the other domain, and logits."""
        x = self.down(x)
        for block in self.blocks:
            x = x + block(x)
        x, logits = self.attention(x)
        x = x.relu()
        scales = self.scales(x.flatten(1))
        gamma, beta = self.gamma(scales), self.beta(scales)
        for block in self.up:
            x = block(x, gamma, beta)
        return self.out(x), logits


class _Discriminator(nn.Module):
    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        body: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for i in range(1, layers - 1):
            stride = 2 if i < layers - 2 else 1
            body += [nn.Conv2d(width, 2 * width, 4, stride, 1), nn.LeakyReLU(0.2)]
            width *= 2
        self.body, self.attention = nn.Sequential(*body), _Attention(width)
        self.last = nn.Conv2d(width, 1, 4, 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of being real, by place, and of the domain."""
        x, logits = self.attention(self.body(x))
        return self.last(F.leaky_relu(x, 0.2)), logits


class UGATIT(nn.Module):
    """Two generators, and two discriminators for each (Kim et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.ab, self.ba = _Generator(), _Generator()
        self.judges = nn.ModuleList(_Discriminator(layers) for layers in (7, 7, 5, 5))


def ugatit_loss(model: UGATIT, images: tuple[torch.Tensor, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Two passes: the discriminators on the generators' images, then the generators."""
    x, y = images
    with torch.no_grad():
        translated = (model.ba(y)[0], model.ab(x)[0]) * 2
    real = (x, y) * 2
    yield _judged(model, real) + _judged(model, translated)
    to_y, first = model.ab(x)
    to_x, second = model.ba(y)
    passed = [model.ba(to_y)[0], model.ab(to_x)[0], *model.ba(x), *model.ab(y), first, second]
    for parameter in model.judges.parameters():
        parameter.requires_grad_(False)
    fooled = _judged(model, (to_x, to_y) * 2)
    yield fooled + torch.stack([each.mean() for each in passed]).sum()
    for parameter in model.judges.parameters():
        parameter.requires_grad_(True)


def _judged(model: UGATIT, images: tuple[torch.Tensor, ...]) -> torch.Tensor:
    def each() -> Iterator[torch.Tensor]:
        for judge, image in zip(model.judges, images, strict=True):
            yield from (value.mean() for value in judge(image))

    return torch.stack([*each()]).sum()
