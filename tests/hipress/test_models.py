"""Models as data: the work of a step on the meta device, files, and users' own models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hipress.errors import ConfigError
from hipress.tools.models import own, roofline
from hipress.tools.models.known import Gradient, Model, list_models, load, read, write
from hipress.tools.models.work import Speed, Work

NUMBERS = Speed(flops=1e9, bandwidth=1e8, launch=1e-3)


class Tied(nn.Module):
    """A weight that is used twice, a layer that is frozen, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.second(self.first(x).relu()))


def tied():
    return Tied(), torch.empty(4, 8)


def alone():
    return Tied()


def looked_at():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    return Looks(3, 3), (torch.empty(2, 3),)


def named():
    class Keywords(nn.Linear):
        def forward(self, *, x):
            return {"loss": super().forward(x).mean()}

    return Keywords(3, 3), {"x": torch.empty(2, 3)}, lambda model, inputs: model(**inputs)["loss"]


def test_seconds_are_those_of_the_roofline():
    """Products take the time of their operations or their bytes, other kernels that of their bytes;
    each kernel has a launch."""
    assert NUMBERS.seconds(Work(2e9, 1e6, 5e7, 3)) == pytest.approx(2 + 0.5 + 0.003)
    assert NUMBERS.seconds(Work(1e6, 1e8, 0, 0)) == pytest.approx(1)
    halves = Speed(1e9, 1e8, 0.0, width=0.5)
    assert halves.seconds(Work(0, 1e8, 1e8, 7)) == pytest.approx(1)
    assert Work.total([Work(1, 2, 3, 4)] * 2) == Work(2, 4, 6, 8)


def test_gradients_come_in_the_order_of_autograd():
    """A shared weight's gradient comes when its first use has added its share."""
    found = roofline.measure("tied", tied_inputs)
    assert [each.name for each in found.gradients] == [
        "second.bias",
        "first.weight",
        "first.bias",
    ] or [each.name for each in found.gradients] == ["second.bias", "first.bias", "first.weight"]
    order = []
    module, x = tied()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    module(x).mean().backward()
    assert [each.name for each in found.gradients] == order


def tied_inputs():
    module, x = tied()
    return module, (x,)


def test_products_are_counted():
    """A linear layer: as many operations in the forward pass as for the weight's gradient."""
    model = roofline.measure(
        "line", lambda: (nn.Linear(64, 32, bias=False), (torch.empty(16, 64),))
    )
    product = 2 * 16 * 64 * 32
    assert model.forward.flops == product
    assert sum(each.work.flops for each in model.gradients) == product
    assert model.work.product_bytes == 2 * 4 * (16 * 64 + 64 * 32 + 16 * 32)
    timed = model.timed(NUMBERS)
    assert timed.step == pytest.approx(timed.forward + timed.ready[-1])
    assert timed.scaled(3.0).step == pytest.approx(3.0)


def test_several_backward_passes():
    """Gradients of the first pass come before the second pass's forward pass."""

    def loss(model, inputs):
        yield model[0](*inputs).mean()
        yield model[1](*inputs).mean()

    def make():
        return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), (torch.empty(4, 8),)

    found = roofline.measure("two", make, loss)
    names = [each.name for each in found.gradients]
    assert {name[0] for name in names[:2]} == {"0"}
    second = [each.work.flops for each in found.gradients if each.name.startswith("1")]
    assert sum(second) == 2 * found.forward.flops  # its own forward pass, and the gradient


@pytest.mark.parametrize("name", list_models())
def test_models_of_the_package(name, tmp_path):
    """A file that is written again is the same, and its numbers are plausible."""
    model = load(name)
    write(model, tmp_path / "model.json")
    assert read(tmp_path / "model.json") == model
    assert model.source
    assert model.batch > 0
    assert model.numel > 10e6
    alone = model.timed(Speed(1e13, 1e12))
    assert 0.1 < alone.forward / alone.step < 0.5
    assert list(alone.ready) == sorted(alone.ready)


def test_sizes_that_are_known():
    sizes = {"vgg16": 138_357_544, "resnet50": 25_557_032, "bert-large": 336_226_108,
             "llama-8b": 8_030_261_248, "llama-1b": 1_235_814_400, "gpt2": 124_439_808}  # fmt: skip
    assert {name: load(name).numel for name in sizes} == sizes


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1),
            st.lists(st.integers(1, 9), max_size=4),
            st.tuples(*[st.integers(0, 1 << 50)] * 4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_model_is_read_as_it_was_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("models") / "m.json"
    gradients = tuple(
        Gradient(name, tuple(shape), Work(*map(float, work))) for name, shape, work in rows
    )
    model = Model("m", gradients, Work(1.0, 2.0, 3.0, 4.0), "a test", 3, "images")
    write(model, path)
    assert read(path) == model


def test_models_of_ones_own():
    here = "tests.hipress.test_models"
    found = own.find(f"{here}:tied")
    assert not found.assumed
    assert [each.name for each in found.params] == ["first.weight", "first.bias", "second.bias",
                                                    "unused.weight", "unused.bias"]  # fmt: skip
    assert {each.name for each in found.backwards} == {"second.bias", "first.weight", "first.bias"}
    assert own.find(f"{here}:named").model.forward.flops == 2 * 2 * 3 * 3
    shapes = own.find("20x5,7")
    assert (shapes.model.numel, shapes.assumed) == (107, (own.BY_ELEMENTS,))
    assert own.find(f"{here}:alone").assumed == (own.BY_ELEMENTS,)
    assert own.find("resnet50").backwards[0].name == "fc.bias"


@pytest.mark.parametrize(
    "text, told",
    [
        ("resnet5", "did you mean 'resnet50'"),
        ("tests.hipress.test_models:looked_at", "Looks does not run on the meta device"),
        ("tests.hipress.test_models:NUMBERS", "makes no model: TypeError"),
        ("3x0", "shapes such as"),
    ],
)
def test_models_that_are_none(text, told):
    with pytest.raises(ConfigError, match=told):
        own.find(text)
