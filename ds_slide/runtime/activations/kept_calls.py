"""Tensors that calls of blocks keep on the GPU until their backward, and give up where memory turns out to be short.

A call that has given up its tensors is recomputed, with the same bits. So each such call passes through a checkpoint
that is not re-entrant, and keeps its tensors beside it: all that autograd saves (`WholeCall`), or results of some
operators (`MixedCall`). References here are weak: a dropped graph frees its tensors.

The forward of a mixed call keeps these results, and its recomputation uses them instead of running the operators. As in
torch's selective checkpointing, dispatcher modes run below autograd, which sees the same nodes in both runs. Torch's
own modes do not serve here, for three reasons. They count the runs of all operators, and our hooks run others in a
recomputation than in a forward. They allow no second backward. They raise where a kept result has been modified. The
modes here count, keep and check only the chosen results. Where a result cannot be used any more, its operator runs. A
mode costs the host some 5 to 10 us an operator, in the forward and in the recomputation of a mixed block. A result that
stays costs 50 us in the forward.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ds_slide.plan.mixtures import Mixture, Result
from ds_slide.plan.operations import new_bytes, tensors_of
from ds_slide.runtime.weights.saved_weights import SavedTensor, hooks_around

PORTION = 1 / 4
"""The part of the kept bytes that is given up at a time. Before an operator fails, torch has waited for the GPU and
returned its unused memory to the driver, so a few large portions cost less than many small ones."""
name_of = functools.cache(str)
"""The name of an operator, which takes the host a microsecond to put together."""
_OWN_VIEWS = frozenset(
    (
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    )
)
"""Views that count their modifications by themselves: what a linear layer makes of its product, and its parts."""


class KeptCall(ABC):
    """The tensors that one call of a block keeps."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: bytes that the call keeps, without tensors that are there anyway."""
        self.nbytes = nbytes
        self.is_in_use = False
        """Its backward has begun: its tensors come free by themselves."""

    @abstractmethod
    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the checkpoint's context managers: around its forward, and around its recomputations."""

    @abstractmethod
    def give_up(self) -> None:
        """Let go of the tensors, and keep nothing more. Harmless when called twice."""


class KeptCalls:
    """Calls whose backward is to come, in the order of their forwards. The thread that computes calls all methods."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[KeptCall]] = []
        self._given_up = 0
        """Bytes given up since the last `take_given_up`."""

    def add(self, call: KeptCall) -> None:
        self._calls.append(weakref.ref(call))

    def give_up(self) -> int:
        """Give up a portion, from the calls whose backward comes last. -> bytes; 0 where nothing is kept any more."""
        calls = [call for ref in self._calls if (call := ref()) is not None and call.nbytes and not call.is_in_use]
        wanted, given = PORTION * sum(call.nbytes for call in calls), 0
        for call in calls:
            if given >= wanted:
                break
            given += call.nbytes
            call.give_up()
        self._calls = [weakref.ref(call) for call in calls if call.nbytes]
        self._given_up += given
        return given

    def take_given_up(self) -> int:
        """Return the bytes that were given up since the last call."""
        given, self._given_up = self._given_up, 0
        return given

    def forget_ended(self) -> None:
        """Forget the calls whose graph is gone."""
        self._calls = [ref for ref in self._calls if ref() is not None]


class _Saved:
    """A saved tensor; None: it was given up. `beside`: the outer hooks' value for it, which brings it back then."""

    __slots__ = ("__weakref__", "beside", "tensor")

    def __init__(self, tensor: SavedTensor | None, beside: Any) -> None:
        self.tensor, self.beside = tensor, beside


class WholeCall(KeptCall):
    """A call of a block that keeps all that it saves."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._tensors: list[weakref.ref[_Saved]] = []

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return self._keeping(), nullcontext()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        around = hooks_around()
        assert around is not None  # the checkpoint's
        pack_beside, unpack_beside = around

        def pack(tensor: torch.Tensor) -> Any:
            beside = pack_beside(tensor)
            if not self.nbytes:
                return beside
            saved = _Saved(SavedTensor.of(tensor), beside)
            self._tensors.append(weakref.ref(saved))
            return saved

        def unpack(saved: Any) -> torch.Tensor:
            if not isinstance(saved, _Saved):
                return unpack_beside(saved)
            self.is_in_use = True
            return unpack_beside(saved.beside) if saved.tensor is None else saved.tensor.unchanged()

        with saved_tensors_hooks(pack, unpack):
            yield

    def give_up(self) -> None:
        self.nbytes = 0
        for ref in self._tensors:
            if (saved := ref()) is not None:
                saved.tensor = None
        self._tensors = []


class OperatorMode(TorchDispatchMode):
    """Sees every operator that runs, except inside of compiled code (`torch.compile`), which runs unchanged."""

    supports_higher_order_operators = True
    lets_replay = False
    """Whether operators may run unseen, in a replay."""

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
    graph, and the node refers to this call: a cycle, which would keep a graph without a backward alive for ever."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


class MixedCall(KeptCall):
    """One call of a block. The results of `mixture` stay from its forward to its first recomputation, as far as the
    mixture's bytes reach. Another recomputation, for a second backward, runs all operators."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__(mixture.nbytes)
        self.mixture = mixture
        self.stayed: dict[Result, _Stayed] = {}
        self.given: dict[Result, tuple[Any, ...]] = {}
        """The identities (`_known_by`) of the forward's runs, for operators whose results stay."""

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        return _Forward(self), _Recomputation(self)

    def give_up(self) -> None:
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
        name = name_of(function)
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
