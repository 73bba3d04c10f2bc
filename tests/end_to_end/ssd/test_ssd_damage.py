"""State files that the disk or another program changes under a training run: one sentence, never other losses."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from damage import KINDS, Extent, StateFile, state_file_of
from harness import batches, causal_loss, ds_config, engine_for, llama, on_ssd, train
from tight_memory import room_for_gradients_of

from ds_slide.errors import SlideError
from ds_slide.store.ssd.extents import whole_pages

CHUNK_NUMEL = 4096  # a block of the small model, 45 thousand parameters, has 11 chunks
BLOCK, OTHER, CHUNK = 2, 3, 5

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", CHUNK_NUMEL)


def ssd_config(folder: Path, slide: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Everything on SSD, with as few buffers and slots as possible: what is needed is read."""
    few = {"host_memory": 0, "window": 2, "ssd_buffers": 2, "weight_buffers": 2, "gradient_buffers": 2}
    return on_ssd(ds_config(few | (slide or {}), **others), folder)


def extent_of(kind: str, engine: Any, block: int) -> Extent:
    state = engine.optimizer.runtime.blocks[block].state
    if kind == "chunk":
        return Extent(state.optimizer.chunks[CHUNK].offset, state.optimizer.chunks[CHUNK].nbytes)
    state_buffer = state.buffers["weight" if kind == "weights" else "gradient"]
    return Extent(state_buffer.offsets[0], whole_pages(state_buffer.numel * state_buffer.dtype.itemsize))


NAMES = {
    "chunk": rf"chunk {CHUNK} of the optimizer states of model\.layers\.({BLOCK}|{OTHER})",
    "weights": rf"the weights of model\.layers\.({BLOCK}|{OTHER})",
    "gradient": rf"the held gradient of model\.layers\.({BLOCK}|{OTHER})",
}


def settle(engine: Any) -> None:
    """Let all that is under way end; nothing of the blocks stays in buffers."""
    runtime = engine.optimizer.runtime
    for _ in range(2):  # what is on its way up may be read between the first round and the end of the lane
        for unit in runtime.units:
            runtime.access.settle(unit)
        runtime.parts.context.lanes.h2d.drain()
    assert runtime.parts.ssd.store.statistics()["unfinished"] == 0


@contextmanager
def file_of(engine: Any) -> Iterator[StateFile]:
    with state_file_of(engine.optimizer.runtime.parts.ssd.store) as file:
        yield file


def check_end(engine: Any, raised: BaseException, folder: Path, what: str) -> None:
    sentence = (
        rf"the ssd lane stopped with SlideError: SSD tier: {re.escape(str(folder))}.+ holds other bytes at offset "
        rf"[\d,]+ than were written there \({what}\), because the disk or another program has changed them; check the "
        r"disk and keep other programs out of that directory; .*resume from the last checkpoint"
    )
    assert isinstance(raised, SlideError) and re.fullmatch(sentence, str(raised)), raised
    # Reads that nobody waits for raise nothing, whoever asks: above all not in `destroy()`, which frees buffers.
    runtime = engine.optimizer.runtime
    runtime.parts.ssd.expect(runtime.blocks, ())
    with pytest.raises(SlideError, match="the ssd lane stopped"):
        train(engine, batches(1))


