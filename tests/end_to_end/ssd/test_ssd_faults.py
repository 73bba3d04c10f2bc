"""The SSD tier when the disk fails, fills up or is taken away, and when the process is killed: whole training runs.

Every run is a process of its own (ssd_fault_worker.py) that ends through the interpreter's exit or by a signal.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ssd_fault_runs import Launcher, Run, launched, needs_shim
from traps import mounts, plant, plant_replaced, precious, tree

from ds_slide.checkpoint.leftovers import REPLACED, SAVING

BACKENDS = ("io_uring", "libaio", "threads")
PAGE = 4096
STEPS, SAVED = 4, 2
SECONDS = 30.0  # from a fault to the end of the run, which takes less than one on an idle machine
UNNAMED = r"#\d+ \(deleted\)"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    yield from launched(tmp_path_factory.mktemp("runs"))


def start(disk: Path, slide: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    return ["start", str(disk), slide or {}, options]


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a checkpoint of step SAVED, and what the run gave that went on to STEPS."""
    folder = tmp_path_factory.mktemp("whole")
    actions = [["train", SAVED], ["save", str(folder / "saves"), "base"], ["digest", "saved"]]
    (folder / "disk").mkdir()
    rest = [["train", STEPS - SAVED], ["digest", "end"], ["destroy"]]
    return folder / "saves", launcher.run(start(folder / "disk"), *actions, *rest)


def check_bits(result: dict[str, Any], whole: dict[str, Any]) -> None:
    assert result["digests"].items() <= whole["digests"].items()
    assert result["losses"].items() <= whole["losses"].items()


def check_failure(run: Run, disk: Path, *parts: str) -> None:
    """The run ends within seconds with one SlideError that has these parts, and leaves nothing."""
    code = run.end()
    if "fault_at" in run.result:
        assert time.monotonic() - run.result["fault_at"] < SECONDS
    assert code == 1, run.log[-3000:]
    last = run.log.strip().splitlines()[-1]
    assert last.startswith("ds_slide.errors.Slide"), run.log[-3000:]
    for part in parts:
        assert re.search(part, last), last
    assert not disk.exists() or not disk.is_dir() or not list(disk.iterdir())


# ---- the disk fails ------------------------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_short_and_interrupted_transfers_are_invisible(
    launcher: Launcher, whole: Any, disk: Path, backend: str
) -> None:
    needs_shim()
    faults = [(5, 3 * PAGE, 0), (5, -1, errno.EINTR), (7, -1, errno.EAGAIN), (0, -1, 0)]
    actions = [action for fault in faults for action in (["faults", *fault], ["train", 1])]
    result = launcher.run(start(disk, {"io_backend": backend}), *actions, ["repeated"], ["digest", "end"])
    check_bits(result, whole[1])
    assert result["repeated"] > 30
    assert not list(disk.iterdir())


FAST = {("io_uring", "EIO", 1.0), ("threads", "ENOSPC", 0.0)}


@pytest.mark.parametrize(
    ("backend", "error", "clip"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in itertools.product(BACKENDS, ("EIO", "ENOSPC"), (1.0, 0.0))
    ],
)
def test_a_failing_disk_ends_training_with_one_sentence(
    launcher: Launcher, disk: Path, backend: str, error: str, clip: float
) -> None:
    needs_shim()
    code = getattr(errno, error)
    slide = {"io_backend": backend}
    run = launcher.begin(start(disk, slide, clip=clip), ["train", 2], ["faults", 23, -1, code], ["train", 3])
    named = rf"(read|write) of \d+ bytes at offset \d+ of {disk}/{UNNAMED} failed: .*\(errno {code}\)"
    check_failure(run, disk, named, os.strerror(code), "resume from the last checkpoint")
    last = run.log.strip().splitlines()[-1]
    advice = ("dmesg", "checkpoint") if error == "EIO" else ("free space", "checkpoint")
    assert [last.count(words) for words in ("failed: ", *advice)] == [1, 1, 1], last


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_a_disk_that_fails_outside_of_training(launcher: Launcher, whole: Any, disk: Path, backend: str) -> None:
    """While a checkpoint is loaded or saved and while states are read: a sentence, and nothing else is lost."""
    needs_shim()
    saves = shutil.copytree(whole[0], disk.parent / "saves")
    fault, mended = ["faults", 5, -1, errno.EIO], ["faults", 0, -1, 0]
    for action in (["load", str(saves)], ["digest", "end"], ["save", str(saves), "base"]):
        run = launcher.begin(start(disk, {"io_backend": backend}), ["train", 1], fault, action)
        # The faults meet the files of the checkpoint too.
        sentence = r"of \d+ bytes at offset \d+ of |the checkpoint file \S+ cannot be read"
        check_failure(run, disk, sentence, "Input/output error")
    result = launcher.run(
        start(disk), mended, ["load", str(saves)], ["digest", "saved"], ["train", STEPS - SAVED], ["digest", "end"]
    )
    check_bits(result, whole[1])


