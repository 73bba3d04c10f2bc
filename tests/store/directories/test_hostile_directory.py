"""A directory for states in which another user plants, renames and replaces: nothing but our own files is removed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

import pytest
import traps
from directory_owners import NAME, RunDirectory, remove_dead_runs
from traps import AS_ROOT, intruder, mounts, plant, precious, tree, writable_by_all

from ds_slide.store.directories import owned_directory
from ds_slide.store.directories.owned_directory import opened
from ds_slide.store.directories.run_files import RunFiles

SWAPS = 2000
PREFIX = "ds_slide-host-1-0-"
PLANTED = f"{PREFIX}0123456789ab"


def start(parent: Path) -> RunDirectory:
    """A new directory with a file in it."""
    with opened(parent) as directory:
        run = RunDirectory(directory, parent, 0)
    os.close(os.open("states", os.O_CREAT | os.O_WRONLY, dir_fd=run.descriptor))
    return run


def remove_dead(parent: Path) -> None:
    with opened(parent) as directory:
        remove_dead_runs(directory, parent)


def make_dead_run(parent: Path) -> None:
    """As kill -9 leaves it."""
    run = start(parent)
    run._made.removed = True
    run._made.let_go()


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return precious(tmp_path / "theirs")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return writable_by_all(tmp_path / "shared")


def test_a_directory_full_of_traps_stays_as_it_is(shared, theirs):
    plant(shared, PREFIX, theirs)
    before = tree(shared.parent)
    files = RunFiles(shared)
    os.close(files.make("states").descriptor)
    start(shared).close()
    assert tree(shared.parent) == before


def test_mount_points_stay_as_they_are(shared, theirs):
    with mounts(shared, PREFIX, theirs):
        before = tree(shared.parent)
        remove_dead(shared)
        start(shared).close()
        assert tree(shared.parent) == before


@AS_ROOT
def test_a_dead_run_of_another_user_is_left_alone(shared):
    make_dead_run(shared)
    (dead,) = shared.iterdir()
    os.chown(dead, 65534, 65534)
    before = tree(shared)
    remove_dead(shared)
    assert tree(shared) == before
    os.chown(dead, os.geteuid(), os.getegid())
    remove_dead(shared)
    assert tree(shared) == {}


@pytest.mark.parametrize("where", ["beside", "below", "another directory"])
def test_a_renamed_run_directory_is_found_by_its_descriptor(shared, theirs, where):
    before = tree(theirs)
    run = start(shared)
    moved = {"beside": shared / "x\ny", "below": shared / "a" / "b", "another directory": theirs.parent / "z"}[where]
    moved.parent.mkdir(exist_ok=True)
    run.path.rename(moved)
    run.path.symlink_to(theirs)
    run.close()
    assert not moved.exists() and run.path.is_symlink()
    assert tree(theirs) == before


def test_without_proc_a_renamed_run_directory_is_emptied_and_that_is_said(shared, theirs, monkeypatch, caplog):
    before = tree(theirs)
    run = start(shared)
    run.path.rename(shared / "moved")
    run.path.symlink_to(theirs)
    monkeypatch.setattr(owned_directory, "present_path", lambda _descriptor: None)
    with caplog.at_level(logging.WARNING, "ds_slide"):
        run.close()
    assert list((shared / "moved").iterdir()) == []
    assert f"{run.path} could not be removed (somebody has renamed it; an empty directory is left)" in caplog.text
    assert tree(theirs) == before


def test_a_directory_put_in_the_place_of_a_new_one_is_not_used(shared, monkeypatch):
    """It might hold files of the names that a run removes at its end."""
    mine = shared / "mine"
    mine.mkdir()
    (mine / "states").write_text("precious")
    open_owned = owned_directory.open_owned

    def swapped(name: str, parent: int) -> int:
        (shared / name).rmdir()
        mine.rename(shared / name)
        return open_owned(name, parent)

    monkeypatch.setattr("ds_slide.store.directories.locked_directory.open_owned", swapped)
    with pytest.raises(FileExistsError, match="another user has put another directory"):
        start(shared)
    (path,) = shared.glob("*/states")
    assert path.read_text() == "precious"


def test_where_nothing_can_be_swapped_the_tests_that_wait_for_it_are_skipped(shared, theirs, monkeypatch):
    monkeypatch.setattr(traps, "exchange", lambda _directory, _name: False)
    with pytest.raises(pytest.skip.Exception, match="RENAME_EXCHANGE is refused"), intruder(shared, "", theirs):
        pytest.fail("nothing was skipped")
    assert tree(shared) == {}


ROUNDS = pytest.mark.parametrize("rounds", [150, pytest.param(SWAPS, marks=pytest.mark.slow)])


@AS_ROOT
@ROUNDS
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_planted_dead_run_that_becomes_a_link(shared, mode, rounds):
    shared.chmod(mode)
    theirs = precious(shared.parent / "theirs", planted=True)
    before = tree(theirs)
    with intruder(shared, PLANTED, theirs, PLANTED) as swaps:
        done = 0
        while done < rounds or swaps() < SWAPS:
            remove_dead(shared)
            done += 1
    assert tree(theirs) == before


@AS_ROOT
@ROUNDS
def test_our_dead_runs_that_become_links(shared, theirs, rounds):
    before = tree(theirs)
    with intruder(shared, NAME.pattern, theirs) as swaps:
        done = 0
        while done < rounds or swaps() < SWAPS:
            with contextlib.suppress(OSError):  # it was swapped before it was ours
                make_dead_run(shared)
            remove_dead(shared)
            done += 1
            if done % 20 == 0:
                clear(shared)
    assert tree(theirs) == before


@AS_ROOT
@ROUNDS
def test_our_living_run_that_becomes_a_link(shared, theirs, rounds):
    """Nothing of the target goes, and our files do wherever they are."""
    before = tree(theirs)
    with intruder(shared, NAME.pattern, theirs) as swaps:
        done = 0
        while done < rounds or swaps() < SWAPS:
            try:
                run = start(shared)
            except OSError:  # it was swapped before it was ours
                continue
            run.close()
            done += 1
            if done % 20 == 0:
                clear(shared)
    assert tree(theirs) == before
    assert not [path for path in shared.glob("*/*") if not path.parent.is_symlink() and path.name == "states"]


def clear(shared: Path) -> None:
    """Remove what the intruder has hidden under other names."""
    for path in shared.glob("moved*"):
        shutil.rmtree(path, ignore_errors=True)
