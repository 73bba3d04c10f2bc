"""Files of a run: without a name, and gone however the run ends."""

from __future__ import annotations

import errno
import grp
import logging
import os
import pwd
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hangups import heeds_signals
from silly_names import Calls

from ds_slide.errors import SlideError
from ds_slide.store.directories import owned_directory, run_files
from ds_slide.store.directories.run_files import RunFile, RunFiles


def names(parent: Path) -> list[str]:
    return sorted(str(path.relative_to(parent)) for path in parent.rglob("*"))


def put_and_get(file: RunFile) -> None:
    """Through another descriptor, as whoever wants to look at the file gets one."""
    os.pwrite(file.descriptor, b"content", 4096)
    assert Path(f"/proc/self/fd/{file.descriptor}").read_bytes()[4096:] == b"content"


@pytest.fixture
def no_unnamed_files(monkeypatch) -> None:
    """As on file systems without O_TMPFILE. Patched: FUSE, which has none, cannot be mounted everywhere."""
    monkeypatch.setattr(run_files, "unnamed_file", lambda _directory: None)


def test_a_file_has_no_name_and_no_directory(tmp_path):
    files = RunFiles(tmp_path / "missing" / "too")
    assert files.path == tmp_path / "missing" / "too"
    first, second = files.make("bandwidth"), files.make("states")
    assert names(files.path) == []
    for file in (first, second):
        status = os.fstat(file.descriptor)
        assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 0)
        assert file.label == f"{files.path}/#{status.st_ino} (deleted)"
        put_and_get(file)
    os.close(first.descriptor)
    os.close(second.descriptor)


@pytest.mark.usefixtures("no_unnamed_files")
def test_without_o_tmpfile_it_is_unlinked_at_once(tmp_path):
    files = RunFiles(tmp_path)
    for _ in range(2):
        file = files.make("states")
        status = os.fstat(file.descriptor)
        assert names(tmp_path) == []
        assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 0)
        assert file.label.endswith(" (deleted)")
        put_and_get(file)
        os.close(file.descriptor)


@pytest.mark.usefixtures("no_unnamed_files")
def test_a_file_that_does_not_give_back_what_is_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "os", Calls(pread=lambda *_: b""))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SlideError, match="an open file cannot be unlinked there"):
        RunFiles(tmp_path).make("states")
    assert names(tmp_path) == [] and os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EPERM, errno.ENOTSUP, errno.EIO])
def test_the_kernel_says_that_there_is_no_o_tmpfile(tmp_path, monkeypatch, code):
    def without(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return os.open(path, flags, *arguments, **options)

    monkeypatch.setattr(owned_directory, "os", Calls(open=without))
    files = RunFiles(tmp_path)
    os.close(files.make("states").descriptor)
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_no_file_can_be_made_for_is_said(tmp_path, monkeypatch, code):
    def refuse(*_arguments: object, **_options: object) -> int:
        raise OSError(code, os.strerror(code))

    with owned_directory.opened(tmp_path) as parent:
        monkeypatch.setattr(owned_directory, "os", Calls(open=refuse))
        with pytest.raises(OSError, match=os.strerror(code)):
            owned_directory.unnamed_file(parent)


def test_over_fuse_nothing_is_left(over_fuse):
    files = RunFiles(over_fuse)
    file = files.make("states")
    put_and_get(file)
    hidden = names(over_fuse)
    assert killed_run(over_fuse, signal.SIGKILL) == hidden
    os.close(file.descriptor)
    assert names(over_fuse) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_no_death_leaves_anything(tmp_path, number):
    assert killed_run(tmp_path, number) == []


def killed_run(parent, number):
    """What is left in `parent` of a run that has made a file there."""
    script = """
        import os, sys
        from pathlib import Path
        from ds_slide.store.directories.run_files import RunFiles
        files = RunFiles(Path(sys.argv[1]))
        file = files.make("states")
        os.posix_fallocate(file.descriptor, 0, 1 << 20)
        print("made", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heeds_signals,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"made\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    return names(parent)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (0o777, "rename, remove or replace what we write there"),
        (0o1777, "not rename or remove ours (it is sticky)"),
        (0o757, "rename, remove"),
        (0o755, None),
    ],
)
def test_a_directory_that_others_can_write_to_is_said_once(tmp_path, caplog, monkeypatch, mode, text):
    monkeypatch.setattr(owned_directory, "_said", set())
    tmp_path.chmod(mode)
    with caplog.at_level(logging.WARNING, "ds_slide"):
        for _ in range(3):
            RunFiles(tmp_path, json_path="ds_slide.nvme_path[1]")
    messages = [record.getMessage() for record in caplog.records]
    if text is None:
        assert messages == []
    else:
        (message,) = messages
        assert message.startswith(f"ds_slide.nvme_path[1]: {tmp_path} is writable by other users (mode {mode:04o})")
        assert text in message and "\n" not in message


@pytest.mark.parametrize("private", [True, False])
def test_a_group_of_this_user_alone_is_nobody_else(tmp_path, caplog, monkeypatch, private):
    monkeypatch.setattr(owned_directory, "_said", set())
    monkeypatch.setattr(owned_directory, "_is_private", lambda _group: private)
    tmp_path.chmod(0o775)
    with caplog.at_level(logging.WARNING, "ds_slide"):
        RunFiles(tmp_path)
    assert len(caplog.records) == (0 if private else 1)


def test_which_group_is_private():
    user = pwd.getpwuid(os.geteuid())
    own = grp.getgrgid(user.pw_gid)
    assert owned_directory._is_private(own.gr_gid) == (own.gr_name == user.pw_name and not own.gr_mem)
    assert not any(owned_directory._is_private(group.gr_gid) for group in grp.getgrall() if group != own)
