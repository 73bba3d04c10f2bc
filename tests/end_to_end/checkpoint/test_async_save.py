"""`ds_slide.async_save`: what is written is the step of the save, training goes on, and its faults surface."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import adapted
from checkpoint_runs import CASES, HALF, WHOLE, Case, continued, leftovers
from harness import Result, batches, differences, ds_config, engine_for, states_of, train

from ds_slide.checkpoint import background, publish
from ds_slide.checkpoint.archive import Archive
from ds_slide.checkpoint.manifest import NAME as MANIFEST
from ds_slide.checkpoint.manifest import Manifest
from ds_slide.checkpoint.publish import Agreement
from ds_slide.errors import SlideError
from ds_slide.integration import checkpoint_save
from ds_slide.report.log import size
from ds_slide.store.directories import locked_directory

pytestmark = pytest.mark.usefixtures("one_rank")

CASES = {
    **CASES,
    "8bit": Case(slide={"state_dtype": "8bit", "gpu_states": 0}),
    "ssd": Case(slide={"host_memory": 0}),
    "ssd_half": Case(slide={"host_memory": 500_000}),
}
cases = pytest.mark.parametrize("name", CASES)


def engine_of(name: str, seed: int, disk: Path) -> Any:
    """Context of an engine that saves asynchronously."""
    case = CASES[name]
    nvme = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"offload_optimizer": nvme, "offload_param": nvme} if name.startswith("ssd") else {}
    return replace(case, slide={**case.slide, "async_save": True}, zero={**case.zero, **zero}).engine(seed)


class Writes:
    """Holds asynchronous writes back until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()


@pytest.fixture
def writes(monkeypatch) -> Iterator[Writes]:
    held, write = Writes(), Archive.write

    def held_write(self: Archive, path: Path, wrote: Any = None) -> Any:
        if wrote is not None:
            held.begun.set()
            held.go.wait()
        return write(self, path, wrote)

    monkeypatch.setattr(Archive, "write", held_write)
    yield held
    held.go.set()


@pytest.mark.thinned(2)
@cases
def test_the_checkpoint_is_of_the_step_that_was_saved(name, writes, tmp_path, disk):
    """The thread writes after four more steps; the run goes on as if nothing had been saved."""
    case = CASES[name]
    with engine_of(name, 0, disk) as engine:
        half = train(engine, batches(WHOLE)[:HALF])
        note = torch.zeros(3)
        engine.save_checkpoint(tmp_path, client_state={"note": note})
        note += 1
        half.states = states_of(engine.module)
        rest = continued(engine, 1)
        assert writes.begun.wait() and not (tmp_path / "latest").exists()
        writes.go.set()
        engine.save_checkpoint(tmp_path, "second")
    assert (tmp_path / "latest").read_text() == "second" and leftovers(tmp_path) == []
    first = f"global_step{HALF // case.accumulation}"
    with engine_of(name, 7, disk) as engine:
        _, client_state = engine.load_checkpoint(tmp_path, first)
        assert not client_state["note"].any()
        if name != "8bit":  # its blocks are encoded anew
            assert differences(Result(states=states_of(engine.module)), replace(half, losses=[])) == []
            assert differences(continued(engine, 1), rest) == []


@cases
def test_the_files_are_those_of_a_synchronous_save(name, tmp_path, disk):
    with engine_of(name, 0, disk) as engine:
        train(engine, batches(HALF))
        engine.save_checkpoint(tmp_path / "a", "tag", client_state={"note": torch.arange(5)})
        engine.optimizer.async_save = False
        engine.save_checkpoint(tmp_path / "b", "tag", client_state={"note": torch.arange(5)})
    one, other = (Manifest.read(tmp_path / folder / "tag") for folder in "ab")
    assert one.files == other.files and len(one.files) == 2
    one.check(tmp_path / "a" / "tag", one.files)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(p.name for p in (tmp_path / "b").iterdir())


@pytest.fixture(scope="module")
def engine(one_rank) -> Iterator[Any]:  # noqa: ARG001
    with engine_of("clipping", 0, Path()) as engine:
        yield engine


def end_of_save(engine: Any) -> None:
    """Wait for it, and raise what has become of it."""
    checkpoint_save.finish_save(engine)


def test_several_data_types(tmp_path):
    with engine_for(adapted(trained=("input_layernorm",)), ds_config({"window": 2, "async_save": True})) as engine:
        train(engine, batches(2))
        engine.save_checkpoint(tmp_path / "a", "tag")
        engine.optimizer.async_save = False
        engine.save_checkpoint(tmp_path / "b", "tag")
    assert Manifest.read(tmp_path / "a" / "tag").files == Manifest.read(tmp_path / "b" / "tag").files


