"""Locked directories: a living owner keeps its own, a dead one leaves nothing, and nothing else is ever touched."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from directory_owners import NAME, RunDirectory, remove_dead_runs

from ds_slide.errors import SlideError
from ds_slide.store.directories import locked_directory
from ds_slide.store.directories.owned_directory import opened
from ds_slide.store.directories.run_files import RunFiles

PRELUDE = f"""
import os, sys
from pathlib import Path
sys.path.append({str(Path(__file__).parents[2])!r})
from ds_slide.store.directories.owned_directory import opened
from directory_owners import RunDirectory, remove_dead_runs
parent = Path(sys.argv[1])
def started(rank):
    with opened(parent) as directory:
        remove_dead_runs(directory, parent)
        return RunDirectory(directory, parent, rank)
"""


def started(parent: Path, rank: int = 0) -> RunDirectory:
    """A new directory, and no dead ones beside it."""
    with opened(parent) as directory:
        remove_dead_runs(directory, parent)
        return RunDirectory(directory, parent, rank)


def process_of(script: str, parent: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(script: str, parent: Path) -> str:
    process = process_of(script, parent)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def living_run(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a run directory that holds a state file, and the directory."""
    process = process_of(
        """
        run = started(0)
        (run.path / "states").write_bytes(bytes(8192))
        print(run.path, flush=True)
        sys.stdin.readline()
        """,
        parent,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_it_has_the_name_of_the_run_and_is_private(tmp_path):
    run = started(tmp_path, 3)
    assert run.path.parent == tmp_path
    assert NAME.fullmatch(run.path.name)
    assert f"-{os.getpid()}-3-" in run.path.name
    assert run.path.stat().st_mode & 0o777 == 0o700
    run.close()


def test_close_removes_it_and_may_be_repeated(tmp_path):
    first, second = started(tmp_path), started(tmp_path)
    (first.path / "states").write_bytes(b"x")
    first.close()
    first.close()
    assert names(tmp_path) == {second.path.name}, "the same process's other directory stays"
    second.close()
    assert names(tmp_path) == set()


def test_close_waits_for_another_thread_in_the_middle_of_it(tmp_path, monkeypatch):
    """The process may end afterwards, and the other thread with it."""
    run = started(tmp_path)
    (run.path / "states").write_bytes(bytes(8192))
    begun, go, remove = threading.Event(), threading.Event(), locked_directory.remove_unlocked

    def held(*directory: Any) -> None:
        begun.set()
        assert go.wait(60)
        remove(*directory)

    monkeypatch.setattr(locked_directory, "remove_unlocked", held)
    first, second = threading.Thread(target=run.close), threading.Thread(target=run.close)
    first.start()
    assert begun.wait(60)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    go.set()
    second.join(60)
    assert names(tmp_path) == set()
    first.join(60)


def test_a_dropped_one_is_removed(tmp_path):
    started(tmp_path)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("ending", ["", "raise ValueError", "sys.exit(3)"])
def test_the_interpreters_exit_removes_it(tmp_path, ending):
    process = process_of(
        f"""
        run = started(0)
        (run.path / "states").write_bytes(b"x")
        {ending}
        """,
        tmp_path,
    )
    process.communicate(timeout=60)
    assert names(tmp_path) == set()


def test_what_kill_9_leaves_is_removed_by_the_next_start_and_no_living_run(tmp_path):
    doomed, dead = living_run(tmp_path)
    other, alive = living_run(tmp_path)
    doomed.send_signal(signal.SIGKILL)
    doomed.wait(60)
    assert names(tmp_path) == {dead.name, alive.name}
    run = started(tmp_path)
    assert names(tmp_path) == {alive.name, run.path.name}
    assert (alive / "states").stat().st_size == 8192
    run.close()
    other.communicate("\n", timeout=60)
    assert names(tmp_path) == set()


def test_a_number_of_a_dead_process_that_lives_again_does_not_save_a_dead_directory(tmp_path):
    """Containers all have a process 1, and numbers come round: only the lock counts."""
    dead = tmp_path / f"ds_slide-somewhere-{os.getpid()}-0-0123456789ab"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "states").write_bytes(b"x")
    started(tmp_path).close()
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    "hidden", [".nfs0000000000a1b2c3", ".nfs00000000012345670000002a", ".fuse_hidden0000000100000002"]
)
def test_a_name_that_the_file_system_gave_keeps_no_dead_run(tmp_path, hidden):
    dead = tmp_path / "ds_slide-host-1-0-0123456789ab"
    dead.mkdir()
    for name in ("lock", "states", hidden):
        (dead / name).write_bytes(b"x")
    started(tmp_path).close()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("other", [".nfs", ".nfs-notes", ".fuse_hidden", "nfs01", ".nfs01/"])
def test_a_name_that_looks_like_it_keeps_it(tmp_path, other):
    dead = tmp_path / "ds_slide-host-1-0-0123456789ab"
    dead.mkdir()
    for name in ("lock", "states", other):
        (dead / name).mkdir() if name.endswith("/") else (dead / name).touch()
    before = names(dead)
    started(tmp_path).close()
    assert names(dead) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMFILE, errno.EACCES])
