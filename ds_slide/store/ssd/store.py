"""The SSD tier: preallocated files per rank and mount, and asynchronous transfers between them and memory."""

from __future__ import annotations

import atexit
import errno
import functools
import itertools
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.report.log import size
from ds_slide.store.directories.run_files import RunFile, RunFiles, missing_directories, remove_if_empty
from ds_slide.store.ssd.bandwidth import mixed_bandwidth
from ds_slide.store.ssd.extents import MOST_DEPTH, PAGE, Striping
from ds_slide.store.ssd.page_sums import CheckThread, PageSums

STATE_FILE = "states"
DEFAULT_REQUEST_BYTES = 2 << 20
# Requests at each mount: the first, or the second where it is measured to be faster.
LOW_DEPTH, HIGH_DEPTH = 32, 128

_log = logging.getLogger("ds_slide")


@dataclass(frozen=True)
class Part:
    """`nbytes` at byte `offset` of the store and at `address` in memory. All are multiples of 4096."""

    offset: int
    address: int
    nbytes: int


@dataclass(frozen=True)
class _RegionFile:
    """The file of a region on one mount. `number`: its number in the I/O engine, None where the mount gets no bytes.
    `label`: its path for messages. `is_direct`: whether O_DIRECT works."""

    number: int | None
    label: str
    is_direct: bool


@dataclass(frozen=True)
class _Region:
    """Bytes of the store from `start` on, striped over `files`, one for each mount."""

    start: int
    nbytes: int
    files: Sequence[_RegionFile]


@dataclass
class _Transfer:
    """A transfer that is under way. Either `then` follows it, or a thread waits for `told`, which is always set, after
    `error`. `to_check`: the parts of a read, where sums are kept."""

    then: Callable[[], None] | None = None
    told: threading.Event | None = None
    error: SlideError | None = None
    to_check: Sequence[Part] = ()
    urgent: bool = False


