"""Emulated hosts: network namespaces that a bridge joins, each with a name, clocks, a /dev/shm and a /tmp of its own.

A process enters a host by itself (`enter`), so that forks of one process that has imported everything can be ranks of
several hosts. The kernel then gives it what two machines have: addresses of its own, sockets that the other hosts do
not see, memory files that cannot be handed over, and the time since another start of the machine. The time of day is
another one for Python alone. Only the disk and the directories that a test shares are common. It takes root.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00000080, 0x00020000, 0x04000000, 0x40000000
CLOCK_APART_S = 3600
"""Between the clocks of each two hosts that follow each other."""
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
INTERFACE = "eth0"
DESCRIPTION = "hosts.json"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    """One emulated host. `space`, `switch`: the network namespaces of the host and of the bridge."""

    number: int
    space: str
    switch: str

    @property
    def address(self) -> str:
        return f"10.83.0.{self.number + 1}"

    @property
    def name(self) -> str:
        return f"host-{self.number}"

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` in the network of this host."""
        return ["ip", "netns", "exec", self.space, *words]

    def whole_command(self, common: Path, *words: str) -> list[str]:
        """The command line that runs `words` on this host, as `enter` does."""
        host = "hosts.Host(int(sys.argv[1]), *sys.argv[2:4])"
        code = f"""import hosts, os, pathlib, sys
hosts.enter({host}, pathlib.Path(sys.argv[4]))
os.execvp(sys.argv[5], sys.argv[5:])"""
        given = (str(self.number), self.space, self.switch, str(common))
        return [sys.executable, "-c", code, *given, *words]

    def cut(self) -> None:
        """Drop all packets from and to this host. No socket closes, and its interface stays up."""
        _ip("-n", self.switch, "link", "set", f"port{self.number}", "nomaster")

    def slow(self, megabits: int) -> None:
        """Limit what this host sends."""
        rate = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms"]
        subprocess.run(self.command("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *rate), check=True)


@functools.cache
def why_not() -> str:
    """Why hosts cannot be emulated here; empty if they can."""
    try:
        with joined(1):
            return ""
    except FileNotFoundError:
        return "there is no ip command (iproute2)"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed: {error.stderr.strip()}"


def have_clocks() -> bool:
    """Whether emulated hosts have their own time since the start of the machine (time namespaces, Linux 5.6)."""
    return Path("/proc/self/ns/time_for_children").exists()


@contextlib.contextmanager
def joined(count: int) -> Iterator[list[Host]]:
    """`count` hosts on one network."""
    stem = f"dss{os.getpid():x}"
    switch = f"{stem}-switch"
    hosts = [Host(number, f"{stem}-{number}", switch) for number in range(count)]
    made: list[str] = []
    try:
        for space in (switch, *(host.space for host in hosts)):
            _ip("netns", "add", space)
            made.append(space)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            port = f"port{host.number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", host.space)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.space, "link", "set", INTERFACE, "up")
            _ip("-n", host.space, "link", "set", "lo", "up")
        yield hosts
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextlib.contextmanager
def described(count: int, folder: Path, megabits: int = 0) -> Iterator[list[Host]]:
    """`count` hosts on one network, which worker scripts `read` in `folder`. Skips the test where hosts cannot be
    emulated. `megabits`: the rate of each host's link, if it is slow."""
    if why := why_not():
        pytest.skip(why)
    with joined(count) as hosts:
        (folder / DESCRIPTION).write_text(json.dumps([asdict(host) for host in hosts]))
        for host in hosts if megabits else ():
            host.slow(megabits)
        yield hosts


def read(folder: Path) -> list[Host]:
    """The hosts that a test has described in `folder`; none if it has not."""
    file = folder / DESCRIPTION
    return [Host(**each) for each in json.loads(file.read_text())] if file.exists() else []


def enter(host: Host, common: Path) -> None:
    """Move this process, which has one thread, to `host`. `common`: a directory that it shares with other hosts, with
    room for what the processes of each host share in /tmp and /dev/shm."""
    with open(f"/run/netns/{host.space}") as space:
        _check(_libc.setns(space.fileno(), CLONE_NEWNET))
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    socket.sethostname(host.name)
    if have_clocks():
        _set_clocks(host.number * CLOCK_APART_S)
    _mount("none", "/", MS_REC | MS_PRIVATE)
    # What is to stay visible may be in /tmp: this project, and the environment that it runs in.
    shown = [common, Path(__file__).parents[2], Path(sys.prefix)]
    held = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in shown if Path("/tmp") in path.parents]
    for name in ("dev/shm", "tmp"):
        (own := common / host.name / name).mkdir(parents=True, exist_ok=True)
        _mount(str(own), f"/{name}", MS_BIND)
    for path, descriptor in held:
        path.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", str(path), MS_BIND)
        os.close(descriptor)
    os.environ.update(GLOO_SOCKET_IFNAME=INTERFACE, TP_SOCKET_IFNAME=INTERFACE)


def _set_clocks(ahead_s: int) -> None:
    """Put the clocks of this process forward: that since the start of the machine, and Python's time of day."""
    real = time.time
    time.time = lambda: real() + ahead_s
    own = Path("/proc/self/ns/time_for_children")
    _check(_libc.unshare(CLONE_NEWTIME))
    Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead_s} 0\nboottime {ahead_s} 0\n")
    with own.open() as space:
        _check(_libc.setns(space.fileno(), CLONE_NEWTIME))


def sent_bytes() -> int:
    """The bytes that the host of this process has sent to other hosts, headers included."""
    rows = (line.split() for line in Path("/proc/self/net/dev").read_text().splitlines())
    return next(int(row[9]) for row in rows if row[0] == f"{INTERFACE}:")


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), None, flags, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
