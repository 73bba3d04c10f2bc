"""IoEngine: what arrives, in what order, what is refused and what is said when it fails; the same on every backend."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_slide._native import IoEngine

from .io_tools import BACKENDS, BLOCK, PATIENCE_S, Memory, finish, hammer, hammer_bytes, transfer

MIB = 1 << 20
Make = Callable[..., IoEngine]


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made = []

    def build(
        queue_depth: int = 8,
        request_bytes: int = 16 * BLOCK,
        burst_bytes: int | None = None,
        low_depth: int | None = None,
    ) -> IoEngine:
        try:
            made.append(IoEngine(request.param, queue_depth, request_bytes, burst_bytes, low_depth))
        except RuntimeError as error:
            pytest.skip(str(error))
        assert made[-1].backend == request.param
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.mark.parametrize("low_depth", [None, 2])
def test_random_transfers_of_many_threads_match_a_model(make: Make, tmp_path: Path, low_depth: int | None) -> None:
    threads = 4
    engine = make(5, 3 * BLOCK, low_depth=low_depth)
    paths = [tmp_path / "a", tmp_path / "b"]
    files = [engine.open(str(path), hammer_bytes(threads)) for path in paths]
    hammer(engine, files, paths, threads, rounds=40, seed=1)


def test_registered_memory_is_an_optimisation_only(make: Make, tmp_path: Path) -> None:
    engine = make()
    file = engine.open(str(tmp_path / "file"), MIB)
    memory = Memory(2 * MIB)
    begin, end = memory.ptr + MIB // 2, memory.ptr + 3 * MIB // 2
    registered = engine.register_memory(begin, MIB)
    assert registered == engine.stats()["registered_buffers"]
    assert engine.backend == "io_uring" or not registered
    data = os.urandom(MIB)
    for at in (memory.ptr, begin - BLOCK, begin, begin + BLOCK, end - BLOCK, end - MIB):  # outside, across, inside
        start = at - memory.ptr
        memory.bytes[start : start + MIB // 2] = data[: MIB // 2]
        assert transfer(engine, True, [(file, 0, at, MIB // 2)]) == (None, 0)
        memory.bytes[start : start + MIB // 2] = bytes(MIB // 2)
        assert transfer(engine, False, [(file, 0, at, MIB // 2)]) == (None, 0)
        assert memory.bytes[start : start + MIB // 2] == data[: MIB // 2]
    if registered:
        with pytest.raises(ValueError, match="overlaps"):
            engine.register_memory(end - BLOCK, MIB // 4)
    engine.unregister_memory(begin)
    assert not engine.stats()["registered_buffers"]
    assert engine.register_memory(end - BLOCK, MIB // 4) == registered
    with pytest.raises(ValueError, match="multiple of 4096"):
        engine.register_memory(memory.ptr + 1, BLOCK)


def test_reading_past_the_end_is_an_error_once_and_leaves_the_engine_usable(make: Make, tmp_path: Path) -> None:
    engine = make(4, BLOCK)
    path = tmp_path / "file"
    file = engine.open(str(path), 4 * BLOCK)
    memory = Memory(16 * BLOCK)
    for offset, nbytes in ((4 * BLOCK, BLOCK), (2 * BLOCK, 14 * BLOCK), (1 << 40, BLOCK)):
        sentence, error = transfer(engine, False, [(file, offset, memory.ptr, nbytes)])
        assert error == errno.ENODATA
        assert sentence is not None
        for part in ("read of 4096 bytes at offset ", str(path), "ends at byte 16384"):
            assert part in sentence
    assert engine.next(0) is None
    assert transfer(engine, False, [(file, 0, memory.ptr, 4 * BLOCK)]) == (None, 0)


def test_a_file_that_ends_inside_a_block_is_an_error_and_not_a_loop(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (BLOCK + 100))
    engine = make(2, MIB)
    memory = Memory(2 * BLOCK)
    sentence, error = transfer(engine, False, [(engine.open(str(path), 0), 0, memory.ptr, 2 * BLOCK)])
    assert error == errno.ENODATA and sentence is not None and "ends at byte 4196" in sentence


def test_a_full_filesystem_is_reported_with_what_was_written_where(make: Make, mounted: Callable[[str], Path]) -> None:
    path = mounted("size=1m") / "file"
    path.touch()
    os.truncate(path, 4 * MIB)  # sparse: the space is missed when it is written
    engine = make(4, 16 * BLOCK)
    file = engine.open(str(path), 0)
    memory = Memory(4 * MIB)
    sentence, error = transfer(engine, True, [(file, 0, memory.ptr, 4 * MIB)])
    assert error == errno.ENOSPC
    assert sentence is not None and "write of " in sentence and str(path) in sentence
    assert sentence.endswith(f"failed: {os.strerror(errno.ENOSPC)} (errno {errno.ENOSPC})")  # advice is the caller's
    with pytest.raises(OSError, match=r"needs 8388608 bytes and its filesystem has \d+ free: No space left") as refused:
        engine.open(str(path.parent / "other"), 8 * MIB)
    assert refused.value.errno == errno.ENOSPC
    assert not (path.parent / "other").exists()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ((0, 1, 0, BLOCK), "offset of piece 1 is 1"),
        ((0, -BLOCK, 0, BLOCK), "offset of piece 1"),
        ((0, 0, 512, BLOCK), "address of piece 1"),
        ((0, 0, 0, BLOCK + 512), "nbytes of piece 1"),
        ((0, 0, 0, -BLOCK), "nbytes of piece 1"),
        ((0, 0, 0, 0), "piece 1 has no bytes"),
        ((0, (1 << 63) - BLOCK, 0, BLOCK), "beyond what a file can have"),
        ((1, 0, 0, BLOCK), "file number 1 was not given"),
        ((-1, 0, 0, BLOCK), "file number -1 was not given"),
    ],
)
def test_a_bad_piece_is_refused_before_anything_is_queued(
    make: Make, tmp_path: Path, piece: tuple[int, int, int, int], message: str
) -> None:
    engine = make()
    file = engine.open(str(tmp_path / "file"), BLOCK)
    memory = Memory(BLOCK)
    bad = (piece[0], piece[1], memory.ptr + piece[2], piece[3])
    with pytest.raises(ValueError, match=message):
        engine.submit(1, True, [(file, 0, memory.ptr, BLOCK), bad], False)
    assert engine.stats()["unfinished"] == 0
    assert engine.next(0) is None


def test_arguments_of_the_engine_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\"mmap\" but must be one of auto, io_uring, libaio, threads"):
        IoEngine("mmap", 8, BLOCK)  # type: ignore[arg-type]
    for depth in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match="queue_depth is "):
            IoEngine("threads", depth, BLOCK)
    for low_depth in (0, 9):
        with pytest.raises(ValueError, match=f"low_depth is {low_depth} but must be from 1 to queue_depth, 8"):
            IoEngine("threads", 8, BLOCK, low_depth=low_depth)
    for nbytes in (0, 512, BLOCK + 1, -BLOCK, 1 << 40):
        with pytest.raises(ValueError, match="request_bytes is "):
            IoEngine("threads", 8, nbytes)


def test_a_new_file_is_private_and_has_all_its_space(make: Make, tmp_path: Path) -> None:
    engine = make()
    path = tmp_path / "file"
    before = os.umask(0)
    try:
        engine.open(str(path), 3 * MIB)
    finally:
        os.umask(before)
    status = path.stat()
    assert (status.st_mode & 0o777, status.st_size) == (0o600, 3 * MIB)
    assert status.st_blocks * 512 >= 3 * MIB
    with pytest.raises(FileExistsError, match=str(path)):
        engine.open(str(path), BLOCK)
    with pytest.raises(FileNotFoundError, match="missing"):
        engine.open(str(tmp_path / "missing"), 0)
    with pytest.raises(ValueError, match="nbytes is -1"):
        engine.open(str(tmp_path / "other"), -1)
    with pytest.raises(OSError, match=f"needs {1 << 50} bytes") as refused:
        engine.open(str(tmp_path / "huge"), 1 << 50)
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, str(tmp_path / "huge"))
    assert os.listdir(tmp_path) == ["file"]


def test_urgent_transfers_overtake_and_the_others_keep_their_order(make: Make, tmp_path: Path) -> None:
    # One request at a time: completions come in the order of the requests. One long burst: that of the reads.
    engine = make(1, BLOCK, 256 * MIB)
    file = engine.open(str(tmp_path / "file"), MIB)
    memory = Memory(MIB)
    long = [(file, 0, memory.ptr, MIB)] * 8  # 2048 requests
    engine.submit(0, False, long, False)
    for token in (1, 2, 3):
        engine.submit(token, token == 2, [(file, 0, memory.ptr, BLOCK)], False)
    engine.submit(4, False, [(file, 0, memory.ptr, BLOCK)], True)
    engine.submit(5, False, [(file, 0, memory.ptr, BLOCK)], True)
    assert [finish(engine)[0] for _ in range(6)] == [4, 5, 0, 1, 3, 2]  # reads and writes are two queues


def test_reads_and_writes_take_turns_in_bursts(make: Make, tmp_path: Path) -> None:
    engine = make(1, MIB, 8 * MIB)
    file = engine.open(str(tmp_path / "file"), MIB)
    memory = Memory(MIB)
    # Goes before all others, and takes long enough that they all wait when it has ended.
    engine.submit(3, False, [(file, 0, memory.ptr, MIB)] * 500, True)
    for token in (0, 1):
        engine.submit(token, False, [(file, 0, memory.ptr, MIB)] * 10, False)
    engine.submit(2, True, [(file, 0, memory.ptr, BLOCK)], False)
    # 8 MiB of reads, then it is the write's turn, in the middle of a transfer.
    assert [finish(engine)[0] for _ in range(4)] == [3, 2, 0, 1]
    assert engine.stats()["burst_bytes"] == 8 * MIB


def test_the_low_depth_holds_all_but_urgent_requests_back(make: Make, tmp_path: Path) -> None:
    low, high = 3, 32
    engine = make(high, BLOCK, low_depth=low)
    file = engine.open(str(tmp_path / "file"), 16 * MIB)
    memory = Memory(16 * MIB)

    def most_in_flight(urgent: bool) -> int:
        engine.submit(1, True, [(file, 0, memory.ptr, memory.nbytes)], urgent)
        most = 0
        while engine.next(0.0) is None:
            most = max(most, int(engine.stats()["in_flight"]))
        return most

    assert engine.stats()["depth"] == low
    assert 0 < most_in_flight(urgent=False) <= low
    assert low < most_in_flight(urgent=True) <= high
    assert engine.stats()["latency_s"] > 0.0  # type: ignore[operator]


def test_a_transfer_without_pieces_is_finished_at_once(make: Make) -> None:
    engine = make()
    engine.submit(-5, True, [], False)
    assert engine.next(PATIENCE_S) == (-5, None, 0)
    assert engine.next(0) is None


def test_statistics_count_what_was_moved(make: Make, tmp_path: Path) -> None:
    engine = make(4, 2 * BLOCK)
    file = engine.open(str(tmp_path / "file"), 16 * BLOCK)
    memory = Memory(16 * BLOCK)
    pieces = [(file, 0, memory.ptr, 5 * BLOCK), (file, 8 * BLOCK, memory.ptr, BLOCK)]
    assert transfer(engine, True, pieces) == (None, 0)
    assert transfer(engine, False, pieces[:1]) == (None, 0)
    stats = engine.stats()
    assert (stats["written_bytes"], stats["write_requests"]) == (6 * BLOCK, 4)
    assert (stats["read_bytes"], stats["read_requests"]) == (5 * BLOCK, 3)
    busy, read, write = (stats[name] for name in ("busy_s", "read_busy_s", "write_busy_s"))
    assert isinstance(busy, float) and isinstance(read, float) and isinstance(write, float)
    assert read > 0 and write > 0 and busy == pytest.approx(read + write)  # one after the other here
    assert stats["direct_files"] == int(engine.is_direct(file)) == 1 - int(stats["buffered_files"])
    engine.sync(file)
    with pytest.raises(ValueError, match="file number 9"):
        engine.sync(9)


def test_close_waits_for_the_device_and_drops_what_is_queued(make: Make, tmp_path: Path) -> None:
    engine = make(2, BLOCK)
    path = tmp_path / "file"
    file = engine.open(str(path), MIB)
    memory = Memory(MIB)
    memory.bytes[:] = b"\x01" * MIB
    for token in range(50):
        engine.submit(token, True, [(file, 0, memory.ptr, MIB)], False)
    engine.close()
    memory.bytes[:] = b"\x02" * MIB
    results = [finish(engine) for _ in range(50)]
    assert sorted(token for token, _, _ in results) == list(range(50))
    dropped = [(sentence, error) for _, sentence, error in results if error != 0]
    assert len(dropped) > 10
    assert all(error == errno.ECANCELED and sentence and "closed" in sentence for sentence, error in dropped)
    assert b"\x02" not in path.read_bytes(), "memory was read after close() had returned"
    assert engine.next(PATIENCE_S) is None
    engine.close()
    assert engine.stats()["in_flight"] == 0
    for call in (
        lambda: engine.submit(1, True, [], False),
        lambda: engine.open(str(path), 0),
        lambda: engine.sync(file),
        lambda: engine.is_direct(file),
        lambda: engine.register_memory(memory.ptr, MIB),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("timeout_s", [PATIENCE_S, None])
def test_close_ends_the_waits_of_other_threads(make: Make, timeout_s: float | None) -> None:
    engine = make()
    results: list[object] = []
    waiting = [threading.Thread(target=lambda: results.append(engine.next(timeout_s))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    engine.close()
    for thread in waiting:
        thread.join(PATIENCE_S / 2)
    assert results == [None] * 3


def test_a_wait_without_a_limit_ends_with_what_is_finished_and_all_is_told_after_close(
    make: Make, tmp_path: Path
) -> None:
    engine, memory = make(), Memory(BLOCK)
    file = engine.open(str(tmp_path / "file"), BLOCK)
    told: list[object] = []

    def listen() -> None:
        while (finished := engine.next(None)) is not None:
            told.append(finished[0])

    listener = threading.Thread(target=listen)
    listener.start()
    for token in range(5):
        engine.submit(token, True, [(file, 0, memory.ptr, BLOCK)], False)
    engine.close()
    listener.join(PATIENCE_S / 2)
    assert not listener.is_alive() and sorted(told) == [0, 1, 2, 3, 4]


def test_a_forked_child_is_refused_and_does_not_disturb_the_parent(make: Make, tmp_path: Path) -> None:
    engine = make()
    file = engine.open(str(tmp_path / "file"), MIB)
    memory = Memory(MIB)
    engine.submit(1, True, [(file, 0, memory.ptr, MIB)], False)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.submit(2, False, [], False)
        except RuntimeError as error:
            status = 0 if "forked" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert finish(engine) == (1, None, 0)
    assert transfer(engine, False, [(file, 0, memory.ptr, MIB)]) == (None, 0)


def test_a_descriptor_leak_would_show(tmp_path: Path) -> None:
    for backend in ("auto", "threads"):
        before = sorted(os.listdir("/proc/self/fd"))
        engine = IoEngine(backend, 4, BLOCK)  # type: ignore[arg-type]
        engine.open(str(tmp_path / backend), MIB)
        engine.close()
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_open_already(make: Make, tmp_path: Path) -> None:
    """The path only names it: nothing is opened, made or removed there."""
    path = tmp_path / "named"
    path.write_bytes(b"another file")
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    engine, memory = make(), Memory(BLOCK)
    file = engine.open(str(path), 2 * BLOCK, descriptor)
    assert os.fstat(descriptor).st_size == 2 * BLOCK and os.fstat(descriptor).st_blocks * 512 >= 2 * BLOCK
    memory.bytes[:] = b"w" * BLOCK
    assert transfer(engine, True, [(file, BLOCK, memory.ptr, BLOCK)]) == (None, 0)
    assert Path(f"/proc/self/fd/{descriptor}").read_bytes() == bytes(BLOCK) + b"w" * BLOCK
    os.close(descriptor)
    assert transfer(engine, False, [(file, BLOCK, memory.ptr, BLOCK)]) == (None, 0)
    sentence, error = transfer(engine, False, [(file, 2 * BLOCK, memory.ptr, BLOCK)])
    assert error == errno.ENODATA and sentence is not None and str(path) in sentence
    with pytest.raises(OSError, match="Bad file descriptor") as refused:
        engine.open(str(path), BLOCK, descriptor)
    assert refused.value.errno == errno.EBADF
    assert path.read_bytes() == b"another file"
