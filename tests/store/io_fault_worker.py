"""One scenario of `test_io_faults`, in a process of its own with fault_shim.c preloaded.

python io_fault_worker.py SCENARIO BACKEND FOLDER
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

from io_tools import BLOCK, Memory, finish, hammer, hammer_bytes, transfer

from ds_slide._native import IoEngine

MIB = 1 << 20
REFUSE_DIRECT, REFUSE_FALLOCATE, REFUSE_SYNC, REFUSE_URING, REFUSE_LIBAIO = 1, 2, 4, 8, 16
SHIM = ctypes.CDLL(None)
SHIM.fault_set.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_int)


def cut(every: int, keep: int, extra: int) -> None:
    """Every n-th I/O moves `keep` bytes and reports `extra` more."""
    SHIM.fault_set(every, keep, extra, 0)


def fail(every: int, error: int) -> None:
    """Every n-th I/O fails."""
    SHIM.fault_set(every, -1, 0, error)


def check_mix(backend: str, folder: Path) -> int:
    """Random transfers that must all succeed in spite of the faults; the number of requests sent again."""
    engine = IoEngine(backend, 4, 8 * BLOCK)  # type: ignore[arg-type]
    paths = [folder / "a", folder / "b"]
    files = [engine.open(str(path), hammer_bytes(2)) for path in paths]
    hammer(engine, files, paths, threads=2, rounds=40, seed=3, unit=2 * BLOCK)
    repeated = engine.stats()["repeated_requests"]
    engine.close()
    assert isinstance(repeated, int)
    return repeated


def short(backend: str, folder: Path) -> None:
    cut(3, 5 * BLOCK, 0)
    assert check_mix(backend, folder) > 10


def short_inside_a_block(backend: str, folder: Path) -> None:
    """A direct file: the kernel says so many bytes, but the caller may count on whole blocks only."""
    engine = IoEngine(backend, 1, BLOCK)  # type: ignore[arg-type]
    assert engine.is_direct(engine.open(str(folder / "probe"), BLOCK)), "SKIP: no O_DIRECT here"
    engine.close()  # the shim follows one ring
    cut(3, 5 * BLOCK, 512)
    assert check_mix(backend, folder) > 10


def short_buffered(backend: str, folder: Path) -> None:
    """A buffered file goes on at the very byte."""
    SHIM.fault_refuse(REFUSE_DIRECT)
    cut(3, 5 * BLOCK + 100, 0)
    assert check_mix(backend, folder) > 10


def interrupted(backend: str, folder: Path) -> None:
    for error in (errno.EINTR, errno.EAGAIN):
        fail(3, error)
        (folder / str(error)).mkdir()
        assert check_mix(backend, folder / str(error)) > 10


def no_progress(backend: str, folder: Path) -> None:
    """What never ends otherwise: always interrupted."""
    engine = IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    file = engine.open(str(folder / "file"), MIB)
    memory = Memory(BLOCK)
    fail(1, errno.EINTR)
    sentence, error = transfer(engine, True, [(file, 0, memory.ptr, BLOCK)])
    assert error == errno.EINTR and sentence is not None and "without moving a byte" in sentence
    SHIM.fault_set(0, -1, 0, 0)
    assert transfer(engine, True, [(file, 0, memory.ptr, BLOCK)]) == (None, 0)


def failing(backend: str, folder: Path) -> None:
    """One completion for each transfer, with errno and sentence for those hit; the memory is left alone afterwards."""
    engine = IoEngine(backend, 4, BLOCK)  # type: ignore[arg-type]
    path = folder / "file"
    file = engine.open(str(path), MIB)
    memory = Memory(MIB)
    for error, write in ((errno.EIO, True), (errno.EIO, False), (errno.ENOSPC, True)):
        fail(37, error)
        for token in range(64):  # of 4 requests each
            engine.submit(token, write, [(file, token * 4 * BLOCK, memory.ptr + token * 4 * BLOCK, 4 * BLOCK)], False)
        results = [finish(engine) for _ in range(64)]
        assert sorted(token for token, _, _ in results) == list(range(64))
        bad = [(sentence, code) for _, sentence, code in results if code != 0]
        assert 2 <= len(bad) <= 8, bad
        for sentence, code in bad:
            assert code == error and sentence is not None
            for part in (
                "write of 4096 bytes at offset" if write else "read of 4096 bytes at offset",
                str(path),
                os.strerror(error),
            ):
                assert part in sentence, sentence
        assert engine.next(0) is None
        assert engine.stats()["in_flight"] == engine.stats()["unfinished"] == 0
    SHIM.fault_set(0, -1, 0, 0)
    assert transfer(engine, False, [(file, 0, memory.ptr, MIB)]) == (None, 0)


def all_failing(backend: str, folder: Path) -> None:
    """A failed transfer of many requests stops there: its other requests are not started."""
    engine = IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    file = engine.open(str(folder / "file"), MIB)
    memory = Memory(MIB)
    engine.submit(1, True, [(file, 0, memory.ptr, MIB)], False)
    assert finish(engine) == (1, None, 0)
    before = engine.stats()["write_requests"]
    fail(1, errno.EIO)
    sentence, error = transfer(engine, True, [(file, 0, memory.ptr, MIB)])
    assert error == errno.EIO and sentence is not None
    assert engine.stats()["write_requests"] == before


def file_size_limit(backend: str, folder: Path) -> None:
    """A limit of the kernel's own, no shim: the write that would exceed it fails."""
    engine = IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    file = engine.open(str(folder / "file"), MIB)
    memory = Memory(MIB)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    sentence, error = transfer(engine, True, [(file, MIB - 2 * BLOCK, memory.ptr, 8 * BLOCK)])
    assert error == errno.EFBIG and sentence is not None and sentence.endswith(f"(errno {errno.EFBIG})")
    assert transfer(engine, True, [(file, MIB - 2 * BLOCK, memory.ptr, 2 * BLOCK)]) == (None, 0)


