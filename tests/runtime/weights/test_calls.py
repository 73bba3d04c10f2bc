"""What a forward is for: new, or the recomputation of an earlier one, by the place that autograd calls Python from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ds_slide.runtime.core.calls import Call, call_under_way, function_around, recomputing_nodes

FORWARD, REENTRANT, SAVED = Call.FORWARD, Call.REENTRANT, Call.SAVED_TENSORS


def x() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


class Probe:
    """A function of tensors that notes what it is called for."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, *_: Any) -> None:
        self.calls.append(call_under_way())

    def square(self, tensor: torch.Tensor) -> torch.Tensor:
        self()
        return (tensor * tensor).exp()


@pytest.mark.parametrize("use_reentrant, found", [(True, REENTRANT), (False, SAVED)])
def test_checkpoints_recompute(use_reentrant, found):
    probe = Probe()
    checkpoint(probe.square, x(), use_reentrant=use_reentrant).sum().backward()
    assert probe.calls == [FORWARD, found]


@pytest.mark.parametrize(
    "outer, inner, found",
    [
        (True, True, [FORWARD, REENTRANT, REENTRANT]),
        (False, False, [FORWARD, SAVED]),
        (True, False, [FORWARD, REENTRANT, SAVED]),
    ],
)
def test_checkpoints_within_checkpoints_recompute(outer, inner, found):
    probe = Probe()
    inside = functools.partial(checkpoint, probe.square, use_reentrant=inner)
    checkpoint(inside, x(), use_reentrant=outer).sum().backward()
    assert probe.calls == found


def _tensor_hook(probe: Probe) -> torch.Tensor:
    tensor = x() * 2
    tensor.register_hook(probe)
    return tensor


def _node_hook(probe: Probe) -> torch.Tensor:
    tensor = x() * 2
    tensor.grad_fn.register_hook(functools.partial(probe, "bound"))
    tensor.grad_fn.register_prehook(probe)
    return tensor


def _gradient_hook(probe: Probe) -> torch.Tensor:
    tensor = x()
    tensor.register_post_accumulate_grad_hook(probe)
    return tensor * 2


def _module_hook(probe: Probe) -> torch.Tensor:
    module = nn.Linear(3, 3)
    module.register_full_backward_hook(probe)
    module.register_full_backward_pre_hook(probe)
    return module(x())


def _callback(probe: Probe) -> torch.Tensor:
    tensor = x() * 2
    tensor.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(probe))
    return tensor


@pytest.mark.parametrize("made", [_tensor_hook, _node_hook, _gradient_hook, _module_hook, _callback])
def test_hooks_begin_new_forwards(made: Callable[[Probe], torch.Tensor]):
    probe = Probe()
    made(probe).sum().backward()
    assert set(probe.calls) == {FORWARD}


def test_a_backward_within_a_recomputation_has_hooks_of_its_own():
    """The Function's backward runs another one, whose hook begins a new forward."""
    probe = Probe()

    def hooked(tensor: torch.Tensor) -> torch.Tensor:
        result = probe.square(tensor)
        if result.requires_grad:
            result.register_hook(probe)
        return result

    checkpoint(hooked, x(), use_reentrant=True).sum().backward()
    assert probe.calls == [FORWARD, REENTRANT, FORWARD]


def test_an_unpack_hook_of_others_recomputes():
    probe = Probe()

    def unpack_by_computing(saved: torch.Tensor) -> torch.Tensor:
        probe()
        return saved

    with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack_by_computing):
        result = x().exp()
    result.sum().backward()
    assert probe.calls == [SAVED]


class _Recomputing(torch.autograd.Function):
    """Notes the context that is found around its forward, and the nodes in its backward."""

    @staticmethod
    def forward(ctx: Any, found: list[Any], tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found.append(function_around(None) is ctx)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        assert list(recomputing_nodes()) == [ctx]
        return None, gradient


def test_the_function_around_a_forward_is_found():
    found: list[Any] = []
    _Recomputing.apply(found, x()).sum().backward()
    assert found == [True]
    with torch.no_grad():
        assert function_around(None) is None


def test_the_outermost_function_is_found():
    """Only its backward recomputes: what is within has no graph."""
    found: list[Any] = []

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            found.append(function_around(None))
        return tensor * 2

    result = checkpoint(functools.partial(checkpoint, inside, use_reentrant=True), x(), use_reentrant=True)
    assert found == [result.grad_fn]