def test_a_new_directory_that_cannot_be_opened_goes(tmp_path, monkeypatch, code):
    def refuse(_name: str, _parent: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locked_directory, "open_owned", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        started(tmp_path)
    assert names(tmp_path) == set()


def test_a_maker_does_not_take_what_a_remover_has_found_without_an_owner(tmp_path, monkeypatch):
    """The remover has looked between the maker's lock file and its lock, and deletes the file after that."""
    try_lock, late = locked_directory._try_lock, []

    def after_a_remover(descriptor: int) -> bool | None:
        monkeypatch.setattr(locked_directory, "_try_lock", try_lock)
        with opened(tmp_path) as directory:
            remove_dead_runs(directory, tmp_path)
        return try_lock(descriptor)

    monkeypatch.setattr(locked_directory, "_try_lock", after_a_remover)
    monkeypatch.setattr(locked_directory, "remove_unlocked", lambda name, *_: late.append(name))
    with opened(tmp_path) as directory:
        run = RunDirectory(directory, tmp_path, 0)
    assert len(late) == 1
    assert run.path.name not in late


def test_an_empty_directory_of_a_maker_that_was_killed_is_removed(tmp_path):
    (tmp_path / "ds_slide-host-1-0-0123456789ab").mkdir()
    started(tmp_path).close()
    assert names(tmp_path) == set()


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "ds_slide-notes").mkdir()
    (tmp_path / "ds_slide-host-1-0-0123456789ab").write_text("a file")
    (tmp_path / "ds_slide-host-1-0-1123456789ab").mkdir()
    (tmp_path / "ds_slide-host-1-0-1123456789ab" / "without a lock").touch()
    with_folder = tmp_path / "ds_slide-host-1-0-2123456789ab"
    (with_folder / "folder").mkdir(parents=True)
    (with_folder / "lock").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "ds_slide-host-1-0-3123456789ab").symlink_to(elsewhere)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    started(tmp_path).close()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_forked_child_that_exits_leaves_its_parents_directory(tmp_path):
    output = finished(
        """
        run = started(0)
        child = os.fork()
        if child == 0:
            sys.exit(0)  # runs the exit handlers, as multiprocessing's children do not
        os.waitpid(child, 0)
        child = os.fork()
        if child == 0:
            run.close()
            os._exit(0)
        os.waitpid(child, 0)
        print((run.path / "lock").exists())
        """,
        tmp_path,
    )
    assert output == "True\n"
    assert names(tmp_path) == set()


def test_a_forked_child_that_lives_on_does_not_keep_a_killed_parents_lock(tmp_path):
    """Data-loader workers outlive a killed run by seconds; the next run must find it dead."""
    process = process_of(
        """
        run = started(0)
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(writer)
            print("child", flush=True)
            sys.stdin.readline()
            os._exit(0)
        sys.stdin.readline()
        """,
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "child\n"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    started(tmp_path).close()
    assert names(tmp_path) == set()
    process.communicate(timeout=60)


def test_runs_that_start_end_and_crash_at_once_never_lose_a_living_directory(tmp_path):
    parent = tmp_path
    script = """
        print("ready", flush=True)
        sys.stdin.readline()
        for round_ in range(60):
            run = started(0)
            (run.path / "states").write_bytes(b"x")
            other = started(1)
            assert (run.path / "lock").exists() and (run.path / "states").exists(), "lost"
            other.close()
            if round_ % 3 == 0:  # dies without removing anything
                run._made.removed = True
                run._made.let_go()
            else:
                run.close()
        """
    processes = [process_of(script, parent) for _ in range(6)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert errors == ""
    started(parent).close()
    assert names(parent) == set()


def test_an_owner_whose_directory_another_start_removes_has_nothing_to_say(tmp_path):
    parent = tmp_path
    run = started(parent)

    def meanwhile(path: Path, _parent: int, _directory: int) -> str:
        run._made._unlock()
        started(parent, 1).close()  # finds the other without a lock, and removes it
        return path.name

    run._made.remove(meanwhile)
    assert names(parent) == set()


def refusal(parent: Path) -> str:
    with pytest.raises(SlideError) as caught:
        RunFiles(parent, json_path="ds_slide.nvme_path[1]").make("states")
    text = str(caught.value)
    assert text.startswith("ds_slide.nvme_path[1]: ")
    assert str(parent) in text
    assert "\n" not in text
    return text


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "not a directory is in the way" in refusal(tmp_path / "file")
    assert "not a directory is in the way" in refusal(tmp_path / "file" / "below")


def test_a_read_only_parent_is_refused(mounted):
    assert "may write to" in refusal(mounted("ro"))


def test_a_full_parent_is_refused(mounted):
    assert "free space" in refusal(mounted("nr_inodes=1"))
    almost = mounted("nr_inodes=2")  # room for the directory, none for its lock
    with pytest.raises(OSError, match="No space left"):
        started(almost)
    assert names(almost) == set()


def test_a_filesystem_without_locks_is_refused(tmp_path, monkeypatch):
    """Patched, because no such filesystem can be mounted here: NFS without its lock service answers so."""

    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks available"):
        started(tmp_path)
    assert names(tmp_path) == set()
