"""Leases of pieces of one GPU buffer, in the order in which they are given back.

Copies of matrices have many sizes. What bounds them is the number of bytes, and a piece begins where the last one ends.

    lease       one thread: waits for the oldest leases until there is room, on the host
    give_back   another thread: passes the oldest lease on to the marker behind its last use

A lease is given back by work that was submitted with it and needs no other lease. So the wait in `lease` ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from ds_slide.plan.allocations import whole_pieces
from ds_slide.runtime.core.device import Marker
from ds_slide.runtime.core.futures import Failures, synchronize


class ByteRing:
    """The buffer and its leases. Positions count bytes from the first lease on: the place of a position is its
    remainder by the size of the buffer."""

    def __init__(self, buffer: torch.Tensor, failures: Failures, what: str) -> None:
        """`buffer`: whole pieces of bytes. `what`: its name in the plan, a plural."""
        self._buffer = buffer
        self._failures = failures
        self._what = what
        self._begin = self._end = 0
        """Positions of the oldest byte under lease, and behind the newest one. The thread that leases owns them."""
        self._ends: deque[int] = deque()
        """Position behind each lease, the oldest first. The same owner."""
        self._given_back: deque[Marker] = deque()
        """Markers behind the last use of the oldest leases. Both threads use it, with `_changed` held."""
        self._changed = threading.Condition()

    def lease(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return flat tensors of the sizes and data types of `like`, with any content. Waits until they have room."""
        while (places := self._places(like)) is None:
            self._await_oldest()
        self._ends.append(self._end)
        return [
            self._buffer[start : start + each.nbytes].view(each.dtype) for start, each in zip(places, like, strict=True)
        ]

    def give_back(self, end: Marker) -> None:
        """Give back the oldest lease that has not been given back. `end`: behind its last use."""
        with self._changed:
            self._given_back.append(end)
            self._changed.notify_all()

    def _places(self, like: Sequence[torch.Tensor]) -> list[int] | None:
        """Return the place of each piece, and move `_end` behind them; None where the room does not suffice."""
        size, position, places = self._buffer.numel(), self._end, []
        for each in like:
            place = position % size
            if place + each.nbytes > size:  # no piece is divided: the rest of the buffer stays empty
                position, place = position + size - place, 0
            places.append(place)
            position += whole_pieces(each.nbytes)
        if position - self._begin > size:
            assert self._ends, f"{self._what}: the plan has too few bytes"
            return None
        self._end = position
        return places

    def _await_oldest(self) -> None:
        with self._changed:
            self._failures.wait_for(self._changed, lambda: bool(self._given_back), f"room for {self._what}")
            end = self._given_back.popleft()
        synchronize(self._failures, end, f"room for {self._what}")
        self._begin = self._ends.popleft()
        if not self._ends:
            self._begin = self._end = 0  # any lease that the plan allows has room now