# Where the damage is done: (clipping, micro-batches a step, the calls of the step that come before it).
MOMENTS = {
    "chunk": [(1.0, 1, 0), (0.0, 1, 1)],
    "weights": [(1.0, 1, 0), (1.0, 1, 1)],
    "gradient": [(1.0, 1, 2), (1.0, 2, 3)],
}
CASES = [
    pytest.param(what, kind, *moments[number % 2], id=f"{what}, {kind}")
    for what, moments in MOMENTS.items()
    for number, kind in enumerate(KINDS)
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("what", "kind", "clip", "accumulation", "calls"), CASES)
def test_damage_ends_the_run(tmp_path: Path, what: str, kind: str, clip: float, accumulation: int, calls: int) -> None:
    """After so many calls of a step: between steps (0), forward and backward (1), backward and step (2), or after the
    first micro-batch of two (3)."""
    config = ssd_config(tmp_path, clip=clip, accumulation=accumulation)
    with room_for_gradients_of(0 if what == "gradient" else None), engine_for(llama(), config) as engine:

        def run(steps: int, at: Callable[[], None] = lambda: None) -> None:
            """`at` is called in the first step."""
            for number, batch in enumerate(batches(steps * accumulation)):
                value: Any = batch
                calls_of_batch = (lambda batch: causal_loss(engine, batch), engine.backward, lambda _: engine.step())
                for place, call in enumerate(calls_of_batch):
                    if number * 3 + place == calls:
                        at()
                    value = call(value)

        old: list[bytes] = []

        def keep() -> None:
            settle(engine)
            with file_of(engine) as file:
                old.append(file.read(extent_of(what, engine, BLOCK)))

        def damage() -> None:
            settle(engine)
            with file_of(engine) as file:
                file.damage(kind, extent_of(what, engine, BLOCK), extent_of(what, engine, OTHER), old[0])

        run(1)
        run(1, keep)
        with pytest.raises(SlideError) as caught:
            run(3, damage)
        # A file that is cut loses all that lies behind, and whatever of it is read first is named.
        check_end(engine, caught.value, tmp_path, r"[a-z0-9 ]+ of \S+" if kind == "cut and regrown" else NAMES[what])
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ds_slide")]


def test_a_checkpoint_of_damaged_states_is_not_saved(tmp_path: Path) -> None:
    """The save raises, as every call after it; the checkpoint that was there stays what it was."""
    saves, disk = tmp_path / "saves", tmp_path / "disk"
    with engine_for(llama(), ssd_config(disk)) as engine:
        train(engine, batches(2))
        engine.save_checkpoint(saves, "tag")
        before = {path.name: path.read_bytes() for path in (saves / "tag").iterdir()}
        train(engine, batches(1))
        settle(engine)
        with file_of(engine) as file:
            extent = extent_of("chunk", engine, BLOCK)
            file.damage("byte flipped", extent, extent, b"")
        with pytest.raises(SlideError, match=rf"other bytes at offset .* \({NAMES['chunk']}\)"):
            engine.save_checkpoint(saves, "tag")
        with pytest.raises(SlideError, match="the ssd lane stopped"):
            train(engine, batches(1))
    assert {path.name: path.read_bytes() for path in (saves / "tag").iterdir()} == before
    assert not list(disk.iterdir())


@pytest.mark.parametrize("checksums", [True, False])
def test_statistics_and_memory(tmp_path: Path, checksums: bool) -> None:
    """Every byte that the disk moves is checked once; the sums are counted as host memory."""
    with engine_for(llama(), ssd_config(tmp_path, {"checksums": checksums})) as engine:
        train(engine, batches(3))
        settle(engine)
        parts = engine.optimizer.runtime.parts
        totals, latest = parts.ssd.store.statistics(), engine.optimizer.slide_stats()["ssd"]
        if checksums:
            assert totals["checked_bytes"] == totals["read_bytes"] + totals["written_bytes"] > 0
            assert 0 < latest["checked_bytes"] < totals["checked_bytes"] and latest["checked_s"] > 0
        else:
            assert "checked_bytes" not in totals and "checked_bytes" not in latest
        threads = [thread for thread in threading.enumerate() if thread.name == "ds_slide-ssd-sums"]
        assert len(threads) == (1 if checksums else 0)
        sums = totals["nbytes"] // 4096 * 4
        memory = parts.memory_report["host_bytes"]
    with engine_for(llama(), ssd_config(tmp_path, {"checksums": not checksums})) as engine:
        other = engine.optimizer.runtime.parts.memory_report["host_bytes"]
    assert memory - other == (sums if checksums else -sums)
