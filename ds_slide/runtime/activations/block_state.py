"""Blocks that change state of their own in their forward: a counter, running statistics, a code book, a generator.

A recomputation would change this state a second time, and compute with other numbers. So all blocks are watched: the
state is remembered before each call and compared after it. Where it has changed in a block whose script does not ask
for checkpointing, the recomputation of that call computes with the remembered state, and afterwards the present state
is put back. From the next forward on the block runs as it is written.

Most blocks have neither buffers nor containers. For these a call compares the attributes of a few modules by identity:
before and after the forward, and before the recomputation, 5 us each. It copies nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from ds_slide.errors import SlideError
from ds_slide.runtime.activations.checkpointing import UNASKED, BlockCall
from ds_slide.runtime.activations.measuring import CountedCall, WatchedForward
from ds_slide.runtime.activations.state_places import Attributes, Found, found, globals_of_random
from ds_slide.runtime.core.unit import KeptResults

FIRST_CALLS = 2
"""The number of a block's first calls in which the contents of its tensors are compared, which waits for the GPU. Code
that writes through `.data` changes no version; almost all such code does so from the first call on."""
SMALL = 256 * 1024
"""Bytes of a block's tensors that are copied in every call, because a layer may begin to change them later."""
OTHER_BYTES = 16 * 1024**2
"""Bytes of tensors beside buffers that are copied in the first calls: an attribute may lead to a whole data set."""


class Before:
    """The state of a block before a call. `copies`: of tensors, by the identity of the original."""

    def __init__(
        self, found: Found, values: Sequence[Any], versions: list[int], copies: Mapping[int, torch.Tensor]
    ) -> None:
        self.found = found
        self.values = values
        self.versions = versions
        self.copies = copies
        read = list(zip(found.places, values, strict=True))
        same_way = [(place.holder, value) for place, value in read if type(place) is Attributes]
        self._dictionaries = [holder for holder, _ in same_way]
        self._lengths = [len(value) for _, value in same_way]
        self._in_dictionaries = [each for _, value in same_way for each in value.values()]
        self._others = [(place, value) for place, value in read if type(place) is not Attributes]

    def is_there(self) -> bool:
        """Whether the state is the same at present, judged without the contents of tensors."""
        return (
            (not self.versions or _versions(self.found) == self.versions)
            and all(place.is_same(value) for place, value in self._others)
            and (self._is_in_dictionaries() or self.difference(into_tensors=False) is None)
        )

    def _is_in_dictionaries(self) -> bool:
        # One call in C for all of them: with a call each, a block of 6 modules costs three times the time.
        return list(map(len, self._dictionaries)) == self._lengths and all(
            map(is_, chain.from_iterable(map(dict.values, self._dictionaries)), self._in_dictionaries)
        )

    def with_copies(self, copies: Mapping[int, torch.Tensor]) -> Before:
        """Return the same state with other copies of its tensors."""
        new = copy.copy(self)
        new.copies = copies
        return new

    def difference(self, *, into_tensors: bool) -> str | None:
        """Return the name of the first value that is different at present; None where all are the same."""
        for place, value in zip(self.found.places, self.values, strict=True):
            if not place.is_same(value):
                return place.difference(value)
        versions = _versions(self.found)
        for (tensor, label), was, now in zip(self.found.tensors, self.versions, versions, strict=True):
            kept = self.copies.get(id(tensor)) if into_tensors else None
            if was != now or (kept is not None and not torch.equal(tensor, kept)):
                return label
        return None

    @property
    def is_complete(self) -> bool:
        """Whether it can be put back: tensors that have been written since are among the copies."""
        versions = _versions(self.found)
        return all(
            was == now or id(tensor) in self.copies
            for (tensor, _), was, now in zip(self.found.tensors, self.versions, versions, strict=True)
        )

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put this state back for the length of the context, with copies of the copies: the computation may write into
        them, and may run a second time."""
        now = [place.read() for place in self.found.places]
        copies = {of: kept.clone() for of, kept in self.copies.items()}
        try:
            for place, value in zip(self.found.places, self.values, strict=True):
                replaced = _replaced(value, copies) if copies else value
                if not place.is_same(replaced):
                    place.write(replaced)
            yield
        finally:
            for place, value in zip(self.found.places, now, strict=True):
                if not place.is_same(value):
                    place.write(value)


class BlockState:
    """The state that one block may change in its forward. All methods are called by the thread that computes."""

    def __init__(self, name: str, module: nn.Module, moved: Iterable[torch.Tensor] = ()) -> None:
        """`name`: of the block. `moved`: tensors beside packed weights, which are in host memory between forwards. A
        copy made here would be on the wrong device, and the engine refuses writes to them."""
        self.name = name
        self._moved = frozenset(map(id, moved))
        self._modules = {f"{name}.{path}".rstrip("."): each for path, each in module.named_modules()}
        self._latest: Before | None = None
        self._calls = 0
        self.changes: str | None = None
        """The name of the value that the block has changed."""

    def before(self) -> Before:
        """Remember the present state and return it."""
        self._calls += 1
        latest, self._latest = self._latest, None
        if self.copies_all or latest is None or self._calls == FIRST_CALLS + 1 or not latest.is_there():
            places = found(self._modules)
            if self.copies_all:
                places.places += globals_of_random()
            values = [place.read() for place in places.places]
            self._latest = Before(places, values, _versions(places), self._copies(places))
        elif latest.found.tensors:
            self._latest = latest.with_copies(self._copies(latest.found))
        else:
            self._latest = latest
        return self._latest

    @property
    def is_new(self) -> bool:
        """Whether the block has not been called yet."""
        return not self._calls

    @property
    def copies_all(self) -> bool:
        """Whether the call under way copies tensors of any size, and looks into them."""
        return self._calls <= FIRST_CALLS or self.changes is not None

    def _copies(self, places: Found) -> dict[int, torch.Tensor]:
        buffers, others = (
            [tensor for tensor, _ in part if id(tensor) not in self._moved]
            for part in (places.tensors[: places.buffers], places.tensors[places.buffers :])
        )
        copied = [*buffers, *_within(OTHER_BYTES, others)] if self.copies_all else _within(SMALL, buffers + others)
        with torch.no_grad():
            return {id(tensor): tensor.clone() for tensor in copied}

    def after(self, before: Before) -> bool:
        """Compare with the state before the call. -> whether the call has changed it."""
        if not self.copies_all and before.is_there():
            return False
        changed = before.difference(into_tensors=self.copies_all)
        if changed is not None:
            self.changes = changed
        return changed is not None

    def forget(self) -> None:
        """Let go of the remembered state: the block is not watched any more."""
        self._latest = None


class WatchedCall:
    """One call of a block, its forward and its recomputations, in place of the layer's function."""

    def __init__(
        self,
        state: BlockState,
        call: BlockCall,
        counted: CountedCall | WatchedForward | None = None,
        *,
        guards_weights: bool = False,
        recomputes: bool = True,
    ) -> None:
        """`counted`: counts what the call saves. `guards_weights`: a recomputation computes with the weights of the
        forward, or raises: the script has not asked for it. Without it, backward would use the forward's saved tensors:
        a graph that is older than a step raises in plain torch, or computes with the activations of that time.
        `recomputes`: the call may be recomputed, so that results of experts that move in parts stay. Fetching these
        experts again takes longer than all else."""
        self._state = state
        self._function = counted or call.function
        self._as_written = call.written is not UNASKED
        """The script asks for recomputations, which then change the state as they do in plain torch."""
        self._weights = call.parameters if guards_weights else []
        self._versions: list[int] | None = None
        """The weights' versions when the forward has ended."""
        self.before: Before | None = None
        """The block's state before the forward."""
        self._before: Before | None = None
        """The same, where a recomputation has to find it."""
        self._unit = call.unit
        self._results = KeptResults() if recomputes and call.unit.experts else None
        self._has_run = False
        self.has_changed = False
        """Whether the forward has changed the block's state."""

    def __call__(self, *inputs: Any) -> Any:
        if not self._has_run:
            return self._forward(*inputs)
        before = self._before
        if before is None or not (self.has_changed or before.copies or not before.is_there()):
            return self._compute(*inputs)
        if not before.is_complete:
            raise SlideError(_too_late(self._state.name, before.difference(into_tensors=False)))
        with before.put_back():
            return self._compute(*inputs)

    def _forward(self, *inputs: Any) -> Any:
        self._has_run = True
        self.before = before = self._state.before()
        result = self._compute(*inputs)
        self.has_changed = self._state.after(before)
        if not self._as_written:
            self._before = before
        return result

    def skip_forward(self, before: Before | None) -> None:
        """Note that a replay has computed the forward. `before`: the block's state before it. Calls from now on are
        recomputations."""
        self._has_run, self.before = True, before
        if not self._as_written:
            self._before = before

    def may_find(self, before: Before | None) -> bool:
        """Whether a recomputation may compute with the present state, which is also `before`."""
        return self._before is None or self._before is before or self._before.is_there()

    def _compute(self, *inputs: Any) -> Any:
        if self._versions is not None and self._versions != self._versions_now():
            raise modified(self._state.name)
        unit = self._unit
        if self._results is not None:
            self._results.begin(tuple(each.version for each in (unit, *unit.parts)))
        around, unit.uses.results = unit.uses.results, self._results
        try:
            return self._function(*inputs)
        finally:  # not before: a forward may write to its weights before it uses them
            self._versions = self._versions_now()
            unit.uses.results = around

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self._weights]

    @property
    def can_run_again(self) -> bool:
        """Whether a recomputation would compute with the state before the forward."""
        return not self.has_changed or self._before is None or self._before.is_complete

    def check(self) -> None:
        """Raise where the call is to be recomputed, and cannot be."""
        if not self.can_run_again:
            raise SlideError(_too_late(self._state.name, self._state.changes))


