"""The SSD store: what is written is read, errors reach whoever must know, and nothing stays on disk."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm

from ds_slide import _native
from ds_slide.errors import SlideError
from ds_slide.store.ssd import files
from ds_slide.store.ssd.extents import REQUEST_BYTES
from ds_slide.store.ssd.files import IoSettings, TransferPart
from ds_slide.store.ssd.store import SsdStore

MIB = 1 << 20
PAGE = 4096
SIZE = 12 * MIB  # of the random transfers: six stripes
WAIT_S = 60.0
BACKENDS = ["io_uring", "libaio", "threads"]
KEY = "ds_slide.nvme_path"


class Memory:
    """Page-aligned bytes: `array` [nbytes] uint8 at `address`."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        self.slab = _native.Slab(nbytes, False, False)
        self.address = self.slab.ptr
        self.array = np.frombuffer(self.slab.memory, np.uint8)
        if seed is not None:
            self.array[:] = np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8)


class Failed:
    """What a store's `failures` were given."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.happened = threading.Event()

    def record(self, lane: str, error: BaseException) -> None:
        assert lane == "ssd"
        self.errors.append(error)
        self.happened.set()

    def waiting(self, _what: str) -> AbstractContextManager[None]:
        return nullcontext()


def with_io(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a store, those of `IoSettings` among them."""
    of_io = {field.name: options.pop(field.name) for field in fields(IoSettings) if field.name in options}
    return {**options, "io": IoSettings(**of_io)}


@pytest.fixture
def failed() -> Failed:
    return Failed()


@pytest.fixture
def make(tmp_path: Path, failed: Failed, monkeypatch) -> Iterator[Callable[..., SsdStore]]:
    """`make(nbytes, weights=(3, 1), **options)`: a store over as many directories, of these bandwidths."""
    made: list[SsdStore] = []

    def make(nbytes: int, *, weights: tuple[float, ...] = (1.0,), **options: Any) -> SsdStore:
        answers = iter(weights)
        monkeypatch.setattr(files, "mixed_bandwidth", lambda *_: next(answers))
        parents = [(f"{KEY}[{index}]", tmp_path / f"disk{index}") for index in range(len(weights))]
        made.append(SsdStore(parents, nbytes, failed, **with_io(options)))
        return made[-1]

    yield make
    for store in made:
        store.close()
    assert not list(tmp_path.glob("disk*/*")), "a closed store left something behind"


def files_of(store: SsdStore) -> list[Path]:
    """The state files, which have no name, as this process may open them."""
    return [Path(f"/proc/self/fd/{descriptor}") for descriptor in store.files.descriptors]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (2.0, 1.0, 2.0)])