class SsdStore:
    """`nbytes` bytes of logical address space, striped over a file in each of `parents`, and more with `extend`.

    parents: (JSON path for messages, directory). Each gets a file (RunFiles) and its part of the space, in proportion
    to its bandwidth, which is measured when there are several. `name`: the name of these files.

    fail: called once with the first error of an asynchronous transfer, on the thread that found it. From then on no
    `then` is called, also for transfers under way, and waits for a transfer raise. A thread that waits for a `then`
    must also watch for `fail`.

    sums: the checksums of the pages, None for no checks. Bytes that differ from the last write are an error for
    `fail`, also where a thread waits for them. what_lies_at: names the content of a byte offset.

    delay: for race tests. Called before every submit (on the caller's thread), before every completion is delivered (on
    the completion thread) and before every check of a read that no thread waits for.

    waiting: the context of a wait in `read_now` or `write_now`, called with words for what is awaited.

    Raises SlideError where a directory cannot be used, has too little space, or the backend does not work.
    """

    def __init__(
        self,
        parents: Sequence[tuple[str, Path]],
        nbytes: int,
        *,
        name: str = STATE_FILE,
        fail: Callable[[BaseException], None],
        backend: str = "auto",
        queue_depth: int | None = None,
        request_bytes: int | None = None,
        sums: PageSums | None = None,
        what_lies_at: Callable[[int], str] = "byte {:,} of the store".format,
        delay: Callable[[], None] = lambda: None,
        waiting: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if not parents or nbytes <= 0 or nbytes % PAGE:
            raise ValueError(f"an SSD store needs a directory and a positive multiple of {PAGE} bytes, not {nbytes}")
        self.nbytes = 0
        self._fail = fail
        self._delay = delay
        self._waiting = waiting
        self._sums = sums
        self._what_lies_at = what_lies_at
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._transfers: dict[int, _Transfer] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._tokens = itertools.count()
        self._json_paths = [json_path for json_path, _ in parents]
        self._places: list[RunFiles] = []
        self._state_files: list[tuple[RunFile, int]] = []
        """All files with their lengths in bytes."""
        self._regions: list[_Region] = []
        """The regions, in the order of their bytes."""
        self._engine: _native.IoEngine | None = None
        self._made = missing_directories(parent for _, parent in parents)
        try:
            for json_path, parent in parents:
                self._places.append(RunFiles(parent, json_path=json_path))
            self._striping = Striping(self._weigh(backend))
            self._check_space(nbytes)
            request_bytes = request_bytes or DEFAULT_REQUEST_BYTES
            self._io = self._engine = _engine(backend, queue_depth, len(parents), request_bytes)
            self._add_region(name, nbytes)
        except BaseException:
            self._discard()
            self.undo()
            raise
        self._thread = threading.Thread(target=self._run, name="ds_slide-ssd", daemon=True)
        self._thread.start()
        self._checks = None if sums is None else CheckThread("ds_slide-ssd-sums", self._record)
        # A thread that waits in C++ while the interpreter is taken down ends the process with an abort.
        atexit.register(self.close)

    def extend(self, name: str, nbytes: int, table: torch.Tensor | None) -> int:
        """Add `nbytes`, a multiple of a page, in files called `name`, and return the offset of the first byte. `table`:
        memory for their sums (`PageSums.extend`), where there are sums. No part may begin before the new bytes and end
        in them. Raises SlideError where there is too little space, and leaves the store unchanged then."""
        start = self.nbytes
        self._check_space(nbytes)
        self._add_region(name, nbytes)
        if self._sums is not None:
            assert table is not None
            self._sums.extend(table)
        return start

    def read(self, parts: Sequence[Part], then: Callable[[], None], *, urgent: bool = False) -> None:
        """Fill memory from the store. `then` runs when all parts are there and checked: on the completion thread, or on
        the check thread where sums are kept.

        `then` must be short and must neither block nor raise. `urgent` transfers go before the others. The memory
        belongs to the transfer until `then`. Raises SlideError once the store is closed.
        """
        self._submit(False, parts, _Transfer(then), urgent)

    def write(self, parts: Sequence[Part], then: Callable[[], None], *, urgent: bool = False) -> None:
        """Write from memory to the store, like `read`. `then` runs on the completion thread. The sums of the bytes are
        computed before this returns."""
        self._submit(True, parts, _Transfer(then), urgent)

    def read_now(self, parts: Sequence[Part]) -> None:
        """Fill memory from the store and return when it is done. The transfer is urgent.

        Any thread but the store's own may call it. Raises SlideError when it fails. `fail` gets the error too if the
        bytes differ from the last write.
        """
        self._wait(False, parts)

    def write_now(self, parts: Sequence[Part]) -> None:
        """Write from memory to the store, like `read_now`."""
        self._wait(True, parts)

    def register(self, address: int, nbytes: int) -> bool:
        """Register these pages with the kernel. They must stay mapped until `close`. False where it declines."""
        return self._io.register_memory(address, nbytes)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of `_native.IoEngine.stats`, and by mount: paths (for `lsof +L1`), direct (whether
        O_DIRECT works), weights (sum 1)."""
        return {
            **self._io.stats(),
            **({} if self._sums is None else self._sums.statistics()),
            "nbytes": self.nbytes,
            "paths": [file.label for region in self._regions for file in region.files],
            "direct": [file.is_direct for region in self._regions for file in region.files],
            "weights": self._striping.shares,
        }

    def moved_bytes(self) -> int:
        """Return the bytes read and written since the start, counted by request and not by whole transfer."""
        statistics: dict[str, Any] = self._io.stats()
        return int(statistics["read_bytes"] + statistics["written_bytes"])

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the state files, until `close`. They may have O_DIRECT set, and most files have no name. Open
        /proc/<pid>/fd/<descriptor> to look at a file."""
        return [file.descriptor for file, _ in self._state_files]

    def undo(self) -> None:
        """Clean up after a refused run, once the store is closed. Ends the threads of the sums, which the frames of an
        error would keep alive, and removes the empty directories that were made for `parents`."""
        if self._sums is not None:
            self._sums.end_threads()
        remove_if_empty(self._made)

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
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._checks is not None:
            self._checks.close()
        self._discard()

    def _weigh(self, backend: str) -> list[float]:
        """Return the bandwidths of the mounts. Only their ratios matter."""
        if len(self._places) == 1:
            return [1.0]
        weights = []
        for json_path, place in zip(self._json_paths, self._places, strict=True):
            try:
                weights.append(mixed_bandwidth(place, backend))
            except SlideError:
                raise
            except (OSError, RuntimeError) as error:
                raise _unusable(json_path, str(place.path), error) from error
        return weights

    def _sizes(self, nbytes: int) -> Iterator[tuple[str, RunFiles, int]]:
        """Return the JSON path, the place and the share of `nbytes` of each mount."""
        return zip(self._json_paths, self._places, self._striping.file_sizes(nbytes), strict=True)

    def _check_space(self, nbytes: int) -> None:
        """Raise SlideError where `nbytes` do not fit, before any file is made. Mounts may share a filesystem."""
        needs: Counter[int] = Counter()
        for json_path, place, share in self._sizes(nbytes):
            device = place.path.stat().st_dev
            needs[device] += share
            free = shutil.disk_usage(place.path).free
            if needs[device] > free:
                raise SlideError(_too_little(json_path, place.path, needs[device], free))

    def _add_region(self, name: str, nbytes: int) -> None:
        """Add `nbytes` in files called `name`, after `_check_space`."""
        made: list[tuple[RunFile, int]] = []
        try:
            files = [self._open(name, made, *mount) for mount in self._sizes(nbytes)]
        except BaseException:
            for file, _ in made:
                os.ftruncate(file.descriptor, 0)  # the I/O engine has it open until the end
                os.close(file.descriptor)
            raise
        # The files count only now: all have the lengths that completions compare.
        self._state_files.extend(made)
        self._regions.append(_Region(self.nbytes, nbytes, files))
        self.nbytes += nbytes

    def _open(
        self, name: str, made: list[tuple[RunFile, int]], json_path: str, place: RunFiles, size: int
    ) -> _RegionFile:
        """Make a file called `name` for `size` bytes, and add it to `made` with its length."""
        if size == 0:
            if not self._regions:
                _log.warning("%s: %s is so much slower than the others that it is left out", json_path, place.path)
            return _RegionFile(None, str(place.path), False)
        file = place.make(name)
        try:
            # One page more than is ever written: later writes never restore the length of a file that was cut.
            # Otherwise its holes would be read as zeros.
            number = self._io.open(file.label, size + PAGE, file.descriptor)
        except BaseException as error:
            os.close(file.descriptor)
            if isinstance(error, OSError):
                raise _unusable(json_path, file.label, error) from error
            raise
        made.append((file, size + PAGE))
        is_direct = self._io.is_direct(number)
        if not is_direct and not self._regions:
            _log.warning(
                "%s: the filesystem of %s refuses O_DIRECT, so states pass through the page cache, which costs memory "
                "and speed; name a directory on a local ext4 or xfs disk",
                json_path,
                place.path,
            )
        return _RegionFile(number, file.label, is_direct)

    def _submit(self, write: bool, parts: Sequence[Part], transfer: _Transfer, urgent: bool) -> None:
        pieces = self._pieces(parts)
        self._delay()
        if self._sums is not None and write:
            for part in parts:
                self._sums.keep(part.offset, part.address, part.nbytes)
        elif self._sums is not None:
            transfer.to_check, transfer.urgent = parts, urgent
        token = next(self._tokens)
        with self._lock:
            if self._failure is not None and transfer.told is None:
                return  # `fail` has the first error: the engine ends with that one, not with a later one
            if self._failure is not None:
                raise SlideError(f"SSD tier: stopped by an earlier error: {self._failure}") from self._failure
            if self._closed:
                raise SlideError("SSD tier: the store is closed; initialize the engine again")
            self._transfers[token] = transfer
            try:
                self._io.submit(token, write, pieces, urgent)
            except BaseException:
                del self._transfers[token]
                raise

    def _pieces(self, parts: Sequence[Part]) -> list[tuple[int, int, int, int]]:
        """Return the pieces of files for `parts`. Raises ValueError for a part outside the store, which would make a
        file grow."""
        pieces = []
        for part in parts:
            region = self._region_at(part.offset)
            if region is None or part.nbytes <= 0 or part.offset + part.nbytes > region.start + region.nbytes:
                raise ValueError(f"{part} is not within the {self.nbytes} bytes of this store")
            for piece in self._striping.pieces(part.offset - region.start, part.nbytes):
                number = region.files[piece.file].number
                assert number is not None, "a file without a unit in the pattern has no pieces"
                pieces.append((number, piece.file_offset, part.address + piece.start, piece.nbytes))
        return pieces

    def _region_at(self, offset: int) -> _Region | None:
        return next((each for each in self._regions if 0 <= offset - each.start < each.nbytes), None)

    def _wait(self, write: bool, parts: Sequence[Part]) -> None:
        if threading.current_thread() in (self._thread, self._checks and self._checks.thread):
            raise RuntimeError(f"{threading.current_thread().name} cannot wait for itself; use `read` or `write`")
        transfer = _Transfer(told=threading.Event())
        self._submit(write, parts, transfer, urgent=True)
        assert transfer.told is not None
        with self._waiting("states to be written to SSD" if write else "states to be read from SSD"):
            # `told` is set for every transfer, also when the store fails or is closed. No failure of a lane ends this
            # wait: until then the disk may write to the caller's memory.
            transfer.told.wait()
        if transfer.error is not None:
            raise transfer.error
        try:
            self._check(transfer.to_check)
        except SlideError as error:
            self._record(error)
            raise

    def _check(self, parts: Sequence[Part]) -> None:
        """Raise SlideError if the bytes read differ from the last write. Not for the completion thread."""
        for part in parts:
            assert self._sums is not None
            wrong = self._sums.first_wrong(part.offset, part.address, part.nbytes)
            if wrong is not None:
                raise SlideError(self._damaged(wrong))

    def _damaged(self, offset: int) -> str:
        region = self._region_at(offset)
        assert region is not None
        piece = self._striping.pieces(offset - region.start, PAGE)[0]
        return (
            f"SSD tier: {region.files[piece.file].label} holds other bytes at offset {piece.file_offset:,} than were "
            f"written there ({self._what_lies_at(offset)}), because the disk or another program has changed them; "
            f"check the disk and {_advice(0)}"
        )

    def _checked(self, transfer: _Transfer) -> None:
        """Check a read on the check thread. The completion thread is done with the memory of the read."""
        self._delay()
        self._check(transfer.to_check)

    def _follow(self, then: Callable[[], None]) -> None:
        if self._failure is None and not self._closed:
            then()

    def _run(self) -> None:
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
            message, error = self._cut_file(), 0
        if message is not None:
            transfer.error = SlideError(f"SSD tier: {message}; {_advice(error)}")
        try:
            self._delay()
            if transfer.told is None and transfer.error is not None:
                self._record(transfer.error)
            elif transfer.then is not None and transfer.to_check and self._checks is not None:
                check = functools.partial(self._checked, transfer)
                self._checks.submit(check, functools.partial(self._follow, transfer.then), urgent=transfer.urgent)
            elif transfer.then is not None:
                self._follow(transfer.then)
        except BaseException as raised:
            self._record(raised)
        finally:
            if transfer.told is not None:
                transfer.told.set()

    def _cut_file(self) -> str | None:
        """Return the error for a state file that has become shorter, None if all have their lengths."""
        for file, nbytes in self._state_files:
            found = os.fstat(file.descriptor).st_size
            if found < nbytes:
                lost = f"{size(nbytes - found)} of its {size(nbytes)}"
                return f"{file.label} lacks {lost}, because something else has cut it"
        return None

    def _record(self, error: BaseException) -> None:
        """Call `fail` with the first error. Errors while the store closes are expected and dropped."""
        with self._lock:
            first = self._failure is None and not self._closed
            if first:
                self._failure = error
        if first:
            self._fail(error)

    def _discard(self) -> None:
        if self._engine is not None:
            self._engine.close()
        while self._state_files:
            os.close(self._state_files.pop()[0].descriptor)


def _engine(backend: str, queue_depth: int | None, mounts: int, request_bytes: int) -> _native.IoEngine:
    """Make an I/O engine. `queue_depth`: None for a measured depth."""
    low_depth = None
    if queue_depth is None:
        queue_depth, low_depth = (min(depth * mounts, MOST_DEPTH) for depth in (HIGH_DEPTH, LOW_DEPTH))
    try:
        return _native.IoEngine(backend, queue_depth, request_bytes, low_depth=low_depth)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise SlideError(f"SSD tier: the I/O backend {backend!r} cannot be used: {error}") from error


def _too_little(json_path: str, path: Path, needed: int, free: int) -> str:
    return (
        f"{json_path}: {str(path)!r} has {size(free)} free and needs {size(needed)} for states on SSD; free "
        "space there, name a further directory on another disk, or raise ds_slide.host_memory"
    )


def _unusable(json_path: str, path: str, error: Exception) -> SlideError:
    advice = _advice(error.errno or 0) if isinstance(error, OSError) else "choose another backend"
    reason = error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else str(error)
    return SlideError(f"{json_path}: {path!r} cannot be used for states on SSD ({reason}); {advice}")


def _advice(error: int) -> str:
    """Return advice for an error of a file. The I/O engine's message tells what happened. The stop of the run tells to
    resume from a checkpoint."""
    if error in (errno.ENOSPC, errno.EDQUOT):
        return "free space there, name a further directory on another disk, or raise ds_slide.host_memory"
    if error == errno.EFBIG:
        return (
            "raise the limit on the length of files (ulimit -f), or name a directory on a filesystem with a higher one"
        )
    if error == errno.ECANCELED:
        return "the store was closed meanwhile"
    if error in (0, errno.ENODATA):  # a file that was cut, not a disk that fails
        return "keep other programs out of that directory"
    return "look for the disk in the kernel's log (dmesg)"
