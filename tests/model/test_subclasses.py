"""Tensor subclasses that are taken apart into plain tensors, and made of them again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from packed import PackedTensor
from torch import nn

from ds_slide.model.carried import find_carried, packed_tensors
from ds_slide.model.subclasses import take_apart


class Layered(torch.Tensor):
    """A subclass of a subclass and a plain tensor, as torchao's older layouts. It has no operators."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, offset: torch.Tensor) -> Layered:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.bfloat16, device=inner.device)

    def __init__(self, inner: torch.Tensor, offset: torch.Tensor) -> None:
        self.inner, self.offset = inner, offset

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner", "offset"], "context"

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, torch.Tensor], context: str, size: Any, _stride: Any) -> Layered:
        assert context == "context" and size == (8, 16)
        return cls(tensors["inner"], tensors["offset"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(args[0].inner.detach(), args[0].offset.detach())


def linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def test_the_largest_tensor_is_the_parameter_and_the_others_are_beside_it() -> None:
    weight = PackedTensor.of(torch.randn(8, 16))
    model = nn.Sequential(linear(weight), nn.Linear(8, 8))
    x = torch.randn(2, 16, dtype=torch.bfloat16)
    expected = model[0](x)
    take_apart(model)
    (packed,) = [parameter for parameter in model.parameters() if parameter.dtype == torch.int8]
    assert packed.data_ptr() == weight.codes.data_ptr() and not packed.requires_grad
    assert [each.data_ptr() for each in packed_tensors(model)] == [weight.scales.data_ptr()]
    assert type(model[0].weight) is PackedTensor and torch.equal(model[0](x), expected)
    assert not find_carried(model).get(model[0].parametrizations.weight)  # 32 bytes are not worth a place
    names = ["parametrizations.weight.original", "parametrizations.weight.0.packed_scales"]
    assert list(model[0].state_dict()) == names
    copied = copy.deepcopy(model)
    copied[0].parametrizations.weight.original.zero_()
    assert not copied[0](x).any() and torch.equal(model[0](x), expected)


def test_subclasses_in_subclasses_and_shared_ones() -> None:
    weight = Layered(PackedTensor.of(torch.randn(8, 16)), torch.ones(1))
    first, second = linear(weight), nn.Linear(1, 1)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    take_apart(model)
    assert first.parametrizations.weight.original is second.parametrizations.weight.original
    found = second.weight
    assert type(found) is Layered and type(found.inner) is PackedTensor
    assert torch.equal(found.inner.codes, weight.inner.codes) and torch.equal(found.inner.scales, weight.inner.scales)
    assert torch.equal(found.offset, weight.offset)
    assert len(list(packed_tensors(first))) == 2


def test_what_trains_and_plain_parameters_stay() -> None:
    model = nn.Sequential(linear(PackedTensor.of(torch.randn(8, 16))), nn.Linear(8, 8))
    model[0].weight.requires_grad_(True)
    before = list(model.parameters())
    take_apart(model)
    assert all(each is parameter for each, parameter in zip(model.parameters(), before, strict=True))
