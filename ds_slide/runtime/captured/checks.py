"""What a recording takes for granted: what a block is made of, and which tensors and random numbers it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from ds_slide.runtime.activations.kept_calls import OperatorMode
from ds_slide.runtime.activations.measuring import COLLECTIVES
from ds_slide.runtime.activations.state_places import globals_of_random
from ds_slide.runtime.captured.inputs import NotRecordable
from ds_slide.runtime.core.context import AS_THEY_ARE
from ds_slide.runtime.core.device import default_generator


def hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield the hooks of a module, by their kinds."""
    yield from (module._forward_pre_hooks, module._forward_hooks)
    yield from (module._backward_pre_hooks, module._backward_hooks)


def have_hooks(modules: Iterable[nn.Module]) -> bool:
    return any(hooks for each in modules for hooks in hooks_of(each))


def has_experts(modules: Iterable[nn.Module]) -> bool:
    """Whether a block may route its tokens to experts. The numbers of tokens are often read by the host, which a
    recording does not allow. Found by names, and by weights of more than two dimensions."""
    return any(
        any(name in type(each).__name__.lower() for name in ("moe", "expert", "router"))
        or any(weight is not None and weight.dim() > 2 for weight in each._parameters.values())
        for each in modules
    )


class MadeOf:
    """The modules, parameters and hooks of a block, the attributes of torch's own modules in it (the rate of a dropout)
    and those of its configurations (the implementation of its attention). `Before` has the other attributes.

    Values are compared by identity, in one call in C for all."""

    def __init__(self, module: nn.Module, inside: Sequence[nn.Module]) -> None:
        """`inside`: the modules in the block's own one."""
        everything = (module, *inside)
        plain = (each for each in inside if type(each).__module__.startswith("torch.nn.modules."))
        configurations = {id(config): config for each in everything if (config := vars(each).get("config")) is not None}
        self._dictionaries = [
            *(found for each in everything for found in (each._modules, each._parameters)),
            *(hooks for each in inside for hooks in hooks_of(each)),
            *map(vars, plain),
            *(vars(each) for each in configurations.values() if hasattr(each, "__dict__")),
        ]
        self._lengths = list(map(len, self._dictionaries))
        self._values = self._read()

    def is_there(self) -> bool:
        """Whether the block is made of the same objects at present."""
        return list(map(len, self._dictionaries)) == self._lengths and all(map(is_, self._read(), self._values))

    def _read(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dictionaries)))


class Weights:
    """The parameters and buffers of a block, and where they lie."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.trained = [each for each in self.parameters if each.requires_grad]
        self._all = [*self.parameters, *module.buffers()]
        self._places = self._read()

    def are_there(self) -> bool:
        """Whether they lie where they have lain, and the same ones are trained."""
        return self._read() == self._places

    def versions(self) -> list[int]:
        """Return how often each parameter has been written."""
        with AS_THEY_ARE():
            return [each._version for each in self.parameters]

    def _read(self) -> list[tuple[int, bool]]:
        with AS_THEY_ARE():
            return [(each.data_ptr(), each.requires_grad) for each in self._all]


class HostRandom:
    """The random generators of the host: a recording repeats what was drawn from them."""

    def __init__(self) -> None:
        self._of_torch = torch.get_rng_state()
        self._others = [(place, place.read()) for place in globals_of_random()]

    def has_been_drawn_from(self, *, of_torch: bool) -> bool:
        """Whether numbers have been drawn since. `of_torch`: whether torch's generator is one of the host alone."""
        if of_torch and not torch.equal(torch.get_rng_state(), self._of_torch):
            return True
        return not all(place.is_same(value) for place, value in self._others)

    def put_back(self) -> None:
        """Let the same numbers be drawn again."""
        torch.set_rng_state(self._of_torch)
        for place, value in self._others:
            place.write(value)


class AllRandom:
    """The random generators of the host and of a device."""

    def __init__(self, device: torch.device) -> None:
        self._host = HostRandom()
        self._generator = default_generator(device)
        self._of_torch = torch.get_rng_state(), self._generator.get_state()

    def has_been_drawn_from(self) -> bool:
        """Whether numbers have been drawn since."""
        return self._host.has_been_drawn_from(of_torch=True) or not torch.equal(
            self._generator.get_state(), self._of_torch[1]
        )

    def put_back(self) -> None:
        """Let the same numbers be drawn again."""
        self._host.put_back()
        self._generator.set_state(self._of_torch[1])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let torch's generators draw the same numbers again for the length of the context."""
        now = torch.get_rng_state(), self._generator.get_state()
        try:
            self._set(self._of_torch)
            yield
        finally:
            self._set(now)

    def _set(self, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        self._generator.set_state(states[1])


class NoCommunication(OperatorMode):
    """Raises NotRecordable where an operator communicates with other ranks."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in COLLECTIVES:
            raise NotRecordable("it communicates with other ranks")
        if any(each.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for each in types):
            return NotImplemented  # a distributed tensor, for example: the operators that it runs come here
        return function(*args, **(kwargs or {}))


def leaves_below(results: Iterable[Any]) -> set[int]:
    """Return the identities of the tensors for which a backward from `results` accumulates gradients."""
    found, seen = set(), set()
    waiting = []
    for each in results:
        if isinstance(each, torch.Tensor) and each.requires_grad:
            waiting.append(each.grad_fn)
            if each.is_leaf:
                found.add(id(each))
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            found.add(id(node.variable))
        waiting += [each for each, _ in node.next_functions]
    return found
