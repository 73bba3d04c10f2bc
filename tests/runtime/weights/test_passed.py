"""Differentiable tensors in the fields of objects: found, exchanged and put back."""

from __future__ import annotations

import argparse
import types
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ds_slide.runtime.weights.passed import DEPTH, MOST_OBJECTS, fields_in, put, restore, tensors_of

Pair = namedtuple("Pair", ["a", "b"])


@dataclass(slots=True, frozen=True)
class Slots:
    x: Any
    y: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Any


class Own(dict):
    """A dictionary that answers to attributes."""

    __getattr__ = dict.__getitem__


class Base:
    __slots__ = ("x",)


class Derived(Base):
    """Has a slot and a dictionary."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


def tensor() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


OBJECTS = {
    "dataclass": Frozen,
    "slots": Slots,
    "namespace": lambda x: types.SimpleNamespace(inner=argparse.Namespace(x=x)),
    "user's dictionary": lambda x: UserDict(x=x),
    "dictionary of a class": lambda x: Own(x=x),
    "list": lambda x: types.SimpleNamespace(x=[1, [x]]),
    "tuple": lambda x: types.SimpleNamespace(x=(1, (x, "a"))),
    "named tuple": lambda x: types.SimpleNamespace(x=Pair(x, 2)),
    "ordered": lambda x: types.SimpleNamespace(x=OrderedDict(x=x)),
    "object in a tuple": lambda x: types.SimpleNamespace(x=(Frozen(x), 2)),
    "derived": lambda x: Derived(x, x),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_tensor_is_exchanged_and_put_back(name):
    x, other = tensor(), tensor()
    thing = OBJECTS[name](x)
    fields = fields_in((thing,), {})
    assert [id(each) for each in tensors_of(fields)] == [id(x)]
    held = put(fields, {id(x): other})
    assert [id(each) for each in tensors_of(fields_in(thing))] == [id(other)]
    restore(fields, held)
    assert [id(each) for each in tensors_of(fields_in(thing))] == [id(x)]


def test_what_the_block_has_set_stays():
    x, other, new = tensor(), tensor(), tensor()
    state, trail = argparse.Namespace(x=x, y=x), [x]
    fields = fields_in(state, argparse.Namespace(trail=trail))
    held = put(fields, {id(x): other})
    state.x = new
    trail.clear()
    restore(fields, held)
    assert state.x is new and state.y is x and trail == []


def test_only_what_can_have_a_gradient_is_a_field():
    state = argparse.Namespace(a=torch.ones(2), b=torch.arange(3), c="text", d=None, e=nn.Linear(2, 2), f=torch.float32)
    assert fields_in(state, state, 3, None) == []


def test_circles_and_depths_end():
    chain = argparse.Namespace(x=tensor())
    chain.me = chain
    assert len(fields_in(chain)) == 1
    for _ in range(DEPTH):
        chain = argparse.Namespace(inner=chain)
    assert fields_in(chain) == []
    many = [argparse.Namespace(x=tensor()) for _ in range(2 * MOST_OBJECTS)]
    assert 0 < len(fields_in(many)) <= MOST_OBJECTS


def test_a_property_is_not_asked():
    class Lazy:
        @property
        def x(self) -> torch.Tensor:
            raise AssertionError("computed")

    assert fields_in(Lazy()) == []
