"""What ranks of several hosts tell each other over a table, and what silence means."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from ds_slide.runtime.core.ranks import distant_peers as module
from ds_slide.runtime.core.ranks.distant_peers import DistantPeers
from ds_slide.runtime.core.ranks.peers import Peer, State

SECONDS = 30.0


class Together:
    """Ranks in threads of this process, whose exchanges wait for each other."""

    def __init__(self, count: int) -> None:
        self.given: list[list[Any]] = []
        self.at = [0] * count
        self.count = count
        self.changed = threading.Condition()

    def exchange(self, rank: int, own: Any) -> list[Any]:
        with self.changed:
            turn = self.at[rank]
            self.at[rank] += 1
            if turn == len(self.given):
                self.given.append([None] * self.count)
            self.given[turn][rank] = (own,)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: all(self.given[turn]), SECONDS)
            return [each for (each,) in self.given[turn]]


class FakeRanks:
    def __init__(self, rank: int, together: Together) -> None:
        self.rank = rank
        self.world_size = together.count
        self._together = together

    def exchange(self, own: Any, _what: str) -> list[Any]:
        return self._together.exchange(self.rank, own)


def connected(count: int) -> list[DistantPeers | None]:
    together, found = Together(count), [None] * count

    def connect(rank: int) -> None:
        found[rank] = DistantPeers.of(FakeRanks(rank, together))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return found


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DistantPeers]]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    found = connected(3)
    yield found
    for peers in reversed(found):
        peers.close()


def until(ready: Callable[[], bool]) -> None:
    """Wait for other threads' lines."""
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.02)):
        if ready():
            return
        pause.wait(0.02)
    raise AssertionError("nothing has come")


def seen(peers: DistantPeers, rank: int) -> Peer:
    return next(peer for peer in peers.others() if peer.rank == rank)


def test_each_hears_the_others(three: list[DistantPeers]) -> None:
    states = [State(1.5, "MainThread waits for block 1"), State(), State(2.5, "ended", closed=True)]
    for peers, state in zip(three, states, strict=True):
        peers.tell(state)
    for rank, peers in enumerate(three):
        others = [other for other in range(3) if other != rank]
        assert [peer.rank for peer in peers.others()] == others
        until(lambda peers=peers, others=others: [peer.state for peer in peers.others()] == [states[o] for o in others])
    peer = seen(three[0], 2)
    assert peer.has_ended and peer.process == os.getpid()
    assert str(peer) == f"rank 2 ({peer.host}, process {os.getpid()}) has ended its engine"


def test_a_rank_that_is_silent_is_lost(three: list[DistantPeers]) -> None:
    three[1]._closed.set()
    three[1]._thread.join(SECONDS)
    until(lambda: seen(three[0], 1).is_lost(0.5))
    assert not seen(three[0], 2).is_lost(0.5) and not seen(three[0], 1).has_ended
    assert "has not been heard from for" in str(seen(three[0], 1))


def test_the_last_line_is_told(three: list[DistantPeers]) -> None:
    three[2].tell(State(closed=True, what="ended by its watchdog"))
    three[2].close()
    until(lambda: seen(three[0], 2).state == State(closed=True, what="ended by its watchdog"))


def test_without_the_table_rank_0_is_gone(three: list[DistantPeers]) -> None:
    class Broken:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("the connection was reset")

    three[1]._table = Broken()
    until(lambda: seen(three[1], 0).is_gone)
    assert str(seen(three[1], 0)).endswith("is gone") and not seen(three[1], 2).is_gone


def test_a_clock_is_not_compared(three: list[DistantPeers]) -> None:
    """Lines have a number, and no time."""
    until(lambda: three[0]._table.get("rank 1") != b"")
    beat, stands_s, what, closed = json.loads(three[0]._table.get("rank 1"))
    assert (type(beat), stands_s, what, closed) == (int, 0.0, "", False)


def test_without_an_address_there_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(module._log, "propagate", True)
    assert connected(2) == [None, None]
    assert "a host that vanishes is noticed by the time-out of the process group alone" in caplog.text
    assert "MASTER_ADDR is not set" in caplog.text
