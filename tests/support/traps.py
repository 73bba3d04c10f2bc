"""Directories that others can write to: what they plant there, and another user at work in them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from intruder import MANY, exchange

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which needs root")
Tree = dict[bytes, tuple[object, ...]]


def tree(top: Path) -> Tree:
    """Everything below a directory, without following a link: identity, kind, permissions, size, times and content."""
    found: Tree = {}
    for folder, directories, files in os.walk(os.fsencode(top)):
        for name in (*directories, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            times = () if stat.S_ISDIR(status.st_mode) else (status.st_mtime_ns, status.st_nlink)
            found[path] = (status.st_dev, status.st_ino, status.st_mode, status.st_uid, *times, content)
    return found


def precious(folder: Path, *, planted: bool = False) -> Path:
    """A directory of somebody with the names that a run or a save would remove, or those that an intruder plants."""
    folder.mkdir()
    for number in range(MANY if planted else 0):
        (folder / f"file{number}").touch()
    for name in ("lock", "states", "bandwidth", "latest", "zero_to_fp32.py", "thesis"):
        (folder / name).write_text(f"precious {name}")
    return folder


def writable_by_all(folder: Path) -> Path:
    """A new directory into which everybody may write."""
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def odd_names(folder: Path) -> None:
    for name in (b"line\nbreak", b"\xff\xfe", b"-rf", b"tab\t", "ä\u202e".encode()):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"x")


def plant(parent: Path, prefix: str, elsewhere: Path) -> None:
    """In `parent`, with names that begin with `prefix` and end in a number that counts: everything but a directory that
    a run or a save of ours has left. `elsewhere`: a `precious` directory on the same file system."""
    numbers = iter(range(100, 200))

    def name() -> Path:
        return parent / f"{prefix}{next(numbers):012d}"

    def directory(*files: str) -> Path:
        path = name()
        path.mkdir()
        for file in files:
            (path / file).touch()
        return path

    name().symlink_to(elsewhere)
    name().symlink_to("nowhere")
    name().write_text("a file")
    os.mkfifo(name())
    os.link(elsewhere / "thesis", name())
    (directory("lock") / "link").symlink_to(elsewhere)
    (directory("lock") / "states").symlink_to(elsewhere / "states")
    (directory("lock") / "tag").symlink_to(elsewhere)
    (directory() / "lock").symlink_to(elsewhere / "lock")
    os.mkfifo(directory() / "lock")
    os.mkfifo(directory("lock") / "states")
    os.link(elsewhere / "thesis", directory("lock") / "thesis")
    odd_names(directory("lock"))
    odd_names(parent)
    deep = directory("lock") / "tag"
    for _ in range(40):
        deep = deep / "a"
    deep.mkdir(parents=True)
    if os.geteuid() == 0:
        os.mknod(name(), 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(directory() / "lock", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(directory("lock") / "states", 0o600 | stat.S_IFBLK, os.makedev(7, 200))
        theirs = directory("lock", "states")
        inner = directory("lock") / "tag"
        inner.mkdir()
        (inner / "model.pt").touch()
        for path in (theirs, inner):
            os.chown(path, 65534, 65534)


def plant_replaced(saves: Path, prefix: str, elsewhere: Path) -> None:
    """In a checkpoint directory, with `prefix`, which is that of an old checkpoint waiting to be put back: names that
    lead out of the directory, or that no save gives, and legal ones of what is no directory."""
    outside = str(elsewhere.parent / "outside").replace("/", "%2F")
    names = f"{outside} ..%2Foutside ..%2F..%2Foutside .. . a%2F..%2F..%2Foutside %2E%2E%2Foutside link%2Foutside "
    names += "missing%2Ftag a%2fb %00 nul%00 %C3 % %zz %0A% a%2F%2Fb"
    for name in ("", *names.split()):
        (saves / f"{prefix}{name}").mkdir()
        (saves / f"{prefix}{name}" / "model.pt").touch()
    (saves / "link").symlink_to(elsewhere)
    (saves / os.fsdecode(prefix.encode() + b"\xff")).mkdir()
    (saves / f"{prefix}symlink").symlink_to(elsewhere)
    (saves / f"{prefix}file").touch()
    os.mkfifo(saves / f"{prefix}fifo")


@contextmanager
def mounts(parent: Path, prefix: str, elsewhere: Path) -> Iterator[None]:
    """Meanwhile there are mount points in `parent`: a tmpfs and the directory `elsewhere`, over a directory and within
    one. Skips where this user may not mount."""
    with ExitStack() as stack:
        for number, (kind, below) in enumerate((kind, below) for kind in ("tmpfs", "bind") for below in ("", "tag")):
            path = parent / f"{prefix}{number:012d}"
            (path / below).mkdir(parents=True)
            (path / "lock").touch()
            arguments = ["-t", "tmpfs", "tmpfs"] if kind == "tmpfs" else ["--bind", str(elsewhere)]
            done = subprocess.run(["mount", *arguments, str(path / below)], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", str(path / below)], check=True)
            if kind == "tmpfs":
                (path / below / "lock").touch()
                (path / below / "states").write_text("on another file system")
        yield


def require_exchange(parent: Path) -> None:
    trial = parent / "trial"
    for name in ("link", "other"):
        (trial / name).mkdir(parents=True)
    descriptor = os.open(trial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not exchange(descriptor, "other"):
            pytest.skip(f"RENAME_EXCHANGE is refused in {parent}")
    finally:
        os.close(descriptor)
        shutil.rmtree(trial)


@contextmanager
def intruder(parent: Path, pattern: str, target: Path, *planted: str) -> Iterator[Callable[[], int]]:
    """Meanwhile another user swaps the directories in `parent` whose names match for links to `target`, and plants one
    named `planted`, if given, where there is none. Gives a function that tells the number of swaps. Skips where the
    file system has no such swap, and a test would wait for one for ever."""
    require_exchange(parent)
    directory, counter = os.open(parent, os.O_RDONLY | os.O_DIRECTORY), os.memfd_create("swaps")
    os.pwrite(counter, bytes(8), 0)
    script = str(Path(__file__).with_name("intruder.py"))
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", script, str(directory), str(counter), pattern, str(target), *planted],
        pass_fds=(directory, counter),
    )

    def swaps() -> int:
        assert process.poll() is None, "the intruder has ended"
        return int.from_bytes(os.pread(counter, 8, 0), "little")

    try:
        yield swaps
    finally:
        process.kill()
        process.wait(60)
        os.close(directory)
        os.close(counter)
