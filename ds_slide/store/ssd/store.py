"""The SSD tier: asynchronous transfers between the state files and memory, and the checks of what is read."""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ds_slide.errors import SlideError
from ds_slide.store.ssd.extents import PAGE, Contents
from ds_slide.store.ssd.files import IoSettings, StateFiles, TransferPart, advice_for
from ds_slide.store.ssd.page_sums import PageSums

STATE_FILE = "states"


class Failures(Protocol):
    """The failures and waits of the engine (`ds_slide.runtime.core.futures.Failures`)."""

    def record(self, lane: str, error: BaseException) -> None:
        """Record an error of the lane "ssd"."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Record a wait of the calling thread. `what`: words for what is awaited."""


@dataclass
class _Transfer:
    """A transfer that is under way. Either `then` follows it, or a thread waits for `told`, which is always set, after
    `error`. `to_check`: the parts of a read, where sums are kept."""

    then: Callable[[], None] | None = None
    told: threading.Event | None = None
    error: SlideError | None = None
    to_check: Sequence[TransferPart] = ()
    urgent: bool = False


class SsdStore:
    """`nbytes` bytes of logical address space, striped over a file in each of `parents` (`StateFiles`), and more with
    `extend`. `name`: the name of these files.

    failures: gets the first error of an asynchronous transfer, from the thread that found it. From then on no `then` is
    called, also for transfers under way, and waits for a transfer raise. A thread that waits for a `then` must also
    watch for a failure.

    sums: the checksums of the pages, None for no checks. Bytes that differ from the last write are a failure, also
    where a thread waits for them. contents: names the content of a byte offset.

    delay: for race tests. Called before every submit (on the caller's thread), before every completion is delivered (on
    the completion thread) and before every check of a read that no thread waits for.
    """

    def __init__(
        self,
        parents: Sequence[tuple[str, Path]],
        nbytes: int,
        failures: Failures,
        *,
        name: str = STATE_FILE,
        io: IoSettings | None = None,
        sums: PageSums | None = None,
        contents: Contents | None = None,
        delay: Callable[[], None] = lambda: None,
    ) -> None:
        if not parents or nbytes <= 0 or nbytes % PAGE:
            raise ValueError(f"an SSD store needs a directory and a positive multiple of {PAGE} bytes, not {nbytes}")
        self._failures = failures
        self._delay = delay
        self._sums = sums
        self._contents = contents
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._transfers: dict[int, _Transfer] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._numbers = itertools.count()
        try:
            self.files = StateFiles(parents, name, nbytes, io or IoSettings())
        except BaseException:
            if sums is not None:
                sums.end_threads()
            raise
        self._io = self.files.io
        self._to_check: queue.PriorityQueue[tuple[int, int, _Transfer | None]] = queue.PriorityQueue()
        """Reads that no thread waits for, urgent ones first."""
        self._threads = [threading.Thread(target=self._complete, name="ds_slide-ssd", daemon=True)]
        if sums is not None:
            self._threads.append(threading.Thread(target=self._check_reads, name="ds_slide-ssd-sums", daemon=True))
        for thread in self._threads:
            thread.start()
        # A thread that waits in C++ while the interpreter is taken down ends the process with an abort.
        atexit.register(self.close)

    @property
    def nbytes(self) -> int:
        return self.files.nbytes

    def extend(self, name: str, nbytes: int, table: torch.Tensor | None) -> int:
        """Add `nbytes`, a multiple of a page, in files called `name`, and return the offset of the first byte. `table`:
        memory for their sums (`PageSums.extend`), where there are sums. No part may begin before the new bytes and end
        in them. Raises SlideError where there is too little space, and leaves the store unchanged then."""
        start = self.files.extend(name, nbytes)
        if self._sums is not None:
            assert table is not None
            self._sums.extend(table)
        return start

    def read(self, parts: Sequence[TransferPart], then: Callable[[], None], *, urgent: bool = False) -> None:
        """Fill memory from the store. `then` runs when all parts are there and checked: on the completion thread, or on
        the check thread where sums are kept.

        `then` must be short and must neither block nor raise. `urgent` transfers go before the others. The memory
        belongs to the transfer until `then`. Raises SlideError once the store is closed.
        """
        self._submit(False, parts, _Transfer(then, urgent=urgent))

    def write(self, parts: Sequence[TransferPart], then: Callable[[], None], *, urgent: bool = False) -> None:
        """Write from memory to the store, like `read`. `then` runs on the completion thread. The sums of the bytes are
        computed before this returns."""
        self._submit(True, parts, _Transfer(then, urgent=urgent))

    def read_now(self, parts: Sequence[TransferPart]) -> None:
        """Fill memory from the store and return when it is done. The transfer is urgent.

        Any thread but the store's own may call it. Raises SlideError when it fails. It is a failure of the store, too,
        if the bytes differ from the last write.
        """
        self._wait(False, parts)

    def write_now(self, parts: Sequence[TransferPart]) -> None:
        """Write from memory to the store, like `read_now`."""
        self._wait(True, parts)

    def register(self, address: int, nbytes: int) -> bool:
        """Register these pages with the kernel. They must stay mapped until `close`. False where it declines."""
        return self._io.register_memory(address, nbytes)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of `_native.IoEngine.stats`, of the sums and of the files."""
        sums = {} if self._sums is None else self._sums.statistics()
        return {**self._io.stats(), **sums, **self.files.statistics()}

    def moved_bytes(self) -> int:
        """Return the bytes read and written since the start, counted by request and not by whole transfer."""
        statistics: dict[str, Any] = self._io.stats()
        return int(statistics["read_bytes"] + statistics["written_bytes"])

    def undo(self) -> None:
        """Clean up after a refused run, once the store is closed. Ends the threads of the sums, which the frames of an
        error would keep alive, and removes the empty directories that were made for the files."""
        if self._sums is not None:
            self._sums.end_threads()
        self.files.remove_directories()

    def close(self) -> None:
        """Wait for the requests in flight, drop the others, close the files. A second call does nothing.

        No `then` runs afterwards. Threads in `read_now` and `write_now` get an error.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        atexit.unregister(self.close)
        self._io.close()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()
            self._to_check.put((0, 0, None))  # ends the second thread, when the first one submits no more to it
        self.files.close()

    def _submit(self, write: bool, parts: Sequence[TransferPart], transfer: _Transfer) -> None:
        pieces = self.files.pieces(parts)
        self._delay()
        if self._sums is not None and write:
            for part in parts:
                self._sums.keep(part.offset, part.address, part.nbytes)
        elif self._sums is not None:
            transfer.to_check = parts
        token = next(self._numbers)
        with self._lock:
            if self._failure is not None and transfer.told is None:
                return  # `failures` has the first error: the engine ends with that one, not with a later one
            if self._failure is not None:
                raise SlideError(f"SSD tier: stopped by an earlier error: {self._failure}") from self._failure
            if self._closed:
                raise SlideError("SSD tier: the store is closed; initialize the engine again")
            self._transfers[token] = transfer
            try:
                self._io.submit(token, write, pieces, transfer.urgent)
            except BaseException:
                del self._transfers[token]
                raise

    def _wait(self, write: bool, parts: Sequence[TransferPart]) -> None:
        if threading.current_thread() in self._threads:
            raise RuntimeError(f"{threading.current_thread().name} cannot wait for itself; use `read` or `write`")
        transfer = _Transfer(told=threading.Event(), urgent=True)
        self._submit(write, parts, transfer)
        assert transfer.told is not None
        with self._failures.waiting("states to be written to SSD" if write else "states to be read from SSD"):
            # `told` is set for every transfer, also when the store fails or is closed. No failure of a lane ends this
            # wait: until then the disk may write to the caller's memory.
            transfer.told.wait()
        if transfer.error is not None:
            raise transfer.error
        try:
            self._check(transfer)
        except SlideError as error:
            self._record(error)
            raise

    def _check(self, transfer: _Transfer) -> None:
        """Raise SlideError if the bytes read differ from the last write. Not for the completion thread."""
        for part in transfer.to_check:
            assert self._sums is not None
            wrong = self._sums.first_wrong(part.offset, part.address, part.nbytes)
            if wrong is not None:
                raise SlideError(self._damaged(wrong))

    def _damaged(self, offset: int) -> str:
        label, file_offset = self.files.place_of(offset)
        what = f"byte {offset:,} of the store" if self._contents is None else self._contents.at(offset)
        return (
            f"SSD tier: {label} holds other bytes at offset {file_offset:,} than were written there ({what}), because "
            f"the disk or another program has changed them; check the disk and {advice_for(0)}"
        )

    def _check_reads(self) -> None:
        """Run the check thread: it checks reads that no thread waits for, whose memory belongs to them until `then`."""
        while (transfer := self._to_check.get()[2]) is not None:
            try:
                if not self._closed:
                    self._delay()
                    self._check(transfer)
                    self._follow(transfer)
            except BaseException as error:
                self._record(error)
            del transfer  # the wait for the next one must not keep objects of this one alive

    def _follow(self, transfer: _Transfer) -> None:
        if self._failure is None and not self._closed and transfer.then is not None:
            transfer.then()

    def _complete(self) -> None:
        """Run the completion thread until the engine is closed and has reported every transfer."""
        try:
            while (finished := self._io.next(None)) is not None:
                self._deliver(*finished)
        except BaseException as error:  # no transfer would be reported any more, and no reason given
            self._record(error)
            raise

    def _deliver(self, token: int, message: str | None, error: int) -> None:
        with self._lock:
            transfer = self._transfers.pop(token)
        if message is None:
            # The check comes after the transfer: then the transfer has read a whole file.
            message, error = self.files.what_was_cut(), 0
        if message is not None:
            transfer.error = SlideError(f"SSD tier: {message}; {advice_for(error)}")
        try:
            self._delay()
            if transfer.told is None and transfer.error is not None:
                self._record(transfer.error)
            elif transfer.told is None and transfer.to_check:
                self._to_check.put((1 if transfer.urgent else 2, next(self._numbers), transfer))
            elif transfer.told is None:
                self._follow(transfer)
        except BaseException as raised:
            self._record(raised)
        finally:
            if transfer.told is not None:
                transfer.told.set()

    def _record(self, error: BaseException) -> None:
        """Give `failures` the first error. Errors while the store closes are expected and dropped."""
        with self._lock:
            first = self._failure is None and not self._closed
            if first:
                self._failure = error
        if first:
            self._failures.record("ssd", error)
