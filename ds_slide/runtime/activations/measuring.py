"""What a block saves and computes, counted while it is recomputed: bytes of saved tensors, work of operators, and the
results that can stay.

The count takes no more memory than the backward that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from ds_slide.plan.mixtures import Mixture, Run, mixtures, run_of
from ds_slide.plan.operations import new_bytes, operations_of, tensors_of
from ds_slide.plan.spare import Measured, Shape
from ds_slide.runtime.activations.checkpointing import BlockCall
from ds_slide.runtime.activations.kept_calls import OperatorMode, name_of
from ds_slide.runtime.core.calls import in_backward
from ds_slide.runtime.weights.saved_weights import OpenHooks

COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "deepspeed"))
"""Namespaces of operators that all ranks of a group have to run. DeepSpeed's is the exchange of its sequence
parallelism."""


@dataclass(frozen=True)
class MeasuredBlock:
    """A call of a block. `saved`: bytes that it saves. `squares`: bytes of saved and given tensors with an element for
    each pair of tokens. `mixtures`: the choices between keeping nothing and all. `again`: the part of its forward's
    work that a recomputation does."""

    saved: Measured
    squares: Measured
    mixtures: tuple[Mixture, ...]
    again: float


class WatchedForward:
    """A block's forward, which learns whether the block communicates: of equal layers a script may have changed one."""

    def __init__(self, call: BlockCall, communicates: MutableMapping[int, bool]) -> None:
        """`communicates`: gets the answer, by `Unit.order`. Once it is yes, it stays."""
        self._function = call.function
        self._order = call.unit.order
        self._communicates = communicates
        self.work = 0.0
        """Of the forward's operators."""

    def __call__(self, *inputs: Any) -> Any:
        if in_backward():
            return self._function(*inputs)
        with Working() as seen:
            result = self._function(*inputs)
        self._communicates[self._order] = seen.has_collective or self._communicates.get(self._order, False)
        self.work = seen.work
        return result


class CountedCall:
    """A block's forward, which is watched, and whose recomputation counts what it saves.

    Each storage counts once. The storages of weights and inputs do not count, since they are there anyway, nor does the
    output's, which is the next block's input. A recomputation that is not re-entrant ends at the last tensor that is
    needed: the last product of a block, a quarter of its work, need not be done again.
    """

    def __init__(
        self,
        call: BlockCall,
        shape: Shape,
        kind: Hashable,
        found: MutableMapping[Hashable, MeasuredBlock],
        forward: WatchedForward,
    ) -> None:
        """`shape`: of the batch. `found`: gets the measurement, for this `kind` of block. `forward`: of the call."""
        self._function = call.function
        self._parameters = call.parameters
        self._ends_early = call.ends_early
        """The checkpoint ends recomputations early. This measured one may go on to the end of the block."""
        self._shape = shape
        self._kind = kind
        self._found = found
        self._forward = forward

    def __call__(self, *inputs: Any) -> Any:
        if not in_backward():
            return self._forward(*inputs)
        shape, costs = self._shape, OperatorCosts()
        given = list(tensors_of((inputs, getattr(self._function, "keywords", {}))))
        there = {_address(tensor) for tensor in (*given, *self._parameters)}
        given_square = sum({_address(each): _nbytes(each) for each in given if shape.has_square(each.shape)}.values())
        saved: dict[int, int] = {}
        squares: set[int] = set()

        class Noting:
            """Notes what is saved, and remembers nothing by its place."""

            def reference(self, tensor: torch.Tensor) -> None:
                costs.saves()
                if (address := _address(tensor)) not in there:
                    saved[address] = _nbytes(tensor)
                    if shape.has_square(tensor.shape):
                        squares.add(address)

            def restore(self, saved: Any) -> torch.Tensor:
                raise AssertionError(f"{saved} is no reference")

        hooks = OpenHooks(Noting())
        try:
            with costs:
                outputs = self._function(*inputs)
        except _StopRecomputationError:  # raised after the last tensor that is needed
            self._learn(costs, saved, squares, given_square, ends_early=True)
            raise
        finally:
            hooks.close()
        for tensor in tensors_of(outputs):
            saved.pop(_address(tensor), None)
        self._learn(costs, saved, squares, given_square, ends_early=self._ends_early)
        return outputs

    def _learn(
        self,
        costs: OperatorCosts,
        saved: Mapping[int, int],
        squares: Collection[int],
        given_square: int,
        *,
        ends_early: bool,
    ) -> None:
        """Note the measurement. `saved`: bytes of the saved tensors, by address. `squares`: addresses of saved tensors
        with an element for each pair of tokens. `given_square`: bytes of such tensors among the inputs."""
        runs, nbytes = costs.end(), sum(saved.values())
        square = sum(each for address, each in saved.items() if address in squares)
        work = self._forward.work
        self._found[self._kind] = MeasuredBlock(
            saved=Measured(self._shape, nbytes, square),
            squares=Measured(self._shape, square + given_square, square + given_square),
            mixtures=mixtures(runs, nbytes),
            again=min(1.0, sum(run.work for run in runs) / work) if ends_early and work else 1.0,
        )


class Working(OperatorMode):
    """Adds up the work of the operators that make something, and learns whether one is a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.work = 0.0
        self.has_collective = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if not isinstance(function, torch._ops.OpOverload):
            return made
        self.has_collective |= function.namespace in COLLECTIVES
        if new_bytes(args, kwargs, made):
            self.work += _run_of(function, 0, args, kwargs, made).work
        return made


class OperatorCosts(OperatorMode):
    """Learns in a recomputation what its operators take and which results can stay. Results of products and attention
    are held until it has ended, and compared by a sum of their bits: a kernel may write into a result unseen by
    torch."""

    def __init__(self) -> None:
        super().__init__()
        self._runs: list[tuple[Run, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        """The runs with what they have made, and the sums of its bits."""
        self._counts: Counter[str] = Counter()
        self._needed = 0

    def saves(self) -> None:
        """Note that autograd saves a tensor: all runs until now are needed, and runs after the last save are not."""
        self._needed = len(self._runs)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if not isinstance(function, torch._ops.OpOverload):
            return made
        name = name_of(function)
        before, self._counts[name] = self._counts[name], self._counts[name] + 1
        if new_bytes(args, kwargs, made):
            run = _run_of(function, before, args, kwargs, made)
            held = [each for each in tensors_of(made) if run.nbytes and each.is_floating_point()]
            self._runs.append((run, [(each, _sum(each)) for each in held]))
        return made

    def end(self) -> tuple[Run, ...]:
        """Return the runs that were needed. Waits for the GPU: once for a kind of block and a longest batch."""
        needed, self._runs = self._runs[: self._needed], []
        changed = [torch.stack([before != _sum(each) for each, before in held]).any() for _, held in needed if held]
        answers = iter(torch.stack(changed).tolist() if changed else ())
        return tuple(replace(run, nbytes=0) if held and next(answers) else run for run, held in needed)


def _run_of(function: torch._ops.OpOverload, before: int, args: Any, kwargs: Any, made: Any) -> Run:
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(made)
    operations = operations_of(function._schema.name, function, args, kwargs, made, inputs, outputs)
    return run_of(function, before, operations, args, kwargs, made)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of all bits of its storage, as integers of 8 bytes and the bytes left over. Torch copies shorter
    integers into 8 bytes each before it adds them, which takes four times the memory of a batch's results."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    words = storage.nbytes() // 8 * 8
    return flat[:words].view(torch.int64).sum() + flat[words:].sum(dtype=torch.int64)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
