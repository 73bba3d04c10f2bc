"""What ranks tell each other on a board, and what is known of their processes."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_slide import _native
from ds_slide.runtime.core.ranks import peers as module
from ds_slide.runtime.core.ranks.board import Board
from ds_slide.runtime.core.ranks.peers import TEXT_BYTES, Peer, Peers, State

SECONDS = 30.0
WIDTH = len(module._Row)


def boards(ranks: int) -> list[Board]:
    count = ranks * WIDTH
    slab = _native.Slab(_native.Generations.bytes(count), False, False)
    texts = mmap.mmap(-1, ranks * TEXT_BYTES)
    return [Board(_native.Generations(slab, count), texts, rank, ranks, WIDTH) for rank in range(ranks)]


@pytest.fixture
def two() -> list[Peers]:
    return [Peers(board, [41, 42], {}) for board in boards(2)]


def heard(peers: Peers) -> Peer:
    (peer,) = peers.others()
    return peer


def test_each_hears_the_other(two: list[Peers]) -> None:
    assert heard(two[0]) == Peer(1, 42, State())
    states = [State(1.5, "MainThread waits for block 1"), State(2.5, "ended", closed=True)]
    for peers, state in zip(two, states, strict=True):
        peers.tell(state)
    assert heard(two[0]) == Peer(1, 42, states[1]) and heard(two[1]) == Peer(0, 41, states[0])
    assert heard(two[0]).has_ended and not heard(two[1]).has_ended


def test_a_long_sentence_is_cut(two: list[Peers]) -> None:
    two[0].tell(State(0.0, "x" * 10**6))
    assert heard(two[1]).state == State(0.0, "x" * TEXT_BYTES)


def test_a_rank_that_stands_counts_a_little_before_the_limit(two: list[Peers]) -> None:
    two[0].tell(State(9.5))
    assert heard(two[1]).stands(10.0) and not heard(two[1]).stands(12.0)


class FakeRanks:
    """One of two ranks on a board, whose numbers of processes are given."""

    def __init__(self, own: tuple[int, str], other: tuple[int, str]) -> None:
        self.rank, self.world_size, self._given = 0, 2, [own, other]

    def exchange(self, _own: Any, _what: str) -> list[Any]:
        return self._given


def found(monkeypatch: pytest.MonkeyPatch, own: tuple[int, str], other: tuple[int, str]) -> Peers:
    monkeypatch.setattr(module, "open_board", lambda *_, **__: boards(2)[0])
    peers = Peers.of(FakeRanks(own, other))  # type: ignore[arg-type]
    assert peers is not None
    return peers


def test_ranks_without_memory_in_common_have_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_board", lambda *_, **__: None)
    assert Peers.of(FakeRanks((1, "m"), (2, "n"))) is None  # type: ignore[arg-type]


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(int(SECONDS / 0.001)):
        if condition():
            return
        module.select.poll().poll(1)
    raise AssertionError("it never came")


def test_a_process_that_has_ended_is_gone_also_before_its_parent_asks_how(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = found(monkeypatch, (os.getpid(), "m"), (child.pid, "m"))
    child.send_signal(signal.SIGSTOP)
    assert not heard(peers).is_gone
    child.kill()
    eventually(lambda: heard(peers).is_gone)
    assert str(heard(peers)) == f"rank 1 (process {child.pid}) is gone"
    child.communicate()
    assert heard(peers).has_ended
    peers.close()
    assert not heard(peers).is_gone


def test_processes_of_other_containers_are_not_looked_for(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for own, other in (("m", "n"), ("", "")):
        peers = found(monkeypatch, (os.getpid(), own), (child.pid, other))
        assert peers._watched == {}


def test_a_process_that_cannot_be_watched_is_taken_for_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = found(monkeypatch, (os.getpid(), "m"), (2**22 + 1, "m"))
    assert not heard(peers).is_gone
