"""What ranks hear of each other, over real datagrams within this process, and what is known of their processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_slide.runtime.core.ranks import peers as module
from ds_slide.runtime.core.ranks.peers import Peer, Peers, Process, State

OWN = Process.own()
SECONDS = 30.0


def pair(processes: list[Process] | None = None, secrets: tuple[str, str] = ("s", "s")) -> list[Peers]:
    """Two ranks."""
    channels = [module._open_channel() for _ in range(2)]
    addresses = [address for _, address in channels]
    return [
        Peers(rank, processes or [OWN, OWN], addresses, secrets[rank], channel)
        for rank, (channel, _) in enumerate(channels)
    ]


@pytest.fixture
def two() -> Iterator[list[Peers]]:
    made = pair()
    yield made
    for peers in made:
        peers.close()


def heard(peers: Peers, state: State) -> Peer:
    """Wait until the other rank has said that; datagrams of one machine arrive, but when is not said."""
    deadline = threading.Event()
    for _ in range(int(SECONDS / 0.001)):
        (peer,) = peers.others()
        if peer.state == state:
            return peer
        deadline.wait(0.001)
    raise AssertionError(f"{state} was not heard")


def test_each_hears_the_other(two: list[Peers]) -> None:
    states = [State(1.5, "MainThread waits for block 1"), State(2.5, "ended", closed=True)]
    for peers, state in zip(two, states, strict=True):
        peers.tell(state)
    assert heard(two[0], states[1]).rank == 1 and heard(two[1], states[0]).rank == 0
    assert heard(two[0], states[1]).has_ended and not heard(two[1], states[0]).has_ended


def test_a_long_sentence_is_cut(two: list[Peers]) -> None:
    two[0].tell(State(0.0, "x" * 10**6))
    heard(two[1], State(0.0, "x" * module.LONGEST_WHAT))


def test_what_arrives_late_does_not_replace_what_is_newer(two: list[Peers]) -> None:
    two[0].tell(State(1.0))
    two[0].tell(State(2.0))
    heard(two[1], State(2.0))
    two[0]._turn = iter([0])  # type: ignore[assignment]
    two[0].tell(State(1.0))
    assert select.select([two[1]._channel], [], [], SECONDS)[0]
    assert two[1].others()[0].state.stands_s == 2.0


def test_strangers_are_not_heard(two: list[Peers]) -> None:
    address = two[1]._channel.getsockname()[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in (
            b"\xff\x00",
            b"[1]",
            b"7",
            b'["x", 0, 99, {"stands_s": 1e9}]',
            b'["s", 5, 99, {}]',
            b'{"a": 1}',
        ):
            stranger.sendto(datagram, ("127.0.0.1", address))
    two[0].tell(State(4.0))
    assert heard(two[1], State(4.0)).state.stands_s == 4.0


def test_two_engines_of_the_same_processes_do_not_hear_each_other(two: list[Peers]) -> None:
    other = pair(secrets=("t", "t"))
    other[0]._addresses = dict(two[0]._addresses)
    other[0].tell(State(9.0))
    two[0].tell(State(4.0))
    heard(two[1], State(4.0))
    for peers in other:
        peers.close()


def test_silence_counts_in_seconds_that_this_rank_has_lived_through(two: list[Peers]) -> None:
    for _ in range(3):
        two[1].tell(State(), 5.0)
    assert two[1].others()[0].silent_s == 15.0
    two[0].tell(State(1.0))
    assert heard(two[1], State(1.0)).silent_s == 0.0


def test_a_rank_that_was_stopped_was_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it goes on it takes a look until it says so, and meanwhile it must not be taken for one that hangs."""
    stopped = [True]
    monkeypatch.setattr(Process, "is_stopped", lambda _self: stopped[0])
    two = pair()
    two[1].tell(State(), 1000.0)
    (peer,) = two[1].others()
    assert not peer.stands(100.0)
    stopped[0] = False
    (peer,) = two[1].others()
    assert peer.silent_s == 0.0 and not peer.stands(100.0)
    for peers in two:
        peers.close()