def test_a_script_may_catch_the_error_and_begin_anew(launcher: Launcher, whole: Any, disk: Path) -> None:
    needs_shim()
    saves, expected = whole
    fault, mended = ["faults", 23, -1, errno.EIO], ["faults", 0, -1, 0]
    result = launcher.run(
        *(start(disk), ["train", 1], fault, ["failing", ["train", 3]], ["failing", ["train", 1]], ["destroy"]),
        *(mended, start(disk), ["load", str(saves)], ["train", STEPS - SAVED], ["digest", "end"]),
    )
    assert result["digests"]["end"] == expected["digests"]["end"]
    assert all(f"errno {errno.EIO}" in sentence for sentence in result["errors"]) and len(result["errors"]) == 2
    assert result["entries"] == []
    assert not list(disk.iterdir())


def test_a_disk_that_fails_at_start(launcher: Launcher, disk: Path) -> None:
    needs_shim()
    run = launcher.begin(["faults", 5, -1, errno.EIO], start(disk, {"io_backend": "threads"}))
    check_failure(run, disk, UNNAMED, "Input/output error", "kernel's log")


# ---- the disk is full ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, disk: Path, tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A filesystem of so many MiB: tmpfs, without O_DIRECT, and ext4 on a loop device, with it."""

    def mount(mebibytes: int) -> Path:
        if request.param == "tmpfs":
            commands = [["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(disk)]]
        else:
            image = tmp_path / "image"
            with image.open("wb") as file:
                file.truncate(mebibytes << 20)
            make = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal,^resize_inode", "-N", "64", str(image)]
            commands = [make, ["mount", "-o", "loop", str(image), str(disk)]]
        for command in commands:
            if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip(f"{command[0]} of a small {request.param} does not work here; it needs root")
        shutil.rmtree(disk / "lost+found", ignore_errors=True)
        return disk

    yield mount
    subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_disk_too_small_is_refused_before_training(launcher: Launcher, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(2)
    run = launcher.begin(start(disk))
    check_failure(run, disk, "zero_optimization.offload_optimizer.nvme_path: .* has [12][.][0-9] MB free and needs ")
    needed = 1e6 * float(re.search(r"needs ([0-9.]+) MB for", run.log)[1])  # type: ignore[index]
    assert 12 * 300_000 < needed < 16 * 400_000


def test_others_that_fill_the_disk_meanwhile_do_no_harm(
    launcher: Launcher, whole: Any, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(16)
    result = launcher.run(start(disk), ["train", 1], ["fill_disk"], ["train", STEPS - 1], ["digest", "end"])
    assert result["filled"] == errno.ENOSPC
    check_bits(result, whole[1])
    assert [path.name for path in disk.iterdir()] == ["other"]


# ---- the directory -------------------------------------------------------------------------------------------------


def test_a_read_only_disk_is_refused(launcher: Launcher, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(16)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    check_failure(launcher.begin(start(disk)), disk, f"nvme_path: .*'{disk}' .Read-only file system.*may write to")


def test_a_file_in_place_of_the_directory_is_refused(launcher: Launcher, disk: Path) -> None:
    (disk / "file").write_text("mine")
    run = launcher.begin(start(disk / "file"))
    check_failure(run, disk / "file", "nvme_path: .*something that is not a directory is in the way")
    assert (disk / "file").read_text() == "mine"


def test_two_runs_in_one_missing_directory(launcher: Launcher, whole: Any, disk: Path) -> None:
    """It is made, with its parents. They overlap for certain: each waits in the middle until the other is there."""
    fifos = [disk / name for name in ("first", "second")]
    disk = disk / "a" / "b"
    for fifo in fifos:
        os.mkfifo(fifo)
    first, second = map(str, fifos)
    runs = [
        launcher.begin(start(disk), ["train", 1], *meet, ["train", STEPS - 1], ["digest", "end"])
        for meet in ([["tell", first], ["hear", second]], [["hear", first], ["tell", second]])
    ]
    assert [run.end() for run in runs] == [0, 0], [run.log[-2000:] for run in runs]
    for run in runs:
        check_bits(run.result, whole[1])
    assert not list(disk.iterdir())


# ---- the state file ------------------------------------------------------------------------------------------------

WRITE = "ds_slide.store.ssd.unit:SsdOptimizerStates.put_back"


CUTS = list(itertools.product((1.0, 0.0), (0, 3_000_000), (5, "last")))
FAST_CUTS = ((1.0, 3_000_000, 5), (0.0, 0, "last"))


@pytest.mark.parametrize(
    ("clip", "nbytes", "count"),
    [pytest.param(*case, marks=() if case in FAST_CUTS else pytest.mark.slow) for case in CUTS],
)
def test_a_state_file_that_is_cut_is_an_error(
    launcher: Launcher, disk: Path, clip: float, nbytes: int, count: int | str
) -> None:
    """Never zeros in place of states: also not when a write gives the file its length back, with a hole before it."""
    cut = ["at_chunk", count, "truncate", nbytes]
    slide = {"ssd_buffers": 2, "weight_buffers": 2}
    run = launcher.begin(start(disk, slide, clip=clip), ["train", 1], cut, ["train", STEPS])
    check_failure(run, disk, f"{disk}/{UNNAMED}", "the file ends at byte|because something else has cut it")


def test_a_state_file_that_is_changed_is_an_error(launcher: Launcher, disk: Path) -> None:
    """The process ends with one sentence; tests/end_to_end/ssd/test_ssd_damage.py has all kinds, places and moments."""
    slide = {"ssd_buffers": 2, "weight_buffers": 2}
    run = launcher.begin(start(disk, slide), ["train", 2], ["damage", "hole punched", 2, 5], ["train", 2])
    place = r"\(chunk 5 of the optimizer states of model\.layers\.2\)"
    named = rf"SSD tier: {disk}/.+ holds other bytes at offset [\d,]+ than were written there {place}"
    check_failure(run, disk, named, "resume from the last checkpoint")


# ---- the process is killed -----------------------------------------------------------------------------------------

PHASES = {
    "forward": ["transformers.models.llama.modeling_llama:LlamaMLP.forward", 4],
    "backward": ["ds_slide.runtime.engine:SlideRuntime.leave_backward", 3],
    "step": ["ds_slide.runtime.updates.updating:Updating.queue", 3],
    "update": ["ds_slide.store.ssd.unit:SsdOptimizerStates.put_back", 30],
    "write": [WRITE, 40],
    "save": ["ds_slide.integration.checkpoint_save:reached", 2],
    "publish": ["ds_slide.checkpoint.publish:reached", 2],
}
FAST_PHASES = ("update", "publish")


def check_resume(launcher: Launcher, whole: Any, disk: Path, saves: Path) -> int:
    """The next run removes what a dead one has left, and ends with the bits of a run that nobody killed.

    Returns the step of the checkpoint. What a save that was killed has left goes with the next save.
    """
    actions = [["load", str(saves)], ["train_to", STEPS], ["digest", "end"], ["save", str(saves), "base"]]
    result = launcher.run(start(disk), *actions)
    check_bits(result, whole[1])
    assert result["entries"] == []
    assert not list(disk.iterdir())
    assert sorted(path.name for path in saves.iterdir()) == ["base", "latest", "zero_to_fp32.py", "zero_to_torch.py"]
    return int(result["loaded_step"])


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase in FAST_PHASES else pytest.mark.slow) for phase in PHASES]
)
def test_a_kill_loses_nothing_that_was_saved(launcher: Launcher, whole: Any, disk: Path, phase: str) -> None:
    """The run that is killed has resumed from the checkpoint of SAVED steps, trains one more and replaces it."""
    saves = shutil.copytree(whole[0], disk.parent / "saves")
    kill = ["at", *PHASES[phase], "kill", signal.SIGKILL]
    actions = [["load", str(saves)], kill, ["train", 1], ["save", str(saves), "base"]]
    run = launcher.begin(start(disk, {"debug": {"lane_delay_ms": 1.0}}), *actions)
    assert run.end() == -signal.SIGKILL, run.log[-3000:]
    assert not list(disk.iterdir())
    assert any(path.name.startswith(".ds_slide_saving") for path in saves.iterdir()) == (phase in ("save", "publish"))
    assert check_resume(launcher, whole, disk, saves) == (SAVED + 1 if phase == "publish" else SAVED)


@pytest.mark.parametrize("phase", ["load", pytest.param("start", marks=pytest.mark.slow)])
def test_a_kill_before_training(launcher: Launcher, whole: Any, disk: Path, phase: str) -> None:
    """While weights are placed, and while a checkpoint is written over them."""
    saves = shutil.copytree(whole[0], disk.parent / "saves")
    kill = ["at", "ds_slide.store.ssd.store:SsdStore.write_now", 4, "kill", signal.SIGKILL]
    load = ["load", str(saves)]
    run = launcher.begin(*((kill, start(disk)) if phase == "start" else (start(disk), kill, load)))
    assert run.end() == -signal.SIGKILL, run.log[-3000:]
    assert not list(disk.iterdir())
    check_resume(launcher, whole, disk, saves)


@pytest.mark.parametrize("phase", [*PHASES, "load"])
@pytest.mark.slow
def test_ctrl_c_leaves_nothing(launcher: Launcher, whole: Any, disk: Path, phase: str) -> None:
    """At any instant; also the checkpoint that was being saved is whole or not there."""
    saves = shutil.copytree(whole[0], disk.parent / "saves")
    where = PHASES.get(phase, ["ds_slide.store.ssd.store:SsdStore.write_now", 4])
    stop, train = ["at", *where, "kill", signal.SIGINT], [["train", 1], ["save", str(saves), "base"]]
    load = ["load", str(saves)]
    run = launcher.begin(start(disk), *([stop, load] if phase == "load" else [load, stop]), *train)
    assert run.end() == -signal.SIGINT, run.log[-3000:]
    assert not list(disk.iterdir())
    assert not any(path.name.startswith(".ds_slide_saving") for path in saves.iterdir())
    check_resume(launcher, whole, disk, saves)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_an_ordinary_signal_leaves_nothing(launcher: Launcher, whole: Any, disk: Path, number: int) -> None:
    """Ctrl-C is an exception; the others end Python at once."""
    stop = ["at", PHASES["backward"][0], 3, "kill", number]
    run = launcher.begin(start(disk), ["train", 1], stop, ["train", STEPS])
    assert run.end() == -number, run.log[-3000:]
    assert not list(disk.iterdir())
    if number == signal.SIGTERM:
        check_resume(launcher, whole, disk, shutil.copytree(whole[0], disk.parent / "saves"))


def test_a_run_that_saves_and_loads_ends_cleanly(launcher: Launcher, whole: Any, disk: Path) -> None:
    """Stock: FileExistsError at the second save into a tag, and an abort (-6) at exit after a save and a load."""
    saves = str(disk.parent / "saves")
    twice = [["save", saves, "tag"], ["save", saves, "tag"], ["load", saves]]
    run = launcher.begin(start(disk), ["train", 1], *twice, ["train", STEPS - 1], ["digest", "end"])
    assert run.end() == 0, run.log[-3000:]
    check_bits(run.result, whole[1])
    assert "terminate" not in run.log and "Traceback" not in run.log and "Exception" not in run.log, run.log
    assert not list(disk.iterdir())


# ---- the directory belongs to others too ---------------------------------------------------------------------------


@pytest.mark.parametrize("mounted", [False, True])
def test_traps_survive_start_save_load_and_exit(launcher: Launcher, disk: Path, tmp_path: Path, mounted: bool) -> None:
    """In one directory that is nvme_path and save_dir, of a training run that ends through the interpreter's exit."""
    elsewhere = precious(tmp_path / "elsewhere")
    with contextlib.ExitStack() as stack:
        for prefix in ("ds_slide-host-1-0-", SAVING):
            if mounted:
                stack.enter_context(mounts(disk, prefix, elsewhere))
            else:
                plant(disk, prefix, elsewhere)
        plant_replaced(disk, REPLACED, elsewhere)
        before = tree(tmp_path)
        saves = [["save", str(disk), "tag"], ["save", str(disk), "tag"], ["load", str(disk)]]
        result = launcher.run(start(disk), ["train", 1], *saves, ["train", 1])
        assert result["loaded_step"] == 1
        after = tree(tmp_path)
        assert before.items() <= after.items()
        new = {os.path.relpath(os.fsdecode(path), disk).split("/")[0] for path in after.keys() - before.keys()}
        assert new == {"latest", "tag", "zero_to_fp32.py", "zero_to_torch.py"}
