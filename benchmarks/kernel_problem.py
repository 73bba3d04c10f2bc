"""One kernel at one shape: inputs, the systems that compute it, and an fp64 reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which the kernels do; whoever imports these imports this module first.
    os.environ.setdefault("TRITON_INTERPRET", "1")

System = Callable[..., Any]
# Called when the problem is set up, so that a system which is not installed fails there, with a reason.
Factory = Callable[[], System]
Results = dict[str, Tensor]

DTYPE = torch.bfloat16


@dataclass
class Problem:
    """`systems` take the tensors of `inputs` in this order and return the tensors named `outputs`."""

    kernel: str
    shape: str
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    systems: dict[str, Factory]
    reference: Callable[[], Results]
    """fp64 results: outputs by name, gradients as "d " + the input's name."""
    forward_bytes: int
    """Bytes that an ideal kernel reads and writes."""
    backward_bytes: int = 0
    gradients: tuple[str, ...] = ()
    """Inputs whose gradient is taken; none for operations without a backward pass."""
    upstream: tuple[Tensor, ...] = ()
    """Gradients of the outputs; empty for a scalar loss."""
    absent: dict[str, str] = field(default_factory=dict)
    """Systems that have no such operation, with the reason."""
    flops: int = 0
    """Of forward and backward together (loss only); the forward has a third."""
    gemms: Callable[[], dict[str, Callable[[], object]]] | None = None
    """Plain matrix products of the same size, by mode (loss only)."""

    def __post_init__(self) -> None:
        for name in self.gradients:
            self.inputs[name].requires_grad_()
        self._pristine = {name: tensor.detach().clone() for name, tensor in self.inputs.items()}
        self._pristine_upstream = [tensor.clone() for tensor in self.upstream]

    @property
    def modes(self) -> tuple[str, ...]:
        return ("forward + backward", "forward") if self.gradients else ("forward",)

    def bytes_of(self, mode: str) -> int:
        return self.forward_bytes + (0 if mode == "forward" else self.backward_bytes)

    def flops_of(self, mode: str) -> int:
        return self.flops // 3 if mode == "forward" else self.flops

    def restore(self) -> None:
        """Undo what a system wrote into its inputs."""
        with torch.no_grad():
            for name, tensor in self.inputs.items():
                tensor.detach().copy_(self._pristine[name])
            for tensor, kept in zip(self.upstream, self._pristine_upstream, strict=True):
                tensor.copy_(kept)

    def overwrites(self) -> bool:
        """Whether the system that ran last wrote into what it was given."""
        pairs = [(tensor.detach(), self._pristine[name]) for name, tensor in self.inputs.items()]
        pairs += list(zip(self.upstream, self._pristine_upstream, strict=True))
        return any(not torch.equal(now, kept) for now, kept in pairs)

    def run(self, system: System, mode: str) -> Results:
        """Call a system once; results by name."""
        # The loss alone is that of evaluation, where hidden states need no gradient and weights still say they do; the
        # other forwards are those of training.
        evaluation = bool(self.flops) and mode == "forward"
        arguments = [
            tensor.detach() if evaluation and name != "weight" else tensor for name, tensor in self.inputs.items()
        ]
        with torch.set_grad_enabled(bool(self.gradients) and not evaluation):
            returned = system(*arguments)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        results = dict(zip(self.outputs, outputs, strict=True))
        if mode == "forward":
            return results
        wanted = [self.inputs[name] for name in self.gradients]
        gradients = torch.autograd.grad(outputs, wanted, self.upstream or None)
        return results | {f"d {name}": found for name, found in zip(self.gradients, gradients, strict=True)}


def errors(found: Results, expected: Results) -> dict[str, dict[str, float]]:
    """By result: the largest deviation over the largest magnitude of the reference, and the ratio of the L2 norms."""
    table = {}
    for name, tensor in found.items():
        reference = expected[name]
        difference = tensor.detach().double() - reference
        largest, norm = reference.abs().max(), reference.norm()
        table[name] = {"max": float(difference.abs().max() / largest), "l2": float(difference.norm() / norm)}
    return table


def by_autograd(
    function: System, inputs: dict[str, Tensor], outputs: tuple[str, ...], gradients: tuple[str, ...], upstream: Any
) -> Results:
    """Results of `function` and its gradients in fp64."""
    wide = {name: tensor.detach().double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    for name in gradients:
        wide[name].requires_grad_()
    returned = function(*wide.values())
    values = returned if isinstance(returned, tuple) else (returned,)
    found = torch.autograd.grad(values, [wide[name] for name in gradients], [tensor.double() for tensor in upstream])
    results = dict(zip(outputs, (value.detach() for value in values), strict=True))
    return results | {f"d {name}": gradient for name, gradient in zip(gradients, found, strict=True)}


def compiled(function: System) -> Factory:
    """`torch.compile` of a plain function for static shapes."""

    def make() -> System:
        torch._dynamo.reset()
        return torch.compile(function, dynamic=False)

    return make


def random_tensor(*shape: int, device: torch.device, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Normally distributed; a problem's makers seed torch first."""
    return (torch.randn(*shape, device=device) * scale).to(dtype)
