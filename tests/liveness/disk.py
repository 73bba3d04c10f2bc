"""A store instead of `ds_slide.store.ssd.store.SsdStore`: any transfer that is under way may be the next to complete.

Bytes move when a transfer completes. Until then the memory of a read holds a pattern that is nobody's state, and that
of a write must not change: both would show a buffer that has two owners.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_slide.errors import SlideError
from liveness.locks import Event
from liveness.scheduler import Operation, active
from liveness.stand_ins import Thread

PATTERN = 0xA5

Loses = Callable[[str, Sequence[str]], bool]
"""(name of a transfer, names of those under way), such as "write weight of block 1"."""


@dataclass
class Transfer:
    write: bool
    parts: Sequence[Any]
    then: Callable[[], None] | None
    told: Event | None
    name: Callable[[int], str]
    before: list[bytes] = field(default_factory=list)
    """What a write's memory held when it was submitted."""

    @property
    def key(self) -> tuple[bool, int]:
        return self.write, self.parts[0].offset

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} {self.name(self.parts[0].offset)}"


class Disk:
    """`SsdStore`'s methods. `loses`: whether a transfer that is submitted beside those under way never completes."""

    def __init__(
        self,
        parents: Sequence[Any],  # noqa: ARG002
        nbytes: int,
        failures: Any,
        *,
        rank: int = 0,
        loses: Loses | None = None,
        **_others: Any,
    ) -> None:
        self.nbytes = nbytes
        self.rank = rank
        self.bytes = bytearray(nbytes)
        self.pending: list[Transfer] = []
        self.closed = False
        self.counts = {"read_bytes": 0, "written_bytes": 0}
        self._failures = failures
        self._loses = loses
        self.name: Callable[[int], str] = str
        """What lies at a byte; see `Names`."""
        self._memory = (ctypes.c_char * nbytes).from_buffer(self.bytes)
        if (scheduler := active()) is not None:
            scheduler.disks.append(self)
        self._thread = Thread(target=self._run, name="ds_slide-ssd", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        return f"the disk ({', '.join(map(str, self.pending)) or 'nothing under way'})"

    def read(self, parts: Sequence[Any], then: Callable[[], None], *, urgent: bool = False) -> None:  # noqa: ARG002
        self._submit(False, parts, then, None)

    def write(self, parts: Sequence[Any], then: Callable[[], None], *, urgent: bool = False) -> None:  # noqa: ARG002
        self._submit(True, parts, then, None)

    def read_now(self, parts: Sequence[Any]) -> None:
        self._wait(False, parts)

    def write_now(self, parts: Sequence[Any]) -> None:
        self._wait(True, parts)

    def register(self, address: int, nbytes: int) -> bool:  # noqa: ARG002
        return True

    def statistics(self) -> dict[str, Any]:
        return {**self.counts, "busy_s": 0.0}

    def undo(self) -> None:
        """Nothing is left of it: it has made no directory."""
        assert self.closed

    def close(self) -> None:
        self.closed = True
        for transfer in self.pending:
            if transfer.told is not None:
                transfer.told.set()
        self.pending.clear()
        self._thread.join()

    def _wait(self, write: bool, parts: Sequence[Any]) -> None:
        scheduler = active()
        if scheduler is not None and not scheduler.exploring:
            # While the engine is built or read: nothing to be chosen.
            for part in parts:
                self._move(write, part)
            return
        told = Event()
        self._submit(write, parts, None, told)
        told.wait()
        if self.closed:
            raise SlideError("the store was closed")

    def _submit(self, write: bool, parts: Sequence[Any], then: Callable[[], None] | None, told: Event | None) -> None:
        if self.closed:
            raise SlideError("the store is closed")
        transfer = Transfer(write, parts, then, told, lambda offset: self.name(offset))
        if self._loses is not None and self._loses(str(transfer), [str(other) for other in self.pending]):
            return
        for part in parts:
            assert 0 <= part.offset and part.offset + part.nbytes <= self.nbytes
            if write:
                transfer.before.append(ctypes.string_at(part.address, part.nbytes))
            else:
                ctypes.memset(part.address, PATTERN, part.nbytes)
        self.pending.append(transfer)
        # The order of submission is forgotten.
        self.pending.sort(key=lambda transfer: transfer.key)

    def _move(self, write: bool, part: Any) -> None:
        place = ctypes.addressof(self._memory) + part.offset
        target, source = (place, part.address) if write else (part.address, place)
        ctypes.memmove(target, source, part.nbytes)
        self.counts["written_bytes" if write else "read_bytes"] += part.nbytes

    def _run(self) -> None:
        operation = _Completion(self)
        scheduler = active()
        assert scheduler is not None
        while True:
            transfer = scheduler.do(operation)
            if transfer is None:  # nothing is under way when there is only one thing to do: the end
                if self.closed:
                    return
                transfer = self.pending[0]
            self.pending.remove(transfer)
            self._complete(transfer)

    def _complete(self, transfer: Transfer) -> None:
        for number, part in enumerate(transfer.parts):
            if transfer.write:
                now = ctypes.string_at(part.address, part.nbytes)
                assert now == transfer.before[number], f"{transfer}: its memory changed while it was being written"
            self._move(transfer.write, part)
        try:
            if transfer.then is not None and not self.closed:
                transfer.then()
        except SlideError as error:
            self._failures.record("ssd", error)
        finally:
            if transfer.told is not None:
                transfer.told.set()


def names_of(units: Sequence[Any]) -> Callable[[int], str]:
    """What of which unit lies at a byte of the store."""
    starts: list[tuple[int, str]] = []
    for unit in units:
        on_ssd = {name: each for name, each in unit.state.buffers.items() if each.tier == "ssd"}
        for name in on_ssd.keys() & {"weight", "gradient"}:
            starts.append((on_ssd[name].offsets[0], f"{name} of {unit.name}"))
        if on_ssd.keys() - {"weight", "gradient"}:
            chunks = enumerate(unit.state.optimizer.chunks)
            starts += [(chunk.offset, f"chunk {index} of {unit.name}") for index, chunk in chunks]
    starts.sort()

    def name(offset: int) -> str:
        start, found = max((each for each in starts if each[0] <= offset), default=(0, "byte"))
        return found if start == offset else f"{found} +{offset - start}"

    return name


class _Completion(Operation):
    """One option for each transfer under way."""

    __slots__ = ("disk",)

    def __init__(self, disk: Disk) -> None:
        super().__init__("a transfer", disk)
        self.disk = disk
        self.ready = lambda: False

    def options(self) -> Sequence[Any]:
        return (None,) if self.disk.closed else self.disk.pending