def no_direct(backend: str, folder: Path) -> None:
    SHIM.fault_refuse(REFUSE_DIRECT)
    engine = IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    assert not engine.is_direct(engine.open(str(folder / "file"), MIB))
    assert (engine.stats()["direct_files"], engine.stats()["buffered_files"]) == (0, 1)
    check_mix(backend, folder)


def no_fallocate(backend: str, folder: Path) -> None:
    SHIM.fault_refuse(REFUSE_FALLOCATE)
    engine = IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    engine.open(str(folder / "file"), MIB)
    assert (folder / "file").stat().st_size == MIB


def failing_sync(backend: str, folder: Path) -> None:
    engine = IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    file = engine.open(str(folder / "file"), MIB)
    engine.sync(file)
    SHIM.fault_refuse(REFUSE_SYNC)
    try:
        engine.sync(file)
    except OSError as error:
        assert error.errno == errno.EIO and error.filename == str(folder / "file")
    else:
        raise AssertionError("a failed fdatasync was not reported")


def refused_backend(backend: str, folder: Path) -> None:
    """A container that forbids a backend: named it is an error, "auto" takes the next and says why."""
    del folder
    bits, following = {"io_uring": (REFUSE_URING, "libaio"), "libaio": (REFUSE_URING | REFUSE_LIBAIO, "threads")}[
        backend
    ]
    SHIM.fault_refuse(bits)
    try:
        IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    except RuntimeError as error:
        assert "Operation not permitted (errno 1)" in str(error) and "auto" in str(error)
    else:
        raise AssertionError("a forbidden backend was made")
    engine = IoEngine("auto", 2, BLOCK)
    assert engine.backend == following
    assert f"{backend}: io_" in str(engine.stats()["skipped_backends"])


def little_lockable_memory(backend: str, folder: Path) -> None:
    """No room under RLIMIT_MEMLOCK: said, and transfers work without."""
    memory = Memory(MIB)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (16 * BLOCK, 16 * BLOCK))
    if os.getuid() == 0:  # root may lock what it likes, and reach the folder through others that are its own
        os.chdir(folder)
        os.chown(folder, 65534, 65534)
        os.setuid(65534)
        folder = Path()
    engine = IoEngine(backend, 2, BLOCK)  # type: ignore[arg-type]
    file = engine.open(str(folder / "file"), MIB)
    assert not engine.register_memory(memory.ptr, MIB)
    assert not engine.stats()["registered_buffers"]
    assert transfer(engine, False, [(file, 0, memory.ptr, MIB)]) == (None, 0)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
