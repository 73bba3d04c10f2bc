"""A block that is recomputed except for some results of its operators: its forward keeps these results, and its
recomputation uses them instead of running the operators.

As in torch's selective checkpointing, dispatcher modes run below autograd, which sees the same nodes in both runs.
Torch's modes count the runs of all operators, also in hooks, and hooks bind a block's weights in another way when it is
recomputed. They allow no second backward, and raise where a kept result has been modified. The modes here count, keep
and check only the chosen results. Where a result cannot be used any more, its operator runs. A mode costs the host some
5 to 10 us an operator, in the forward and in the recomputation of a mixed block. A result that stays costs 50 us in the
forward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ds_slide.plan.mixtures import Mixture, Result, Run, run_of
from ds_slide.plan.operations import new_bytes, operations_of, tensors_of

_name_of = functools.cache(str)
"""The name of an operator, which takes the host a microsecond to put together."""
COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd"))
"""Namespaces of operators that all ranks of a group have to run."""
_OWN_VIEWS = frozenset(
    (
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    )
)
"""Views that count their modifications by themselves: what a linear layer makes of its product, and its parts."""


class OperatorMode(TorchDispatchMode):
    """Sees every operator that runs, except inside of compiled code (`torch.compile`), which runs unchanged."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@dataclass(frozen=True)
class _Stayed:
    """A result as its operator has returned it. `watched`: tensors on its memory that count modifications, each apart
    from the others; `versions`: their counts when the result was made."""

    made: Any
    watched: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, made: Any) -> _Stayed:
        same = _same(made)
        return cls(same, tensors := tuple(tensors_of(same)), tuple(each._version for each in tensors))

    def seen_as(self, view: torch.Tensor) -> _Stayed:
        """This result, watched through one more tensor on its memory."""
        return _Stayed(self.made, (*self.watched, _same(view)), (*self.versions, view._version))

    @property
    def is_unchanged(self) -> bool:
        return tuple(each._version for each in self.watched) == self.versions


def _same(tree: Any) -> Any:
    """Return `tree` with new tensors on the same memory, of the same versions. The given tensors get a node of the
    graph, and a graph without a backward would live for ever."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


class MixedCall:
    """One call of a block. The results of `mixture` stay from its forward to its first recomputation, as far as the
    mixture's bytes reach. Another recomputation, for a second backward, runs all operators."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.nbytes = mixture.nbytes
        self.is_in_use = False
        self.stayed: dict[Result, _Stayed] = {}
        self.given: dict[Result, tuple[Any, ...]] = {}
        """The identities (`_known_by`) of the forward's runs, for operators whose results stay."""

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the checkpoint's context managers: around its forward, and around its recomputations."""
        return _Forward(self), _Recomputation(self)

    def give_up(self) -> None:
        """Let go of what stays, and keep nothing more (`KeptCall`)."""
        self.nbytes = 0
        self.stayed.clear()


class _Counting(OperatorMode):
    def __init__(self, call: MixedCall) -> None:
        super().__init__()
        self._call = call
        self._names = {name for name, _ in call.mixture.results}
        self._runs: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self._runs.clear()
        return super().__enter__()

    def _result(self, function: Any) -> Result | None:
        """Return what this run makes; None where no result of its operator stays."""
        name = _name_of(function)
        if name not in self._names:
            return None
        result = name, self._runs[name]
        self._runs[name] += 1
        return result


class _Forward(_Counting):
    def __enter__(self) -> Any:
        self._left = self._call.mixture.nbytes
        self._places: dict[int, Result] = {}
        """The result on each storage."""
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        call = self._call
        for view in tensors_of(made) if function in _OWN_VIEWS else ():
            place = self._places.get(view.untyped_storage()._cdata)
            if place is not None and place in call.stayed:
                call.stayed[place] = call.stayed[place].seen_as(view)
        if (result := self._result(function)) is None:
            return made
        call.given[result] = _known_by(args)
        if not call.nbytes or result not in call.mixture.results:
            return made
        if (nbytes := new_bytes(args, kwargs, made)) <= self._left:
            self._left -= nbytes
            call.stayed[result] = stayed = _Stayed.of(made)
            self._places.update((each.untyped_storage()._cdata, result) for each in stayed.watched)
        return made


class _Recomputation(_Counting):
    def __enter__(self) -> Any:
        self._call.is_in_use = True
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (result := self._result(function)) is not None:
            if self._call.given.get(result) != _known_by(args):
                self._call.stayed.clear()
            stayed = self._call.stayed.pop(result, None)
            if stayed is not None and stayed.is_unchanged:
                return stayed.made
        return function(*args, **(kwargs or {}))


def _known_by(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return what distinguishes two runs. A block may run operators in its forward only, for a table that it keeps from
    then on, for example. Autograd, and so checkpointing, does not see these runs, and the kept results of later runs
    would be taken for the results of other runs."""
    tensors = [(each.shape, each.dtype, each.requires_grad) for each in args if isinstance(each, torch.Tensor)]
    return torch.is_grad_enabled(), tensors


class Working(OperatorMode):
    """Adds up the work of the operators that make something."""

    def __init__(self) -> None:
        super().__init__()
        self.work = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if isinstance(function, torch._ops.OpOverload) and new_bytes(args, kwargs, made):
            self.work += _run_of(function, 0, args, kwargs, made).work
        return made


class Learning(OperatorMode):
    """Learns in a recomputation what its operators take and which results can stay. Results of products and attention
    are held until it has ended, and compared by a sum of their bits: a kernel may write into a result unseen by
    torch."""

    def __init__(self) -> None:
        super().__init__()
        self._runs: list[tuple[Run, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        """The runs with what they have made, and the sums of its bits."""
        self._counts: Counter[str] = Counter()
        self._needed = 0
        self.has_collective = False

    def saves(self) -> None:
        """Note that autograd saves a tensor: all runs until now are needed, and runs after the last save are not."""
        self._needed = len(self._runs)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if not isinstance(function, torch._ops.OpOverload):
            return made
        self.has_collective |= function.namespace in COLLECTIVES
        name = _name_of(function)
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
