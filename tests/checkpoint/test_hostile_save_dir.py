"""A directory for checkpoints in which another user plants, renames and replaces, or that came from somewhere else."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from traps import AS_ROOT, intruder, mounts, plant, plant_replaced, precious, tree, writable_by_all

from ds_slide.checkpoint import publish
from ds_slide.checkpoint.leftovers import REPLACED, SAVING, recover, remove_dead_saves, replaced_name, replaced_tag
from ds_slide.checkpoint.publish import Staging, new_name
from ds_slide.checkpoint.sums import Sum, sum_of_file
from ds_slide.errors import SlideError
from ds_slide.store.directories import owned_directory
from ds_slide.store.directories.owned_directory import opened

SWAPS = 2000
ROUNDS = pytest.mark.parametrize("rounds", [100, pytest.param(SWAPS, marks=pytest.mark.slow)])


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return precious(tmp_path / "theirs")


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    return writable_by_all(tmp_path / "saves")


def write(staging: Staging, tag: str, content: bytes = b"states") -> dict[str, Sum]:
    path = staging.path / tag / "model.pt"
    path.write_bytes(content)
    return {path.name: sum_of_file(path)}


def save(saves: Path, tag: str = "tag", content: bytes = b"states") -> None:
    """As a save does it."""
    staging = Staging(saves, new_name())
    try:
        staging.open(tag)
        staging.publish(tag, write(staging, tag, content), latest=True)
    finally:
        staging.discard()


def kill_save(saves: Path, tag: str) -> Path:
    """What kill -9 leaves of a save."""
    staging = Staging(saves, new_name())
    staging.open(tag)
    write(staging, tag)
    assert staging._held is not None
    staging._held.let_go()
    staging._held = None
    return staging.path


def content_of(saves: Path, tag: str = "tag") -> bytes:
    return (saves / tag / "model.pt").read_bytes()


def leftovers(saves: Path) -> list[str]:
    return sorted(path.name for path in saves.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("tag", ["tag", "epoch/1", "a b", "ä", "50%", "..x", "%2F", "line\nbreak", ".hidden"])
def test_a_tag_has_one_name_while_it_is_replaced(tag, saves):
    assert replaced_tag(replaced_name(tag)) == tag
    (saves / tag).parent.mkdir(exist_ok=True)
    (saves / replaced_name(tag)).mkdir()
    recover(saves)
    assert (saves / tag).is_dir() and leftovers(saves) == ([tag] if tag.startswith(".") else [])


def test_names_from_the_disk_move_nothing_out_of_the_directory(saves, theirs):
    plant_replaced(saves, REPLACED, theirs)
    before = tree(saves.parent)
    recover(saves)
    assert tree(saves.parent) == before
    save(saves)
    after = tree(saves.parent)
    assert before.items() <= after.items()
    added = {os.fsdecode(path) for path in after.keys() - before.keys()}
    assert added == {str(saves / name) for name in ("latest", "tag", "tag/model.pt", "tag/ds_slide_manifest.json")}


def have_their_tags(saves: Path) -> None:
    """So that those of `plant` and `mounts` that have a legal name are old checkpoints to remove, none to put back."""
    for number in (*range(4), *range(100, 130)):
        (saves / f"{number:012d}").mkdir()


def test_a_directory_full_of_traps_stays_as_it_is(saves, theirs):
    plant(saves, SAVING, theirs)
    plant(saves, REPLACED, theirs)
    have_their_tags(saves)
    before = tree(saves.parent)
    recover(saves)
    for content in (b"first", b"second"):
        save(saves, content=content)
        assert before.items() <= tree(saves.parent).items()
        assert content_of(saves) == content


def test_mount_points_stay_as_they_are(saves, theirs):
    have_their_tags(saves)
    with mounts(saves, SAVING, theirs), mounts(saves, REPLACED, theirs):
        before = tree(saves.parent)
        recover(saves)
        save(saves)
        assert before.items() <= tree(saves.parent).items()


def test_a_link_to_a_directory_with_a_lock_is_left_alone(saves, theirs, caplog):
    (saves / f"{SAVING}x").symlink_to(theirs)
    before = tree(saves.parent)
    with caplog.at_level(logging.WARNING):
        save(saves)
    assert before.items() <= tree(saves.parent).items()
    assert f"{saves}/{SAVING}x was left alone: it is no directory, so it is none of ours" in caplog.text


@AS_ROOT
def test_another_users_dead_save_is_left_alone(saves):
    dead = kill_save(saves, "tag")
    os.chown(dead, 65534, 65534)
    before = tree(dead)
    save(saves)
    assert tree(dead) == before
    os.chown(dead, 0, 0)
    save(saves)
    assert leftovers(saves) == []


def test_a_dead_save_with_something_else_in_it_is_left_alone_and_named(saves, caplog):
    dead = kill_save(saves, "epoch/1")
    (dead / "epoch" / "notes.txt").write_text("precious")
    with caplog.at_level(logging.WARNING):
        save(saves)
    assert leftovers(saves) == [dead.name]
    assert f"{dead} was left alone: it holds 'epoch/notes.txt', which no save puts there" in caplog.text
    (dead / "epoch" / "notes.txt").unlink()
    save(saves)
    assert leftovers(saves) == []


def test_an_old_checkpoint_that_is_not_back_is_not_removed(saves, theirs):
    """Its place is behind a link, so nobody can tell whether it is needed."""
    (saves / "epoch").symlink_to(theirs)
    old = saves / replaced_name("epoch/thesis")
    old.mkdir()
    (old / "model.pt").touch()
    save(saves)
    assert (old / "model.pt").exists()


def test_hard_links_lose_their_name_only(saves, theirs):
    dead = kill_save(saves, "tag")
    os.link(theirs / "thesis", dead / "tag" / "other.pt")
    save(saves)
    assert leftovers(saves) == [] and (theirs / "thesis").read_text() == "precious thesis"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_tag_behind_a_link_is_not_reached(saves, theirs, exchange, monkeypatch):
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    (theirs / "tag").mkdir()
    (saves / "link").symlink_to(theirs)
    before = tree(theirs)
    with pytest.raises(SlideError, match=f"{saves}/link is a symbolic link"):
        save(saves, "link/tag")
    (saves / "link").unlink()
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        save_with("link/tag", saves, lambda: (saves / "link").symlink_to(theirs))
    assert tree(theirs) == before and leftovers(saves) == []


def save_with(tag: str, saves: Path, happens: Callable[[], None]) -> None:
    """Something happens when the directory of the save is there."""
    staging = Staging(saves, new_name())
    try:
        staging.open(tag)
        happens()
        staging.publish(tag, write(staging, tag), latest=True)
    finally:
        staging.discard()


def test_a_link_that_appears_during_the_save_goes_and_its_target_stays(saves, theirs):
    before = tree(theirs)
    save_with("tag", saves, lambda: (saves / "tag").symlink_to(theirs))
    assert content_of(saves) == b"states" and not (saves / "tag").is_symlink()
    assert tree(theirs) == before and leftovers(saves) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_whose_directory_is_renamed_ends_cleanly(saves, theirs, exchange, monkeypatch):
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    save(saves)
    before = tree(theirs)
    staging = Staging(saves, new_name())
    staging.open("tag")
    files = write(staging, "tag", b"new")
    staging.path.rename(saves / "moved")
    staging.path.symlink_to(theirs)
    with pytest.raises(OSError, match="none of ours"):
        staging.publish("tag", files, latest=True)
    staging.discard()
    assert tree(theirs) == before
    assert content_of(saves) == b"states"
    assert not (saves / "moved").exists()


@AS_ROOT
@ROUNDS
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_planted_dead_save_that_becomes_a_link(saves, mode, rounds):
    saves.chmod(mode)
    theirs = precious(saves.parent / "theirs", planted=True)
    before, planted = tree(theirs), f"{SAVING}x"
    with intruder(saves, "", theirs, planted) as swaps, opened(saves) as parent:
        done = 0
        while done < rounds or swaps() < SWAPS:
            remove_dead_saves(saves, parent)
            done += 1
    assert tree(theirs) == before


@AS_ROOT
@ROUNDS
def test_saves_whose_directories_become_links(saves, theirs, rounds):
    """They fail or succeed; nothing of the target is touched."""
    before = tree(theirs)
    with intruder(saves, rf"{SAVING}.*|{REPLACED}.*", theirs) as swaps:
        done = 0
        while done < rounds or swaps() < SWAPS:
            with contextlib.suppress(OSError, SlideError):
                save(saves, content=b"%d" % done)
            done += 1
            if done % 20 == 0:
                for path in saves.glob("moved*"):
                    shutil.rmtree(path, ignore_errors=True)
    assert tree(theirs) == before


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_that_others_can_write_to_is_said_once(saves, mode, monkeypatch, caplog):
    monkeypatch.setattr(owned_directory, "_said", set())
    saves.chmod(mode)
    with caplog.at_level(logging.WARNING, "ds_slide"):
        save(saves)
        save(saves)
    (message,) = [record.getMessage() for record in caplog.records if "writable" in record.getMessage()]
    assert message.startswith(f"save_dir: {saves} is writable by other users (mode {mode:04o})")
