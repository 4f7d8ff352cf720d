"""Kinds of parameters with small or sparse gradients; patterns name them after an @."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hipress.errors import unknown

__all__ = ["KINDS", "is_kind", "kinds_of", "refuse_unknown"]

#: 1d: at most one dimension, such as biases and norms. embedding: a table of nn.Embedding or
#: nn.EmbeddingBag, tied or not. head: the last module whose weight has two dimensions or more,
#: unless it is in a ModuleList, as blocks are: then the words' embedding is the head.
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
    kinds: dict[nn.Parameter, set[str]] = {}
    last: str | None = None  # name of the last module with such a weight
    for name, part in model.named_modules():
        for parameter in part.parameters(recurse=False):
            if parameter.dim() <= 1:
                kinds.setdefault(parameter, set()).add("@1d")
            elif isinstance(part, nn.Embedding | nn.EmbeddingBag):
                kinds.setdefault(parameter, set()).add("@embedding")
            elif parameter is getattr(part, "weight", None):
                last = name
    if last is not None and not _is_listed(model, last):
        for parameter in model.get_submodule(last).parameters(recurse=False):
            kinds.setdefault(parameter, set()).add("@head")
    return kinds


def _is_listed(model: nn.Module, name: str) -> bool:
    """True for a module in a ModuleList, such as a model's blocks: the last of these is no head."""
    lists = [each for each, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    return any(name.startswith(f"{each}.") for each in lists)
