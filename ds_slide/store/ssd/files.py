"""The files of the SSD tier: one on each mount for each region of the store, preallocated and without a name."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.report.log import size
from ds_slide.store.directories.run_files import RunFile, RunFiles, missing_directories, remove_if_empty
from ds_slide.store.ssd.bandwidth import mixed_bandwidth
from ds_slide.store.ssd.extents import MOST_DEPTH, PAGE, REQUEST_BYTES, Striping

_log = logging.getLogger("ds_slide")


@dataclass(frozen=True)
class IoSettings:
    """The settings of an I/O engine. `queue_depth`: requests at once, None for a measured number."""

    backend: str = "auto"
    queue_depth: int | None = None
    request_bytes: int | None = None


@dataclass(frozen=True)
class TransferPart:
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


class StateFiles:
    """A logical address space, striped over files in each of `parents`: (JSON path for messages, directory). Each
    directory gets its part in proportion to its bandwidth, which is measured when there are several. `io`: the I/O
    engine that has the files open.

    Raises SlideError where a directory cannot be used, has too little space, or the backend does not work.
    """

    def __init__(self, parents: Sequence[tuple[str, Path]], name: str, nbytes: int, settings: IoSettings) -> None:
        """Begin with a region of `nbytes`, in files called `name`."""
        self.nbytes = 0
        self._made: list[tuple[RunFile, int]] = []
        """All files with their lengths in bytes."""
        self._regions: list[_Region] = []
        """The regions, in the order of their bytes."""
        self._new_directories = missing_directories(parent for _, parent in parents)
        engine = None
        try:
            self._mounts = [RunFiles(parent, json_path=json_path) for json_path, parent in parents]
            self.striping = Striping(_bandwidths(self._mounts, settings.backend))
            self._require_space(nbytes)
            self.io = engine = make_engine(settings, len(parents))
            self._add_region(name, nbytes)
        except BaseException:
            if engine is not None:
                engine.close()
            self.close()
            self.remove_directories()
            raise

    def extend(self, name: str, nbytes: int) -> int:
        """Add a region of `nbytes`, in files called `name`, and return the offset of its first byte. Raises SlideError
        where there is too little space, and leaves the files unchanged then."""
        start = self.nbytes
        self._require_space(nbytes)
        self._add_region(name, nbytes)
        return start

    def pieces(self, parts: Sequence[TransferPart]) -> list[tuple[int, int, int, int]]:
        """Return the pieces of files for `parts`: (file, its offset, address, bytes). Raises ValueError for a part that
        is outside or in two regions, which would make a file grow."""
        pieces = []
        for part in parts:
            region = self._region_at(part.offset)
            if region is None or part.nbytes <= 0 or part.offset + part.nbytes > region.start + region.nbytes:
                raise ValueError(f"{part} is not within the {self.nbytes} bytes of this store")
            for piece in self.striping.pieces(part.offset - region.start, part.nbytes):
                number = region.files[piece.file].number
                assert number is not None, "a file without a unit in the pattern has no pieces"
                pieces.append((number, piece.file_offset, part.address + piece.start, piece.nbytes))
        return pieces

    def place_of(self, offset: int) -> tuple[str, int]:
        """Return the file with a byte of the store, for messages, and the byte's offset in it."""
        region = self._region_at(offset)
        assert region is not None
        piece = self.striping.pieces(offset - region.start, PAGE)[0]
        return region.files[piece.file].label, piece.file_offset

    def what_was_cut(self) -> str | None:
        """Return the error for a file that has become shorter, None if all have their lengths."""
        for file, nbytes in self._made:
            found = os.fstat(file.descriptor).st_size
            if found < nbytes:
                lost = f"{size(nbytes - found)} of its {size(nbytes)}"
                return f"{file.label} lacks {lost}, because something else has cut it"
        return None

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the files, until `close`. They may have O_DIRECT set, and most files have no name. Open
        /proc/<pid>/fd/<descriptor> to look at a file."""
        return [file.descriptor for file, _ in self._made]

    def statistics(self) -> dict[str, Any]:
        """Return by mount: paths (for `lsof +L1`), direct (whether O_DIRECT works), weights (sum 1)."""
        files = [file for region in self._regions for file in region.files]
        return {
            "nbytes": self.nbytes,
            "paths": [file.label for file in files],
            "direct": [file.is_direct for file in files],
            "weights": self.striping.shares,
        }

    def close(self) -> None:
        """Close the files, after the I/O engine."""
        while self._made:
            os.close(self._made.pop()[0].descriptor)

    def remove_directories(self) -> None:
        """Remove the empty directories that were made for `parents`."""
        remove_if_empty(self._new_directories)

    def _region_at(self, offset: int) -> _Region | None:
        return next((each for each in self._regions if 0 <= offset - each.start < each.nbytes), None)

    def _shares(self, nbytes: int) -> Iterator[tuple[RunFiles, int]]:
        """Return each mount with its share of `nbytes`."""
        return zip(self._mounts, self.striping.file_sizes(nbytes), strict=True)

    def _require_space(self, nbytes: int) -> None:
        """Raise SlideError where `nbytes` do not fit, before any file is made. Mounts may share a filesystem."""
        needs: Counter[int] = Counter()
        for mount, share in self._shares(nbytes):
            path, device = mount.path, mount.path.stat().st_dev
            needs[device] += share
            if needs[device] > (free := shutil.disk_usage(path).free):
                raise SlideError(
                    f"{mount.json_path}: {str(path)!r} has {size(free)} free and needs {size(needs[device])} for "
                    "states on SSD; free space there, name a further directory on another disk, or raise "
                    "ds_slide.host_memory"
                )

    def _add_region(self, name: str, nbytes: int) -> None:
        """Add `nbytes` in files called `name`, after `_require_space`."""
        made: list[tuple[RunFile, int]] = []
        try:
            files = [self._open(name, made, mount, share) for mount, share in self._shares(nbytes)]
        except BaseException:
            for file, _ in made:
                os.ftruncate(file.descriptor, 0)  # the I/O engine has it open until the end
                os.close(file.descriptor)
            raise
        # The files count only now: all have the lengths that completions compare.
        self._made.extend(made)
        self._regions.append(_Region(self.nbytes, nbytes, files))
        self.nbytes += nbytes

    def _open(self, name: str, made: list[tuple[RunFile, int]], mount: RunFiles, nbytes: int) -> _RegionFile:
        """Make a file called `name` for `nbytes`, and add it to `made` with its length."""
        json_path, path = mount.json_path, mount.path
        if nbytes == 0:
            if not self._regions:
                _log.warning("%s: %s is so much slower than the others that it is left out", json_path, path)
            return _RegionFile(None, str(path), False)
        file = mount.make(name)
        try:
            # One page more than is ever written: later writes never restore the length of a file that was cut.
            # Otherwise its holes would be read as zeros.
            number = self.io.open(file.label, nbytes + PAGE, file.descriptor)
        except BaseException as error:
            os.close(file.descriptor)
            if isinstance(error, OSError):
                raise _unusable(json_path, file.label, error) from error
            raise
        made.append((file, nbytes + PAGE))
        is_direct = self.io.is_direct(number)
        if not is_direct and not self._regions:
            _log.warning(
                "%s: the filesystem of %s refuses O_DIRECT, so states pass through the page cache, which costs memory "
                "and speed; name a directory on a local ext4 or xfs disk",
                json_path,
                path,
            )
        return _RegionFile(number, file.label, is_direct)


def _bandwidths(mounts: Sequence[RunFiles], backend: str) -> list[float]:
    """Return the bandwidths of the mounts. Only their ratios matter."""
    if len(mounts) == 1:
        return [1.0]
    weights = []
    for mount in mounts:
        try:
            weights.append(mixed_bandwidth(mount, backend))
        except SlideError:
            raise
        except (OSError, RuntimeError) as error:
            raise _unusable(mount.json_path, str(mount.path), error) from error
    return weights


def make_engine(settings: IoSettings, mounts: int) -> _native.IoEngine:
    """Make an I/O engine."""
    backend, depth, low_depth = settings.backend, settings.queue_depth, None
    if depth is None:
        # Requests at each mount: 32, or 128 where that is measured to be faster.
        depth, low_depth = min(128 * mounts, MOST_DEPTH), min(32 * mounts, MOST_DEPTH)
    try:
        return _native.IoEngine(backend, depth, settings.request_bytes or REQUEST_BYTES, low_depth=low_depth)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise SlideError(f"SSD tier: the I/O backend {backend!r} cannot be used: {error}") from error


def _unusable(json_path: str, path: str, error: Exception) -> SlideError:
    advice = advice_for(error.errno or 0) if isinstance(error, OSError) else "choose another backend"
    reason = error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else str(error)
    return SlideError(f"{json_path}: {path!r} cannot be used for states on SSD ({reason}); {advice}")


def advice_for(error: int) -> str:
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