def modified(name: str) -> RuntimeError:
    """Return the error of a backward that would recompute a block with other weights than its forward had."""
    return RuntimeError(
        f"the weights of {name} have been modified since the forward of this graph, and its activations would be "
        "recomputed with the new ones; call backward() before engine.step(), or set "
        'ds_slide.activations to "as_written"'
    )


def _too_late(name: str, what: str | None) -> str:
    return (
        f"{name} has changed {what} in a forward for the first time after {FIRST_CALLS} calls, too late to leave the "
        'block out of what is recomputed; set "ds_slide": {"activations": "as_written"}'
    )


def _replaced(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """Return `value` with copies instead of its tensors. Containers inside, except tuples, are places of their own."""
    if type(value) is dict:
        return {name: _replaced_in_tuples(each, copies) for name, each in value.items()}
    if type(value) is list:
        return [_replaced_in_tuples(each, copies) for each in value]
    return copies.get(id(value), value)


def _replaced_in_tuples(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    if type(value) is tuple:
        return tuple([_replaced_in_tuples(each, copies) for each in value])
    return copies.get(id(value), value)


def _within(limit: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the smallest tensors that fit into `limit` bytes together."""
    found = []
    for tensor in sorted(tensors, key=lambda each: each.nbytes):
        limit -= tensor.nbytes
        if limit < 0:
            break
        found.append(tensor)
    return found


def _versions(places: Found) -> list[int]:
    return [-1 if tensor.is_inference() else tensor._version for tensor, _ in places.tensors]
