"""Tensors that calls of blocks keep on the GPU until their backward, and give up where memory turns out to be short.

A call that has given up its tensors is recomputed, with the same bits. So each such call passes through a checkpoint
that is not re-entrant, and keeps its tensors beside it: results of operators (`mixing`), or all that autograd saves
(`WholeCall`). References here are weak: a dropped graph frees its tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_slide.runtime.weights.saved_weights import SavedTensor, hooks_around

PORTION = 1 / 4
"""The part of the kept bytes that is given up at a time. Before an operator fails, torch has waited for the GPU and
returned its unused memory to the driver, so a few large portions cost less than many small ones."""


class KeptCall(Protocol):
    """The tensors that one call of a block keeps."""

    nbytes: int
    is_in_use: bool
    """Its backward has begun: its tensors come free by themselves."""

    def give_up(self) -> None:
        """Let go of the tensors, and keep nothing more. Harmless when called twice."""


class KeptCalls:
    """Calls whose backward is to come, in the order of their forwards. The thread that computes calls all methods."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[KeptCall]] = []

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
        return given

    def forget_ended(self) -> None:
        """Forget the calls whose graph is gone."""
        self._calls = [ref for ref in self._calls if ref() is not None]


class _Saved:
    """A saved tensor that may be given up, and the outer hooks' value for it, which brings it back then."""

    __slots__ = ("__weakref__", "_around", "_beside", "_call", "_saved")

    def __init__(self, call: WholeCall, tensor: torch.Tensor, beside: Any, around: Callable[[Any], torch.Tensor]):
        self._call, self._beside, self._around = call, beside, around
        self._saved: SavedTensor | None = SavedTensor.of(tensor)

    def give_up(self) -> None:
        self._saved = None

    def take(self) -> torch.Tensor:
        """Give the tensor to the backward."""
        self._call.is_in_use = True
        return self._around(self._beside) if self._saved is None else self._saved.unchanged()


class WholeCall:
    """A call of a block that keeps all that it saves."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: bytes that the call keeps, without tensors that are there anyway."""
        self.nbytes = nbytes
        self.is_in_use = False
        self._tensors: list[weakref.ref[_Saved]] = []

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the checkpoint's context managers: around its forward, and around its recomputations."""
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
            saved = _Saved(self, tensor, beside, unpack_beside)
            self._tensors.append(weakref.ref(saved))
            return saved

        def unpack(saved: Any) -> torch.Tensor:
            return saved.take() if isinstance(saved, _Saved) else unpack_beside(saved)

        with saved_tensors_hooks(pack, unpack):
            yield

    def give_up(self) -> None:
        self.nbytes = 0
        for ref in self._tensors:
            if (saved := ref()) is not None:
                saved.give_up()
        self._tensors = []