def test_frozen_weights_may_be_left_out(tmp_path, disk):
    with engine_of("frozen", 0, disk) as engine:
        train(engine, batches(1))
        engine.save_checkpoint(tmp_path / "a", "tag", exclude_frozen_parameters=True)
        engine.optimizer.async_save = False
        engine.save_checkpoint(tmp_path / "b", "tag", exclude_frozen_parameters=True)
    assert Manifest.read(tmp_path / "a" / "tag").files == Manifest.read(tmp_path / "b" / "tag").files


def test_the_thread_that_writes_takes_one_core(engine, tmp_path, monkeypatch):
    """And nothing changes for the others, which would sum in another order."""
    write, seen = Archive.write, []

    def watched(self: Archive, path: Path, wrote: Any = None) -> Any:
        later = threading.Thread(target=lambda: seen.append(("later", torch.get_num_threads())))
        seen.append(("writer", torch.get_num_threads()))
        later.start()
        later.join()
        return write(self, path, wrote)

    monkeypatch.setattr(Archive, "write", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine.save_checkpoint(tmp_path, "tag")
        end_of_save(engine)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {("writer", 1), ("later", 2)}


def test_loading_waits_for_the_save(engine, writes, tmp_path):
    train(engine, batches(1))
    engine.save_checkpoint(tmp_path, "tag")
    saved = Result(states=states_of(engine.module))
    train(engine, batches(1))
    assert writes.begun.wait()
    threading.Timer(0.1, writes.go.set).start()
    assert engine.load_checkpoint(tmp_path)[0] is not None
    assert differences(Result(states=states_of(engine.module)), saved) == []


def test_without_memory_for_a_copy_saving_waits_and_says_so_once(engine, writes, tmp_path, monkeypatch, caplog):
    needed = background.Snapshot(engine.optimizer.runtime.units, frozen=True).nbytes()
    tight = SimpleNamespace(available=needed)
    monkeypatch.setattr("psutil.virtual_memory", lambda: tight)
    monkeypatch.setattr(engine.optimizer, "has_said_that_saves_wait", False)
    for tag in ("a", "b"):
        engine.save_checkpoint(tmp_path, tag)
        assert (tmp_path / "latest").read_text() == tag
    assert not writes.begun.is_set()
    said = [record.getMessage() for record in caplog.records if "async_save" in record.getMessage()]
    assert len(said) == 1 and f"needs {size(needed)}, and" in said[0] and "(MemAvailable of /proc/meminfo)" in said[0]


def test_the_copy_is_given_back(engine, tmp_path):
    import psutil

    engine.save_checkpoint(tmp_path, "a")
    end_of_save(engine)
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        engine.save_checkpoint(tmp_path, "a")
    end_of_save(engine)
    size = background.Snapshot(engine.optimizer.runtime.units, frozen=True).nbytes()
    assert psutil.Process().memory_info().rss - before < 10 * size


@pytest.fixture
def small_disk(engine, tmp_path) -> Iterator[Path]:
    """A file system with the tag "old" and room for half another one."""
    engine.save_checkpoint(tmp_path / "old", "old")
    end_of_save(engine)
    path = tmp_path / "small"
    path.mkdir()
    nbytes = sum(file.stat().st_size for file in (tmp_path / "old").rglob("*") if file.is_file())
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes * 3 // 2}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        shutil.copytree(tmp_path / "old", path, dirs_exist_ok=True)
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def no_check_of_free_space() -> Iterator[None]:
    """As when others fill the disk meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_slide.checkpoint.publish.Staging.free_bytes", lambda _self: 1 << 60)
        yield


def test_a_full_disk_surfaces_at_the_next_save(engine, small_disk, tmp_path):
    with no_check_of_free_space():
        engine.save_checkpoint(small_disk, "new")
    train(engine, batches(1))
    with pytest.raises(SlideError, match=rf"save of {small_disk}/new has failed: .*No space left on device") as caught:
        engine.save_checkpoint(tmp_path, "next")
    assert "\n" not in str(caught.value) and not (tmp_path / "next").exists()
    assert (small_disk / "latest").read_text() == "old" and leftovers(small_disk) == []
    engine.save_checkpoint(tmp_path, "next")
    end_of_save(engine)
    assert (tmp_path / "latest").read_text() == "next"
    assert engine.load_checkpoint(small_disk)[0] is not None


def fault(phase: str) -> Callable[[str], None]:
    def reached(name: str) -> None:
        if name == phase:
            raise OSError(5, "Input/output error", "disk")

    return reached


@pytest.mark.parametrize("module", [checkpoint_save, publish])
def test_a_fault_at_the_end_leaves_the_last_checkpoint(module, engine, tmp_path, monkeypatch):
    engine.save_checkpoint(tmp_path, "old")
    end_of_save(engine)
    phase = "rank 0 has finished" if module is publish else f"wrote {MANIFEST}"
    if module is checkpoint_save:
        phase = next(f"wrote {path.name}" for path in (tmp_path / "old").glob("*_optim_states.pt"))
    monkeypatch.setattr(module, "reached", fault(phase))
    engine.save_checkpoint(tmp_path, "new")
    with pytest.raises(SlideError, match=r"save of .*/new has failed: .*Input/output error"):
        end_of_save(engine)
    assert (tmp_path / "latest").read_text() == "old" and leftovers(tmp_path) == []


def test_destroying_waits_and_tells_how_far_it_is(writes, tmp_path, disk, caplog):
    with engine_of("clipping", 0, disk) as engine:
        engine.save_checkpoint(tmp_path, "tag")
        assert writes.begun.wait()
        threading.Timer(0.1, writes.go.set).start()
    assert (tmp_path / "latest").read_text() == "tag" and leftovers(tmp_path) == []
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("waiting for")]
    assert f"{tmp_path}/tag: 0 bytes of " in told[0] and len(told) > 3


def test_destroying_raises_what_the_save_has_met(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(publish, "reached", fault("rank 0 has finished"))
    with pytest.raises(SlideError, match=r"save of .*/tag has failed"), engine_of("clipping", 0, disk) as engine:
        engine.save_checkpoint(tmp_path, "tag")
    assert not (tmp_path / "latest").exists() and leftovers(tmp_path) == []
    assert not any(thread.name.startswith("ds_slide-checkpoint") for thread in threading.enumerate())


def test_a_fault_is_told_although_nobody_asks(tmp_path, disk, monkeypatch, caplog):
    """DeepSpeed destroys an engine that is dropped, and keeps to itself what that raises."""
    monkeypatch.setattr(publish, "reached", fault("rank 0 has finished"))
    with pytest.raises(SlideError), engine_of("clipping", 0, disk) as engine:
        engine.save_checkpoint(tmp_path, "tag")
        engine.optimizer.saving.wait()
        told = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 1 and f"save of {tmp_path}/tag has failed: OSError" in told[0].getMessage()


def test_a_relative_directory_is_that_of_the_save(engine, writes, tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    engine.save_checkpoint("saves", "tag")
    monkeypatch.chdir(elsewhere)
    writes.go.set()
    end_of_save(engine)
    assert (here / "saves" / "latest").read_text() == "tag" and not list(elsewhere.iterdir())


@pytest.mark.parametrize("tag", ["publishing", "rank0.json"])
def test_any_tag_is_published(tag, engine, tmp_path):
    engine.save_checkpoint(tmp_path, tag)
    end_of_save(engine)
    assert (tmp_path / "latest").read_text() == tag and leftovers(tmp_path) == []


def test_a_directory_that_cannot_be_removed_is_left_with_a_warning(engine, tmp_path, monkeypatch, caplog):
    """As on NFS, which keeps a file that is open: the checkpoint itself is there."""
    engine.save_checkpoint(tmp_path, "old")
    end_of_save(engine)

    def refuse(name: str, _parent: int, _directory: int) -> None:
        raise OSError(39, "Directory not empty", name)

    with monkeypatch.context() as patch:
        for module in (publish, locked_directory):
            patch.setattr(module, "remove_unlocked", refuse)
        engine.save_checkpoint(tmp_path, "new")
        end_of_save(engine)
    assert (tmp_path / "latest").read_text() == "new"
    assert any("Directory not empty" in record.getMessage() for record in caplog.records)
    engine.save_checkpoint(tmp_path, "next")
    end_of_save(engine)
    assert (tmp_path / "latest").read_text() == "next" and leftovers(tmp_path) == []


def test_a_rank_that_is_gone_leaves_the_directory_to_those_that_write(engine, writes, tmp_path, monkeypatch):
    """The ranks did not agree that all have ended, so nothing is removed under one that may be publishing."""
    engine.save_checkpoint(tmp_path, "tag")
    (saving,) = (path for path in tmp_path.iterdir() if path.name.startswith(".ds_slide_saving."))

    def broken(_action: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    writes.go.set()
    monkeypatch.setattr(Agreement, "publish_if_complete", lambda _self: None)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_save, "together", broken)
        with pytest.raises(RuntimeError, match="Connection closed"):
            end_of_save(engine)
    assert (saving / "tag").is_dir()
