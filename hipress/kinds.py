"""Kinds of parameters with small or sparse gradients; patterns name them after an @."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hipress.errors import unknown

__all__ = ["KINDS", "is_kind", "kinds_of", "refuse_unknown"]

#: 1d: at most one dimension, such as biases and norms. embedding: a table of nn.Embedding or
#: nn.EmbeddingBag, tied or not. head: the last module whose weight has two dimensions or more.
KINDS = ("@1d", "@embedding", "@head")


def is_kind(pattern: str) -> bool:
    """True for the name of a kind, known or not."""
    return pattern.startswith("@")


def refuse_unknown(pattern: str) -> None:
    """Raise ConfigError for a pattern that begins with @ and names no kind."""
    if is_kind(pattern) and pattern not in KINDS:
        raise unknown("kind of parameters", pattern, KINDS)


def kinds_of(model: nn.Module) -> Mapping[nn.Parameter, set[str]]:
    """The kinds of a model's parameters; parameters without a kind are left out."""
    found: dict[nn.Parameter, set[str]] = {}
    last: nn.Module | None = None
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.dim() <= 1:
                found.setdefault(parameter, set()).add("@1d")
            elif isinstance(part, nn.Embedding | nn.EmbeddingBag):
                found.setdefault(parameter, set()).add("@embedding")
            elif parameter is getattr(part, "weight", None):
                last = part
    for parameter in last.parameters(recurse=False) if last is not None else ():
        found.setdefault(parameter, set()).add("@head")
    return found