def test_a_rank_that_is_gone_and_a_channel_that_is_closed_do_no_harm(two: list[Peers]) -> None:
    two[0].close()
    for _ in range(3):
        two[1].tell(State(1.0))
        two[1].others()
    two[1].close()
    two[1].tell(State(1.0))
    assert len(two[1].others()) == 1


def test_who_knows_a_wrong_address_learns_the_right_one() -> None:
    """A host may know itself by an address that only it knows."""
    two = pair()
    two[1]._addresses[0] = ("127.0.0.1", 9)
    two[0].tell(State(1.0))
    heard(two[1], State(1.0))
    two[1].tell(State(2.0))
    heard(two[0], State(2.0))
    for peers in two:
        peers.close()


# ---- made by all ranks together --------------------------------------------------------------------------------------


class Group:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._own: dict[int, Any] = {}
        self.rank = threading.local()

    def exchange(self, own: Any, _what: str) -> list[Any]:
        self._own[self.rank.value] = own
        self._barrier.wait(SECONDS)
        results = [self._own[rank] for rank in range(self._barrier.parties)]
        self._barrier.wait(SECONDS)
        return results


def of_all(size: int) -> list[Peers | None]:
    group = Group(size)
    made: list[Peers | None] = [None] * size

    def of(rank: int) -> None:
        group.rank.value = rank
        made[rank] = Peers.of(rank, group.exchange)

    threads = [threading.Thread(target=of, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return made


def test_ranks_find_each_other() -> None:
    made = of_all(3)
    for rank, peers in enumerate(made):
        assert peers is not None
        assert [peer.rank for peer in peers.others()] == [other for other in range(3) if other != rank]
        peers.close()


def test_where_datagrams_do_not_pass_no_rank_has_a_watchdog(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "HEAR_S", 0.05)
    tell = Peers.tell
    monkeypatch.setattr(Peers, "tell", lambda self, *args: None if self._rank == 1 else tell(self, *args))
    assert of_all(2) == [None, None]
    assert "ds_slide.hang_timeout has no effect" in caplog.text


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def process_of(number: int) -> Process:
    status = module._status(number)
    assert status is not None
    return Process("here", number, status[1], OWN.machine)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = threading.Event()
    for _ in range(int(SECONDS / 0.001)):
        if condition():
            return
        deadline.wait(0.001)
    raise AssertionError("it never came")


def test_a_process_that_lives(child: subprocess.Popen[bytes]) -> None:
    process = process_of(child.pid)
    assert process.is_near and not process.is_gone() and not process.is_stopped()
    assert not OWN.is_gone() and OWN.number == os.getpid()


def test_a_process_that_is_stopped_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    process = process_of(child.pid)
    child.send_signal(signal.SIGSTOP)
    eventually(process.is_stopped)
    assert not process.is_gone()
    child.send_signal(signal.SIGCONT)
    eventually(lambda: not process.is_stopped())


def test_a_process_that_has_ended_is_gone_also_before_somebody_asks_how(child: subprocess.Popen[bytes]) -> None:
    process = process_of(child.pid)
    child.kill()
    eventually(process.is_gone)
    assert module._status(child.pid) is not None  # a zombie
    child.communicate()
    assert process.is_gone() and module._status(child.pid) is None
    assert str(Peer(3, process, State(), 0.0)) == f"rank 3 (process {child.pid} on here) is gone"


def test_a_number_that_is_used_again_is_another_process(child: subprocess.Popen[bytes]) -> None:
    process = Process("here", child.pid, "1", OWN.machine)
    assert process.is_gone()


def test_processes_of_other_machines_and_containers_are_not_looked_for() -> None:
    for machine in ("another boot pid:[4026531836]", ""):
        process = Process(OWN.host, 2**22 + 1, "1", machine)  # the same host name: containers may share it
        assert not process.is_near
        assert not Peer(1, process, State(), 0.0).has_ended
        assert not Peer(1, process, State(), 0.0).stands(1.0)
