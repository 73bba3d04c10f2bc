"""Finds out whether the ranks can read each other's host memory, and exchanges the descriptors.

Every rank makes a memory file and hands its descriptor to the others over a local socket. All of them come to the same
answer: each step ends with an exchange over the process group, and a failure on one rank is a failure on all. Only
these exchanges wait for another rank: a rank sends when it connects, and the kernel keeps what was sent.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_slide.errors import SlideError
from ds_slide.runtime.core.ranks.collectives import Ranks
from ds_slide.store.memory_file import MemoryFile

logger = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RANK = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Sharing:
    """The memory files of the ranks of one machine."""

    def __init__(self, file: MemoryFile, world_size: int) -> None:
        self.file = file
        """The file of this rank."""
        self.descriptors = [-1] * world_size
        """Descriptors of the other ranks' files, by rank."""

    def close(self) -> None:
        """Close the descriptors; mapped memory stays mapped. Harmless when called twice."""
        for rank, descriptor in enumerate(self.descriptors):
            if descriptor >= 0:
                os.close(descriptor)
                self.descriptors[rank] = -1
        self.file.close()


def open_sharing(
    ranks: Ranks,
    wanted: Literal["auto"] | bool,
    because: str = "ds_slide.share_weights is true",
    way_out: str = 'set it to "auto" to gather weights over the process group instead',
) -> Sharing | None:
    """Share the weights. Returns None where they are to be gathered; if "auto" has decided that, one line of the log
    says why.

    Collective. Raises SlideError on all ranks when `wanted` is true and sharing is not possible. `because`: the reason
    for wanting it.
    """
    if ranks.world_size == 1 or wanted is False:
        return None
    try:
        return _share(ranks)
    except _Impossible as reason:
        if wanted is True:
            raise SlideError(f"{because}, but the ranks cannot share host memory: {reason}; {way_out}") from reason
        if ranks.rank == 0:
            logger.warning("weights are gathered over the process group, not shared in host memory: %s", reason)
        return None


def share(ranks: Ranks) -> Sharing | None:
    """Return memory files of the ranks, for optional uses; None where they cannot be shared. Collective."""
    try:
        return _share(ranks)
    except _Impossible:
        return None


def machine_identity(namespace: str) -> str:
    """Return a string that is equal for processes of one machine that share `namespace`, a name in /proc/self/ns. The
    host's name would not do, because containers may share it. Raises OSError where there is no /proc."""
    return f"{_BOOT.read_text().strip()} {os.readlink(f'/proc/self/ns/{namespace}')}"


class _Impossible(Exception):
    """The reason why the ranks share no memory, the same on all of them."""


@dataclass(frozen=True)
class _Hello:
    machine: str
    address: bytes


def _share(ranks: Ranks) -> Sharing:
    with ExitStack() as sockets, ExitStack() as undo:
        listener = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))

        with _together(ranks, "preparing shared memory"):
            sharing = Sharing(MemoryFile(), ranks.world_size)
            undo.callback(sharing.close)
            listener.bind(b"\0ds_slide-" + secrets.token_hex(16).encode())  # abstract: it is in no directory
            listener.listen(ranks.world_size)
            hello = _Hello(machine_identity("net"), listener.getsockname())
        hellos = ranks.exchange(hello, "telling where each rank listens")
        if len({hello.machine for hello in hellos}) > 1:
            ranks.lie_on([hello.machine for hello in hellos])
            raise _Impossible("they are on several machines, or in containers with a network each")
        with _together(ranks, "sending descriptors"):
            _send(ranks.rank, sharing, hellos, sockets)
        with _together(ranks, "receiving descriptors"):
            _receive(listener, sharing, sockets)
        undo.pop_all()
        return sharing


@contextmanager
def _together(ranks: Ranks, what: str) -> Iterator[None]:
    """Run the work inside the context on all ranks. Raises _Impossible on all of them when it has failed on any."""
    problem = None
    try:
        yield
    except OSError as error:
        problem = f"{what} failed on rank {ranks.rank} ({error})"
    problems = [each for each in ranks.exchange(problem, what) if each is not None]
    if problems:
        raise _Impossible(problems[0])


def _send(rank: int, sharing: Sharing, hellos: Sequence[_Hello], sockets: ExitStack) -> None:
    """Send to every other rank. This does not block: all of them listen, and have room for one connection of each
    rank."""
    for other, hello in enumerate(hellos):
        if other == rank:
            continue
        connection = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.connect(hello.address)
        if _user_of(connection) != os.getuid():
            raise PermissionError(f"the listener of rank {other} belongs to another user")
        socket.send_fds(connection, [_RANK.pack(rank)], [sharing.file.descriptor])


def _receive(listener: socket.socket, sharing: Sharing, sockets: ExitStack) -> None:
    """Receive from every other rank. All of them have sent."""
    for _ in range(len(sharing.descriptors) - 1):
        while _user_of(connection := sockets.enter_context(listener.accept()[0])) != os.getuid():
            pass  # a process of another user has found the name
        message, descriptors, _, _ = socket.recv_fds(connection, _RANK.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(message) != _RANK.size or len(descriptors) != 1:
            raise OSError("a rank has sent no descriptor")
        sharing.descriptors[_RANK.unpack(message)[0]] = descriptors[0]


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
