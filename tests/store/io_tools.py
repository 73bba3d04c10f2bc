"""What the tests of the I/O engine share: a checked mix of transfers, and memory with a view of its bytes."""

from __future__ import annotations

import queue
import random
import threading
from pathlib import Path

from ds_slide._native import IoEngine, Slab

BLOCK = 4096
BACKENDS = ("io_uring", "libaio", "threads")
PATIENCE_S = 60.0  # for what takes milliseconds on an idle machine


class Memory:
    """Page-aligned memory that an engine reads into and writes from."""

    def __init__(self, nbytes: int) -> None:
        self._slab = Slab(nbytes, pin=False, huge_pages=False)
        self.bytes = self._slab.memory
        self.ptr = self._slab.ptr
        self.nbytes = nbytes


def finish(engine: IoEngine) -> tuple[int, str | None, int]:
    """The next finished transfer, which must come."""
    result = engine.next(PATIENCE_S)
    assert result is not None, f"nothing finished in {PATIENCE_S} s: {engine.stats()}"
    return result


def transfer(engine: IoEngine, write: bool, pieces: list[tuple[int, int, int, int]]) -> tuple[str | None, int]:
    """One transfer from beginning to end: its sentence and errno."""
    engine.submit(7, write, pieces, False)
    token, sentence, error = finish(engine)
    assert token == 7
    return sentence, error


def hammer(
    engine: IoEngine, files: list[int], paths: list[Path], threads: int, rounds: int, seed: int, unit: int = BLOCK
) -> None:
    """Random transfers from several threads, each in extents of its own in all files, against a model in memory.

    Pieces are multiples of `unit` bytes.

    Extents of the threads alternate, so that neighbouring blocks of one file are read and written at the same time.
    Every transfer must succeed, with the bytes of the model.
    """
    extent, per_thread = 64 * BLOCK, 2
    inboxes: list[queue.Queue[tuple[int, str | None, int]]] = [queue.Queue() for _ in range(threads)]
    wrong: list[str] = []
    final: list[tuple[Path, int, bytes]] = []

    def dispatch() -> None:
        for _ in range(threads * rounds):
            result = finish(engine)
            inboxes[result[0] // rounds].put(result)

    def work(thread: int) -> None:
        rng = random.Random(seed * 1000 + thread)
        memory = Memory(extent)
        model = {(file, e): bytearray(extent) for file in files for e in range(per_thread)}
        for key in model:
            model[key][:] = b"\0" * extent
        for turn in range(rounds):
            write = rng.random() < 0.5
            pieces, expected, at = [], [], 0
            keys = rng.sample(sorted(model), k=rng.randint(1, len(model)))  # one piece each: pieces never overlap
            for key in keys:
                nbytes = rng.randint(1, extent // len(keys) // unit) * unit
                offset = rng.randint(0, (extent - nbytes) // BLOCK) * BLOCK
                if write:
                    data = rng.randbytes(nbytes)
                    memory.bytes[at : at + nbytes] = data
                    model[key][offset : offset + nbytes] = data
                else:
                    memory.bytes[at : at + nbytes] = b"\xee" * nbytes
                    expected.append((at, bytes(model[key][offset : offset + nbytes])))
                file_offset = (key[1] * threads + thread) * extent + offset
                pieces.append((key[0], file_offset, memory.ptr + at, nbytes))
                at += nbytes
            engine.submit(thread * rounds + turn, write, pieces, rng.random() < 0.3)
            token, sentence, error = inboxes[thread].get(timeout=PATIENCE_S)
            if token != thread * rounds + turn or sentence is not None or error != 0:
                wrong.append(f"thread {thread} turn {turn}: {token} {sentence} {error}")
            for begin, data in expected:
                if memory.bytes[begin : begin + len(data)] != data:
                    wrong.append(f"thread {thread} turn {turn}: read other bytes than were written")
        for (file, e), data in model.items():
            final.append((paths[files.index(file)], (e * threads + thread) * extent, bytes(data)))

    workers = [threading.Thread(target=dispatch), *(threading.Thread(target=work, args=(i,)) for i in range(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong[:3]
    assert len(final) == threads * per_thread * len(files)
    for path, offset, data in final:
        with path.open("rb") as stream:
            stream.seek(offset)
            assert stream.read(len(data)) == data, f"{path} at {offset} holds other bytes than were written"
    assert engine.stats()["in_flight"] == 0
    assert engine.next(0) is None


def hammer_bytes(threads: int) -> int:
    """Size of each file that `hammer` needs."""
    return 64 * BLOCK * 2 * threads