def test_random_transfers_agree_with_memory(make, failed, backend, weights):
    """Several at once on disjoint places, asynchronous and waiting, urgent and not, with random delays."""
    choices = random.Random(7)
    store = make(
        SIZE,
        weights=weights,
        backend=backend,
        queue_depth=8,
        request_bytes=MIB,
        delay=lambda: time.sleep(choices.uniform(0.0, 0.002)),
    )
    assert store.statistics()["backend"] == backend
    model = np.zeros(SIZE, np.uint8)
    memory = Memory(SIZE, seed=1)
    for _ in range(6):
        cuts = sorted(choices.sample(range(1, SIZE // PAGE), 7))
        ranges = list(zip([0, *cuts], [*cuts, SIZE // PAGE], strict=True))
        done = threading.Semaphore(0)
        expected = 0
        for first, last in ranges:
            start, nbytes = first * PAGE, (last - first) * PAGE
            half = nbytes // 2 // PAGE * PAGE
            parts = [
                TransferPart(start + at, memory.address + start + at, size)
                for at, size in ((0, half), (half, nbytes - half))
                if size
            ]
            choices.shuffle(parts)
            kind = choices.randrange(3)
            if kind == 0:
                store.read(parts, done.release, urgent=choices.random() < 0.5)
            elif kind == 1:
                store.write(parts, done.release, urgent=choices.random() < 0.5)
            else:
                store.write_now(parts)
            expected += kind < 2
            if kind:
                model[start : start + nbytes] = memory.array[start : start + nbytes]
        for _ in range(expected):
            assert done.acquire(timeout=WAIT_S)
        everything = Memory(SIZE)
        store.read_now([TransferPart(0, everything.address, SIZE)])
        assert np.array_equal(everything.array, model)
        memory.array[:] = np.roll(memory.array, 12345)
    assert not failed.errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_lie_in_the_files_as_the_pattern_says_and_in_proportion(make, backend):
    store = make(16 * REQUEST_BYTES + 3 * PAGE, weights=(3.0, 1.0), backend=backend)
    memory = Memory(store.nbytes, seed=2)
    store.write_now([TransferPart(0, memory.address, store.nbytes)])
    contents = [path.read_bytes() for path in files_of(store)]
    assert [len(content) - PAGE for content in contents] == [12 * REQUEST_BYTES + 3 * PAGE, 4 * REQUEST_BYTES]
    rebuilt = b"".join(
        contents[piece.file][piece.file_offset : piece.file_offset + piece.nbytes]
        for piece in store.files.striping.pieces(0, store.nbytes)
    )
    assert rebuilt == memory.array.tobytes()
    assert store.statistics()["weights"] == [0.75, 0.25]


def test_the_space_is_allocated_at_once(make):
    (path,) = files_of(make(16 * MIB))
    assert path.stat().st_size == 16 * MIB + PAGE  # the last page is never written
    assert path.stat().st_blocks * 512 >= 16 * MIB


def test_then_runs_on_the_completion_thread_and_may_start_the_next_transfer(make):
    store = make(MIB)
    source, target, names, done = Memory(MIB, seed=3), Memory(MIB), [], threading.Event()

    def written() -> None:
        names.append(threading.current_thread().name)
        store.read([TransferPart(0, target.address, MIB)], read, urgent=True)

    def read() -> None:
        names.append(threading.current_thread().name)
        done.set()

    store.write([TransferPart(0, source.address, MIB)], written)
    assert done.wait(WAIT_S)
    assert names == ["ds_slide-ssd"] * 2
    assert np.array_equal(source.array, target.array)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_truncated_state_file_fails_the_store_once_and_for_good(make, failed, backend):
    store = make(8 * MIB, backend=backend)
    (path,) = files_of(store)
    os.truncate(path, 4 * MIB)
    memory, followed = Memory(8 * MIB), []
    for _ in range(3):
        store.read([TransferPart(4 * MIB, memory.address, MIB)], lambda: followed.append(1))
    assert failed.happened.wait(WAIT_S)
    (error,) = failed.errors
    assert isinstance(error, SlideError)
    assert store.statistics()["paths"][0] in str(error)
    assert str(4 * MIB) in str(error).replace(",", "")
    assert str(error).endswith("; keep other programs out of that directory")  # who stops the run adds the rest
    for call in (store.read, store.write):
        call([TransferPart(0, memory.address, PAGE)], lambda: followed.append(1))
    for wait in (store.read_now, store.write_now):
        with pytest.raises(SlideError, match="stopped by an earlier error"):
            wait([TransferPart(0, memory.address, PAGE)])
    store.close()
    assert not followed
    assert len(failed.errors) == 1


def test_a_waiting_reader_gets_its_error_itself(make, failed):
    store = make(8 * MIB)
    os.truncate(files_of(store)[0], 4 * MIB)
    memory = Memory(8 * MIB)
    with pytest.raises(SlideError, match=r"SSD tier: .*/disk0/#\d+ \(deleted\)"):
        store.read_now([TransferPart(4 * MIB, memory.address, MIB)])
    assert not failed.errors


def test_a_state_file_that_was_cut_stays_an_error_when_writes_lengthen_it(make, failed):
    """The hole that they leave would be read as zeros."""
    store = make(8 * MIB)
    memory = Memory(8 * MIB)
    os.truncate(files_of(store)[0], 4 * MIB)
    for action, offset in ((store.write_now, 7 * MIB), (store.read_now, 5 * MIB), (store.read_now, 0)):
        with pytest.raises(
            SlideError, match=r"SSD tier: .*deleted\) lacks [0-9,.]+ (MB|bytes) of its 8\.4 MB, .* cut it"
        ):
            action([TransferPart(offset, memory.address, MIB)])
    assert not failed.errors


def test_a_then_that_raises_is_not_lost(make, failed):
    store = make(MIB)
    memory = Memory(MIB)

    def wrong() -> None:
        raise KeyError("a fault of the engine")

    store.write([TransferPart(0, memory.address, MIB)], wrong)
    assert failed.happened.wait(WAIT_S)
    assert isinstance(failed.errors[0], KeyError)


def test_parts_outside_the_store_are_refused(make):
    store = make(2 * MIB, weights=(1.0, 1.0))
    memory = Memory(2 * MIB)
    for offset, nbytes in ((MIB, MIB + PAGE), (-PAGE, PAGE), (0, 0), (2 * MIB, PAGE)):
        with pytest.raises(ValueError, match="not within the"):
            store.read([TransferPart(offset, memory.address, nbytes)], lambda: None)
    with pytest.raises(ValueError, match="multiple of 4096"):
        store.read_now([TransferPart(0, memory.address + 1, PAGE)])
    store.read_now([TransferPart(0, memory.address, PAGE)])


def test_the_completion_thread_cannot_wait_for_itself(make, failed):
    store = make(MIB)
    memory = Memory(MIB)
    store.write([TransferPart(0, memory.address, MIB)], lambda: store.read_now([TransferPart(0, memory.address, MIB)]))
    assert failed.happened.wait(WAIT_S)
    assert "cannot wait for itself" in str(failed.errors[0])


def test_close_in_the_middle_tells_every_waiting_thread(make, failed):
    """Transfers in flight end before their memory may go; the rest is dropped; nobody waits for ever."""
    store = make(64 * MIB, queue_depth=1, request_bytes=PAGE)
    memory = Memory(64 * MIB)
    outcomes: list[str] = []
    started = threading.Barrier(5)

    def wait(index: int) -> None:
        started.wait(WAIT_S)
        try:
            store.write_now([TransferPart(index * 16 * MIB, memory.address + index * 16 * MIB, 16 * MIB)])
            outcomes.append("done")
        except SlideError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    store.write([TransferPart(0, memory.address, 64 * MIB)], lambda: None)
    started.wait(WAIT_S)
    store.close()
    store.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(outcomes) == 4
    assert all(outcome == "done" or "closed" in outcome for outcome in outcomes), outcomes
    assert not failed.errors, "closing is no failure"
    for call in (store.read_now, store.write_now):
        with pytest.raises(SlideError, match="closed"):
            call([TransferPart(0, memory.address, PAGE)])


def test_statistics_count_bytes_and_name_files(make):
    store = make(4 * MIB, weights=(1.0, 1.0), backend="threads")
    memory = Memory(4 * MIB)
    store.write_now([TransferPart(0, memory.address, 3 * MIB)])
    store.read_now([TransferPart(MIB, memory.address, MIB)])
    store.register(memory.address, 4 * MIB)
    statistics = store.statistics()
    assert (statistics["read_bytes"], statistics["written_bytes"]) == (MIB, 3 * MIB)
    assert (statistics["nbytes"], statistics["backend"]) == (4 * MIB, "threads")
    assert len(statistics["paths"]) == len(statistics["direct"]) == 2
    store.close()
    assert store.statistics()["written_bytes"] == 3 * MIB


def test_the_bandwidth_of_several_mounts_is_measured(tmp_path, failed):
    store = SsdStore([(KEY, tmp_path / "a"), (KEY, tmp_path / "b")], 256 * MIB, failed)
    weights = store.statistics()["weights"]
    assert sum(weights) == pytest.approx(1)
    assert [path.name for path in (tmp_path / "a").rglob("*") if path.is_file()].count("bandwidth") == 0
    store.close()


def test_a_disk_not_worth_waiting_for_is_left_out_and_said(make, caplog):
    with caplog.at_level(logging.WARNING, "ds_slide"):
        store = make(16 * MIB, weights=(1000.0, 1.0))
    assert f"{KEY}[1]: " in caplog.text
    assert "left out" in caplog.text
    memory = Memory(16 * MIB, seed=4)
    store.write_now([TransferPart(0, memory.address, 16 * MIB)])
    assert files_of(store)[0].read_bytes()[: 16 * MIB] == memory.array.tobytes()


def test_a_filesystem_without_direct_io_is_said_once(make, caplog, monkeypatch):
    """Patched: the kernels at hand take O_DIRECT on every filesystem that a test can mount."""
    monkeypatch.setattr(_native.IoEngine, "is_direct", lambda _engine, _file: False)
    with caplog.at_level(logging.WARNING, "ds_slide"):
        store = make(MIB)
    assert len(caplog.records) == 1
    assert "refuses O_DIRECT" in caplog.text
    assert str(Path(store.statistics()["paths"][0]).parent) in caplog.text
    assert store.statistics()["direct"] == [False]


def refusal(parents: list[Path], nbytes: int, **options: Any) -> str:
    with pytest.raises(SlideError) as caught:
        named = [(f"{KEY}[{index}]", parent) for index, parent in enumerate(parents)]
        SsdStore(named, nbytes, Failed(), **with_io(options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_too_little_space_is_refused_with_the_bytes_and_leaves_nothing(mounted):
    small = mounted("size=16m")
    text = refusal([small], 32 * MIB)
    assert text.startswith(f"{KEY}[0]: '{small}' has ")
    assert "needs 33.6 MB" in text
    assert "raise ds_slide.host_memory" in text
    assert not list(small.iterdir())


def test_mounts_on_one_filesystem_are_added_up(mounted, monkeypatch):
    monkeypatch.setattr(files, "mixed_bandwidth", lambda *_: 1.0)
    small = mounted("size=24m")
    text = refusal([small / "a", small / "b"], 32 * MIB)
    assert text.startswith(f"{KEY}[1]: ")
    assert "needs 33.6 MB" in text
    assert not list(small.glob("*/*"))


def test_a_disk_too_full_to_be_measured_is_refused(mounted):
    small = mounted("size=16m")
    text = refusal([small / "a", small / "b"], 4 * MIB)
    assert text.startswith(f"{KEY}[0]: ")
    assert "free space there" in text
    assert not list(small.glob("*/*"))


def test_a_limit_on_the_length_of_files_is_not_taken_for_a_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        text = refusal([tmp_path / "a" / "b"], 4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"the file needs {4 * MIB + 4096} bytes: {os.strerror(errno.EFBIG)} (errno {errno.EFBIG})); raise" in text
    assert "ulimit -f" in text and "free" not in text.replace(str(tmp_path), "")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_used_leaves_nothing_in_the_others(tmp_path):
    (tmp_path / "file").touch()
    assert refusal([tmp_path / "good", tmp_path / "file"], MIB).startswith(f"{KEY}[1]: ")
    assert not (tmp_path / "good").exists()


def test_a_backend_that_does_not_exist_is_refused(tmp_path):
    assert "'nothing' cannot be used" in refusal([tmp_path], MIB, backend="nothing")
    assert not list(tmp_path.iterdir())


SCRIPT = """
    import os, sys
    from pathlib import Path
    from ds_slide import _native
    from ds_slide.runtime.core.futures import Failures
    from ds_slide.store.ssd.files import IoSettings, TransferPart
    from ds_slide.store.ssd.store import SsdStore
    slab = _native.Slab(64 << 20, False, False)
    store = SsdStore([("key", Path(sys.argv[1]))], 64 << 20, Failures(), io=IoSettings(sys.argv[2], 2, 1 << 16))
    part = [TransferPart(0, slab.ptr, 64 << 20)]
"""


@pytest.fixture
def started(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., warm.Run]:
    """Runs a script that goes on from `SCRIPT`, with its store in `tmp_path`."""

    def start(script: str, backend: str = "auto") -> warm.Run:
        folder = tmp_path_factory.mktemp("script")
        (folder / "script.py").write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(script))
        return warm.start(folder / "script.py", tmp_path, backend, folder=folder)

    return start


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_that_never_closes_exits_cleanly_with_transfers_under_way(tmp_path, started, backend):
    run = started("store.write(part, lambda: None); store.read(part, lambda: None)", backend)
    assert (run.end(), run.log) == (0, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_completions_that_arrive_during_the_interpreters_exit_do_not_abort_it(tmp_path, started, backend):
    """A thread that comes back from C++ into an interpreter that is gone ends the process with SIGABRT."""
    script = """
    import threading
    small, turns = [TransferPart(0, slab.ptr, 4096)], threading.Semaphore(0)
    def again():
        turns.release()
        store.write(small, again)
    for _ in range(8):
        again()
    for _ in range(100):
        turns.acquire()
    """
    run = started(script, backend)
    assert (run.end(), run.log) == (0, "")
    assert not list(tmp_path.iterdir())


def test_a_process_killed_while_it_writes_leaves_nothing(tmp_path, started):
    script = """
    def again():
        store.write(part, again)
    again()
    print("writing", flush=True)
    import threading
    threading.Event().wait()
    """
    run = started(script)
    while not (run.folder / "log").exists() or run.log != "writing\n":
        assert not run.has_ended(0.01), run.log
    run.kill()
    assert run.end() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_forked_child_can_neither_use_nor_end_its_parents_store(tmp_path, started):
    script = """
    child = os.fork()
    if child == 0:
        try:
            store.read(part, lambda: None)
        except RuntimeError as error:
            assert "fork" in str(error), error
            store.close()
            sys.exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.write_now(part)
    assert os.path.exists(f"/proc/self/fd/{store.files.descriptors[0]}")
    """
    run = started(script)
    assert (run.end(), run.log) == (0, "")
    assert not list(tmp_path.iterdir())


class Ends:
    """An I/O engine whose `next` raises once a transfer has been submitted."""

    def __init__(self, engine: _native.IoEngine) -> None:
        self._engine = engine
        self._submitted = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, *arguments: Any) -> None:
        self._engine.submit(*arguments)
        self._submitted.set()

    def next(self, _: float | None) -> None:
        self._submitted.wait(WAIT_S)
        raise RuntimeError("no completion will come")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_completion_thread_is_told(make, failed, monkeypatch):
    engine = files.make_engine
    monkeypatch.setattr(files, "make_engine", lambda *arguments: Ends(engine(*arguments)))
    store, memory = make(SIZE), Memory(PAGE)
    store.write([TransferPart(0, memory.address, PAGE)], lambda: None)
    assert failed.happened.wait(WAIT_S)
    assert [str(error) for error in failed.errors] == ["no completion will come"]
