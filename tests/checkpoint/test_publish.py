"""The place of a checkpoint on file systems that cannot exchange, keep names or refuse; what races with other ranks."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from silly_names import Calls, keep_names
from traps import AS_ROOT, precious, tree

from ds_slide.checkpoint import leftovers
from ds_slide.checkpoint import publish as checkpoint_place
from ds_slide.checkpoint.leftovers import recover, remove_dead_saves, replaced_name
from ds_slide.checkpoint.publish import Staging, new_name
from ds_slide.checkpoint.sums import sum_of_file
from ds_slide.errors import SlideError
from ds_slide.integration import checkpoint_load
from ds_slide.store.directories import locked_directory, owned_directory
from ds_slide.store.directories.locked_directory import LOCK
from ds_slide.store.directories.owned_directory import opened


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    path = tmp_path / "saves"
    path.mkdir()
    return path


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS. Patched: the file systems that can be mounted here have it."""
    monkeypatch.setattr(checkpoint_place, "_exchange", lambda *_: False)


def save(saves: Path, tag: str, content: bytes) -> None:
    staging = Staging(saves, new_name())
    try:
        staging.open(tag)
        path = staging.path / tag / "model.pt"
        path.write_bytes(content)
        staging.publish(tag, {path.name: sum_of_file(path)}, latest=True)
    finally:
        staging.discard()


def dead_save(saves: Path) -> Path:
    """What kill -9 leaves of a save."""
    path = saves / new_name()
    (path / "tag").mkdir(parents=True)
    for name in (LOCK, "tag/model.pt"):
        (path / name).write_bytes(b"x")
    return path


def names(saves: Path) -> list[str]:
    return sorted(path.name for path in saves.iterdir())


# Loads


@pytest.fixture
def engine() -> Any:
    """Of which a load needs no more here."""
    return SimpleNamespace(
        global_rank=0,
        optimizer=SimpleNamespace(require_manifest=False),
        _get_zero_ckpt_name=lambda directory, tag: f"{directory}/{tag}/zero.pt",
        _get_ckpt_name=lambda directory, tag: f"{directory}/{tag}/model.pt",
        _get_all_ckpt_names=lambda _directory, _tag: [],
    )


def test_every_rank_looks_for_the_tag_after_it_was_put_back(engine, saves, monkeypatch):
    """The others may be faster than the publisher in every step that they take together."""
    (saves / replaced_name("tag")).mkdir()
    monkeypatch.setattr(checkpoint_load, "saved_ranks", lambda _path: frozenset({"0"}))
    publishing = True

    def together(step: Callable[[], Any]) -> list[Any]:
        nonlocal publishing
        publishing = False
        other = step()
        publishing = True
        return [step(), other]

    monkeypatch.setattr(checkpoint_load, "is_publisher", lambda _engine: publishing)
    monkeypatch.setattr(checkpoint_load, "together", together)
    assert checkpoint_load.whole_tag(engine, saves, "tag", checkpoint_load.Wanted(True, False, ranks=1)) == "tag"


