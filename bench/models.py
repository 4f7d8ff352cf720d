"""Make hipress/tools/models/*.json: work of known networks, measured on the meta device.

    python -m bench.models [NAME ...]     # writes the files of all models, or of these

torchvision and transformers have these networks. The files of `lstm`, `lstm-ptb`, `transformer` and
`ugatit` name the sources that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from bench.commands import refusing
from hipress.errors import unknown
from hipress.tools import models
from hipress.tools.models import roofline
from hipress.tools.models.known import Model, write

PATH = Path(models.__file__).parent


@dataclass(frozen=True)
class Recipe:
    """A network, and the batch on which a device trains it in a step."""

    source: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    batch: int
    unit: str
    loss: roofline.Loss = roofline.mean

    def measure(self, name: str) -> Model:
        """The work of the network."""
        about = {"source": self.source, "batch": self.batch, "unit": self.unit}
        return roofline.measure(name, lambda: (self.make(), self.inputs()), self.loss, **about)


def _images(count: int, side: int = 224) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.empty(count, 3, side, side),)


def _words(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.empty(*shape, dtype=torch.long),)


def _vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        try:
            torch.ops.torchvision.nms  # noqa: B018
        except AttributeError:  # torchvision for CUDA, torch without: operators are missing
            for operator in ("torchvision::nms", "torchvision::qnms"):
                torch.library.define(operator, "(Tensor dets, Tensor scores, float t) -> Tensor")
        from torchvision import models as vision

        model: nn.Module = getattr(vision, name)()
        return model

    return make


def _language(kind: str, config: str, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        settings = getattr(transformers, config)(**changes, attn_implementation="eager")
        model: nn.Module = getattr(transformers, kind)(settings)
        return model

    return make


def _logits(model: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of a language model's predictions."""
    out = model(*inputs)
    heads = [out[key] for key in _HEADS if key in out]
    return torch.stack([each.float().mean() for each in heads]).sum()


_HEADS = ("logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits")
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
          "intermediate_size": 4096}  # fmt: skip
_LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
_LLAMA_1B = {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "tie_word_embeddings": True}  # fmt: skip


def _net(name: str, count: int = 32) -> Recipe:
    source = f"torchvision.models.{name}, {count} images of 224 x 224"
    return Recipe(source, _vision(name), _images(count), count, "images")


def _bert(kind: str, large: bool, batch: int, length: int) -> Recipe:
    make = _language(kind, "BertConfig", **(_LARGE if large else {}))
    source = f"transformers.{kind}, {batch} sequences of {length}"
    return Recipe(source, make, _words(batch, length), batch * length, "tokens", _logits)


RECIPES: Mapping[str, Recipe] = {
    "vgg16": _net("vgg16"),
    "vgg19": _net("vgg19"),
    "resnet50": _net("resnet50"),
    "resnet101": _net("resnet101"),
    "vit-l": _net("vit_l_16"),
    "bert-base": _bert("BertForPreTraining", False, 32, 128),
    "bert-large": _bert("BertForPreTraining", True, 32, 128),
    "bert-base-qa": _bert("BertForQuestionAnswering", False, 8, 384),
    "bert-large-qa": _bert("BertForQuestionAnswering", True, 8, 384),
    "gpt2": Recipe(
        "transformers.GPT2LMHeadModel, 8 sequences of 1024",
        _language("GPT2LMHeadModel", "GPT2Config"), _words(8, 1024), 8192, "tokens", _logits,
    ),
    "llama-8b": Recipe(
        "transformers.LlamaForCausalLM of Llama 3 8B, a sequence of 4096",
        _language("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _words(1, 4096), 4096, "tokens",
        _logits,
    ),
    "llama-1b": Recipe(
        "transformers.LlamaForCausalLM of Llama 3.2 1B, a sequence of 4096",
        _language("LlamaForCausalLM", "LlamaConfig", **_LLAMA_1B), _words(1, 4096), 4096, "tokens",
        _logits,
    ),
}  # fmt: skip


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Models; by default all.")] = None,
) -> None:
    """Write the files of models."""
    with refusing():
        for name in names or RECIPES:
            if name not in RECIPES:
                raise unknown("model", name, RECIPES)
            model = RECIPES[name].measure(name)
            write(model, PATH / f"{name}.json")
            print(_line(model), flush=True)


def _line(model: Model) -> str:
    size, work = 4 * model.numel / 1e6, model.work
    return (
        f"{model.name:14} {len(model.gradients):4} gradients, {size:9.1f} MB, "
        f"{1e-12 * work.flops:6.2f} TFLOP, {1e-9 * (work.product_bytes + work.other_bytes):7.1f} GB"
    )


if __name__ == "__main__":
    typer.run(main)
