"""Two ranks over gloo, each with a flat piece of every matrix, train with Muon on whole matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import two_ranks
from muon_ranks_worker import RUNS
from small_parameters_worker import OddModel, batches

from ds_slide.optim.muon import orthogonal

WORKER = "muon_ranks_worker.py"


class PlainMuon(torch.optim.Optimizer):
    """Muon of all matrices and AdamW of the rest, as in the worker's JSON."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        self.count += 1
        for p in self.param_groups[0]["params"]:
            state, gradient = self.state[p], p.grad
            if p.dim() > 1:
                momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(gradient, 0.05)
                update = orthogonal(gradient.lerp(momentum, 0.95)[None], "gram", torch.float32)[0]
                lr, update = 0.01, update * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            else:
                first = state.setdefault("first", torch.zeros_like(p)).lerp_(gradient, 0.1)
                second = state.setdefault("second", torch.zeros_like(p)).lerp_(gradient.square(), 0.05)
                root = (second / (1 - 0.95**self.count)).sqrt() + 1e-6
                lr, update = 1e-3, first / (1 - 0.9**self.count) / root
            p.mul_(1 - lr * 0.1).sub_(update, alpha=lr)


def plain(clip: float) -> dict[str, torch.Tensor]:
    """Plain torch with both batches: masters and momentum at the end."""
    model = OddModel()
    optimizer = PlainMuon(model.parameters())
    for _ in two_ranks.plain_steps(model, optimizer, batches(), clip):
        pass
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        if parameter.dim() > 1:
            found[f"momentum of {name}"] = optimizer.state[parameter]["momentum"]
    return found


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", [name for name in RUNS if "update" not in name and "stock" not in name])
def test_two_ranks_train_as_plain_torch_does(name: str, seen: list[dict[str, Any]]) -> None:
    expected = plain(RUNS[name][1])
    start = dict(OddModel().named_parameters())
    moved = max(float((expected[key] - value.detach()).abs().max()) for key, value in start.items())
    assert moved > 0.01
    for results in seen:
        close(results[name], expected)


@pytest.mark.parametrize("name", ["free", "by the update"])
def test_two_ranks_train_as_stock_does(name: str, seen: list[dict[str, Any]]) -> None:
    for results in seen:
        close(results[name], results[f"stock, {name}"])


@pytest.mark.parametrize("name", [name for name in RUNS if "on the GPU" in name])
def test_states_on_the_gpu_have_the_same_bits(name: str, seen: list[dict[str, Any]]) -> None:
    for results in seen:
        found, expected = results[name], results[name.partition(",")[0]]
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_states_that_move_have_the_same_bits(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        assert all(torch.equal(results["moved"][key], value) for key, value in results["clipped"].items())


def test_a_resumed_run_of_two_ranks_continues_to_the_bit(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        expected, found = results["resumed"]
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_updates_under_backward_are_refused(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        assert "defer_updates is false, but Muon gathers the matrices of 2 ranks in the step" in results["refusal"]