def test_what_cannot_be_put_back_is_a_sentence(engine, saves, monkeypatch):
    def fails(directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory / "there"))

    monkeypatch.setattr(checkpoint_load, "is_publisher", lambda _engine: True)
    monkeypatch.setattr(checkpoint_load, "together", lambda step: [step()])
    monkeypatch.setattr(checkpoint_load, "recover", fails)
    with pytest.raises(SlideError, match=rf"{saves}/there cannot be read \(Input/output error\) \(no other tag"):
        checkpoint_load.whole_tag(engine, saves, "tag", checkpoint_load.Wanted(True, False, ranks=1))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_what_may_not_be_put_back_is_left_alone(code, saves, monkeypatch, caplog):
    def rename(*_arguments: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    (saves / replaced_name("tag")).mkdir()
    monkeypatch.setattr(leftovers, "os", Calls(rename=rename))
    with caplog.at_level(logging.WARNING):
        recover(saves)
    assert names(saves) == [replaced_name("tag")]
    assert f"{saves / replaced_name('tag')} was left alone: {os.strerror(code)}" in caplog.text


# Saves


def test_a_dead_save_goes_where_an_open_file_keeps_a_name(saves, monkeypatch, caplog):
    dead_save(saves)
    keep_names(monkeypatch, locked_directory, checkpoint_place, owned_directory)
    with caplog.at_level(logging.WARNING):
        save(saves, "tag", b"new")
    assert names(saves) == ["latest", "tag"]
    assert "left alone" not in caplog.text and "cannot be removed" not in caplog.text


@pytest.mark.parametrize("opened_file", [LOCK, "tag/model.pt"])
def test_a_dead_save_of_which_another_process_has_a_file_open_stops_no_save(opened_file, saves, monkeypatch, caplog):
    file = os.open(dead_save(saves) / opened_file, os.O_RDONLY)
    keep_names(monkeypatch, locked_directory, checkpoint_place, owned_directory)
    save(saves, "tag", b"new")
    assert "was left alone: Directory not empty" in caplog.text
    assert (saves / "tag" / "model.pt").read_bytes() == b"new"
    owned_directory.os.close(file)
    save(saves, "tag", b"newer")
    assert names(saves) == ["latest", "tag"]


@pytest.mark.parametrize("where", ["", "tag"])
@pytest.mark.parametrize("hidden", [".nfs0000000000a1b2c300000001", ".fuse_hidden0000000100000002"])
def test_a_name_that_the_file_system_gave_keeps_no_dead_save(where, hidden, saves):
    (dead_save(saves) / where / hidden).write_bytes(b"x")
    save(saves, "tag", b"new")
    assert names(saves) == ["latest", "tag"]


def test_a_dead_save_is_renamed_before_a_part_of_it_goes(saves, monkeypatch):
    """A rank of it that lives might publish the rest."""
    dead = dead_save(saves)

    def die(_directory: int, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(locked_directory, "remove_contents", die)
    with pytest.raises(KeyboardInterrupt), opened(saves) as parent:
        remove_dead_saves(saves, parent)
    assert names(saves) == [f"{dead.name}.ended"]
    monkeypatch.undo()
    save(saves, "tag", b"new")  # what is left after a kill there is still a dead save
    assert names(saves) == ["latest", "tag"]


@pytest.fixture(params=["tmpfs", "bind"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    made: list[Path] = []
    (tmp_path / "bound").mkdir()

    def mount(where: Path) -> None:
        where.mkdir(parents=True)
        arguments = ["-t", "tmpfs", "tmpfs"] if request.param == "tmpfs" else ["--bind", str(tmp_path / "bound")]
        done = subprocess.run(["mount", *arguments, str(where)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        made.append(where)

    yield mount
    for where in made:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.parametrize(("tag", "at"), [("tag", "tag"), ("epoch/1", "epoch"), ("epoch/1", "epoch/1")])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_a_tag_that_no_directory_can_take_the_place_of_is_refused_first(tag, at, kind, saves, tmp_path):
    theirs, place = precious(tmp_path / "theirs"), saves / at
    place.parent.mkdir(exist_ok=True)
    if kind == "file":
        place.write_text("precious")
    else:
        place.symlink_to(theirs if kind == "link" else "nowhere")
    before = tree(tmp_path)
    what = "no directory" if kind == "file" else "a symbolic link"
    with pytest.raises(SlideError, match=f"tag '{tag}' cannot be saved in {saves}: {place} is {what}, .* another tag"):
        Staging(saves, new_name()).open(tag)
    assert tree(tmp_path) == before


@AS_ROOT
@pytest.mark.parametrize(("tag", "at"), [("tag", "tag"), ("epoch/1", "epoch"), ("epoch/1", "epoch/1")])
def test_a_tag_on_a_mount_point_is_refused_first(tag, at, saves, tmp_path, mount):
    mount(saves / at)
    before = tree(tmp_path)
    with pytest.raises(SlideError, match=f"tag '{tag}' cannot be saved in {saves}: {saves / at} is a mount point, "):
        Staging(saves, new_name()).open(tag)
    assert tree(tmp_path) == before


@AS_ROOT
def test_save_dir_may_be_a_link_to_a_mount_point(saves, tmp_path, mount):
    mount(saves / "disk")
    (tmp_path / "link").symlink_to(saves / "disk")
    for content in (b"old", b"new"):
        save(tmp_path / "link", "epoch/1", content)
    assert (saves / "disk" / "epoch" / "1" / "model.pt").read_bytes() == b"new"


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("tag", ["tag", "epoch/1"])
def test_the_old_tag_is_back_where_the_new_one_cannot_take_its_place(tag, saves, monkeypatch):
    save(saves, tag, b"old")
    last, refused = tag.rpartition("/")[2], []

    def rename(source: str, target: str, **directories: int) -> None:
        if source == target == last and not refused:
            refused.append(source)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.rename(source, target, **directories)

    monkeypatch.setattr(checkpoint_place, "os", Calls(rename=rename))
    with pytest.raises(OSError, match="Input/output error"):
        save(saves, tag, b"new")
    assert refused and names(saves) == sorted(["latest", tag.partition("/")[0]])
    assert (saves / tag / "model.pt").read_bytes() == b"old"
