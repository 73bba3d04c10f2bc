"""What the watchdog takes for a hang and what not. No thread and no time: the tests say how many seconds pass."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from markers import Passing

from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Failures, Future
from ds_slide.runtime.core.ranks import watchdog as module
from ds_slide.runtime.core.ranks.peers import Peer, State
from ds_slide.runtime.core.ranks.watchdog import Times, Watchdog

LIMIT_S = 100.0
TIMES = Times(LIMIT_S)
LOOK_S, GRACE_S, LOST_S = TIMES.look_s, TIMES.grace_s, TIMES.lost_s


class FakeDevice:
    def __init__(self) -> None:
        self.works = False

    def enter_thread(self) -> None: ...

    def is_working(self) -> bool:
        return self.works


@dataclass
class FakePeers:
    """The other ranks, from 1 on."""

    states: list[Peer] = field(default_factory=list)
    told: list[State] = field(default_factory=list)
    closed: bool = False

    def tell(self, state: State) -> None:
        self.told.append(state)

    def others(self) -> list[Peer]:
        return self.states

    def close(self) -> None:
        self.closed = True

    def are(self, *states: State, gone: bool = False) -> None:
        self.states = [Peer(rank, 40 + rank, state, gone) for rank, state in enumerate(states, 1)]


class Scene:
    """An engine whose watchdog looks when the test says so."""

    def __init__(self, peers: FakePeers | None = None) -> None:
        self.failures = Failures()
        self.device = FakeDevice()
        self.peers = peers
        self.bytes = 0
        self.ended: list[int] = []
        self.watchdog = self.new()

    def new(self) -> Watchdog:
        made = Watchdog(self.failures, self.device, LIMIT_S, [self], self.peers)  # type: ignore[arg-type]
        made._end_process = self.ended.append  # type: ignore[method-assign]
        return made

    def moved_bytes(self) -> int:
        return self.bytes

    def pass_time(self, seconds: float, watchdog: Watchdog | None = None) -> str | None:
        """Looks, the first of which sees how things are."""
        message = None
        for _ in range(int(seconds / LOOK_S) + 1):
            message = message or (watchdog or self.watchdog)._judge(LOOK_S)
        return message

    @contextlib.contextmanager
    def waiting(self, what: str, thread: str = "MainThread", **options: Any) -> Iterator[None]:
        current = threading.current_thread()
        name, current.name = current.name, thread
        try:
            with self.failures.waiting(what, **options):
                current.name = name
                yield
        finally:
            current.name = name


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def ranks() -> Scene:
    return Scene(FakePeers())


def test_who_waits_is_named_clients_first(scene: Scene) -> None:
    lanes = [scene.waiting("block 3", "ds_slide-h2d"), scene.waiting("a gradient", "ds_slide-update")]
    with lanes[0], scene.waiting("the weights of block 3"), lanes[1]:
        assert scene.pass_time(LIMIT_S - LOOK_S) is None
        message = scene.pass_time(LOOK_S)
    assert message is not None
    assert "MainThread waits for the weights of block 3; ds_slide-h2d waits for block 3; ds_slide-update" in message
    assert f"nothing has come forward for {LIMIT_S:.0f} s" in message and "ds_slide.hang_timeout" in message


def test_a_lane_that_has_nothing_to_do_is_no_hang(scene: Scene) -> None:
    with scene.waiting("a gradient", "ds_slide-update"):
        assert scene.pass_time(10 * LIMIT_S) is None


def test_a_script_that_waits_for_nothing_is_no_hang(scene: Scene) -> None:
    assert scene.pass_time(10 * LIMIT_S) is None


def hand_over(scene: Scene) -> None:
    Future(scene.failures).complete()


def disk(scene: Scene) -> None:
    scene.bytes += 1


def gpu(scene: Scene) -> None:
    """Works for the look that follows."""
    scene.device.works = True


@pytest.mark.parametrize("progress", [hand_over, disk, gpu])
def test_whatever_comes_forward_starts_the_time_again(scene: Scene, progress: Callable[[Scene], None]) -> None:
    with scene.waiting("something slow"):
        for _ in range(5):
            assert scene.pass_time(LIMIT_S - 2 * LOOK_S) is None
            progress(scene)
            assert scene.watchdog._judge(LOOK_S) is None
            scene.device.works = False
        assert scene.pass_time(LIMIT_S) is not None


def test_a_collective_that_does_not_end_is_a_hang_though_the_gpu_works(ranks: Scene) -> None:
    ends = [Passing(), Passing()]
    for number, end in enumerate(ends):
        ranks.failures.outstanding(f"collective {number}", end)
    ranks.device.works = True
    assert ranks.pass_time(LIMIT_S - LOOK_S) is None
    ends[0].passed = True
    assert ranks.pass_time(LIMIT_S - LOOK_S) is None
    message = ranks.pass_time(LOOK_S)
    assert message is not None and "the GPU is in, or waits for, collective 1" in message
    ends[1].passed = True
    assert ranks.pass_time(2 * LIMIT_S) is None


def test_one_wait_after_the_other_is_no_hang_if_each_has_ended_by_a_hand_over(scene: Scene) -> None:
    for number in range(5):
        with scene.waiting(f"block {number}"):
            assert scene.pass_time(LIMIT_S - LOOK_S) is None
        scene.failures.progressed()


def test_the_time_for_which_a_process_was_stopped_does_not_count(scene: Scene) -> None:
    with scene.waiting("something"):
        scene.watchdog._judge(LOOK_S)
        for _ in range(5):
            assert scene.watchdog._judge(1e6) is None
    assert scene.watchdog._since == 10 * LOOK_S


class Broken:
    def moved_bytes(self) -> int:
        return 1 // 0


def test_a_look_that_fails_ends_nothing_and_is_said_once(ranks: Scene, caplog: pytest.LogCaptureFixture) -> None:
    assert ranks.peers is not None
    with ranks.waiting("something"):
        ranks.pass_time(LIMIT_S / 2)
        ranks.watchdog._stores = [Broken()]
        assert ranks.pass_time(2 * LIMIT_S) is None
        assert ranks.peers.told[-1] == State()  # silence would be taken for standing still
        assert [record.message for record in caplog.records if "ZeroDivisionError" in record.message] != []
        assert len(caplog.records) == 1
        ranks.watchdog._stores = []
        assert ranks.pass_time(LIMIT_S - 2 * LOOK_S) is None


# ---- other ranks -----------------------------------------------------------------------------------------------------

STANDS = State(LIMIT_S, "MainThread waits for the disk")
MOVES = State(0.0)


def test_a_rank_whose_script_goes_on_is_waited_for(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.peers.are(STANDS, MOVES)
    with ranks.waiting("the other ranks", for_ranks=True):
        assert ranks.pass_time(10 * LIMIT_S) is None
        ranks.peers.are(STANDS, State(0.8 * LIMIT_S))
        assert ranks.pass_time(LIMIT_S) is None


def test_when_all_stand_still_all_are_named(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.peers.are(STANDS, State(0.95 * LIMIT_S, "MainThread waits for block 7"))
    with ranks.waiting("the other ranks in collective 5", for_ranks=True):
        message = ranks.pass_time(LIMIT_S)
    assert message is not None
    assert "MainThread waits for the other ranks in collective 5" in message
    assert "rank 1 (process 41): MainThread waits for the disk" in message
    assert "rank 2 (process 42): MainThread waits for block 7" in message


def test_a_wait_for_a_rank_of_another_machine_is_left_to_the_process_group(scene: Scene) -> None:
    with scene.waiting("the other ranks in collective 5", for_ranks=True):
        assert scene.pass_time(10 * LIMIT_S) is None
    with scene.waiting("the disk"):
        assert scene.pass_time(LIMIT_S) is not None


@pytest.mark.parametrize(
    ("state", "gone", "sentence"),
    [(MOVES, True, "rank 1 (process 41) is gone"), (State(closed=True), False, "has ended its engine")],
)
def test_a_rank_that_has_ended_is_not_waited_for(ranks: Scene, state: State, gone: bool, sentence: str) -> None:
    assert ranks.peers is not None
    ranks.peers.are(state, gone=gone)
    with ranks.waiting("the other ranks in collective 9", for_ranks=True):
        assert ranks.pass_time(LOST_S - LOOK_S) is None
        message = ranks.pass_time(LOST_S)
    assert message is not None and sentence in message and "collective 9" in message and "look there" in message


def test_a_rank_that_has_ended_is_no_reason_to_hurry_a_wait_for_something_else(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.peers.are(State(closed=True))
    with ranks.waiting("the disk"):
        assert ranks.pass_time(LIMIT_S - LOOK_S) is None
        assert ranks.pass_time(LOOK_S) is not None


def test_the_reason_of_a_rank_that_has_ended_is_passed_on(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.peers.are(State(closed=True, what="the ssd lane stopped with SlideError: no space"))
    with ranks.waiting("the other ranks", for_ranks=True):
        message = ranks.pass_time(LIMIT_S)
    assert message is not None and "rank 1 (process 41): the ssd lane stopped with SlideError" in message


def test_of_a_thousand_ranks_a_few_are_named(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.peers.are(*[STANDS] * 1000, State(closed=True, what="no space"))
    with ranks.waiting("the other ranks"):
        message = ranks.pass_time(LIMIT_S)
    assert message is not None and "no space" in message and len(message) < 2000


def test_the_other_ranks_hear_what_this_one_does(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.peers.are(MOVES)
    with ranks.waiting("block 1"):
        ranks.pass_time(LIMIT_S)
    assert ranks.peers.told[-1] == State(LIMIT_S, "MainThread waits for block 1")


def test_a_rank_that_stands_still_in_one_engine_does_so_in_all(ranks: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that use two engines in different orders wait for each other in different ones."""
    assert ranks.peers is not None
    other = Scene(FakePeers())
    assert other.peers is not None
    monkeypatch.setattr(Watchdog, "_of_process", [ranks.watchdog, other.watchdog])
    with ranks.waiting("the other ranks in collective 5"):
        ranks.peers.are(MOVES)
        ranks.pass_time(LIMIT_S)
        other.pass_time(0.0)
    assert other.peers.told[-1] == State(LIMIT_S, "MainThread waits for the other ranks in collective 5")


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_whoever_is_stuck_after_the_end_is_ended_by_force(scene: Scene) -> None:
    with scene.waiting("the other ranks in a collective"):
        assert not scene.watchdog._grace_is_over(GRACE_S - 1.0)
        assert scene.watchdog._grace_is_over(1.0)
    assert not scene.watchdog._grace_is_over(GRACE_S)
    with scene.waiting("something", "ds_slide-h2d"):
        assert not scene.watchdog._grace_is_over(10 * GRACE_S)
    scene.failures.outstanding("collective 4", Passing())
    assert scene.watchdog._grace_is_over(GRACE_S)


def test_the_last_acts(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.watchdog._end_by_force("everyone waits")
    assert scene.ended == [1]
    assert capsys.readouterr().err == "ds_slide: everyone waits\n"


def test_the_last_line_is_the_first_failure(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.failures.record("ssd", OSError("no space"))
    scene.watchdog._end_by_force("everyone waits")
    assert "the ssd lane stopped with OSError: no space" in capsys.readouterr().err


def test_no_last_act_keeps_the_process(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()
    scene.watchdog._times = Times(LIMIT_S, last_s=0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for last in (blocked.wait, lambda: 1 // 0):
        monkeypatch.setattr(module.sys.stdout, "flush", last)
        scene.watchdog._end_by_force("everyone waits")
    blocked.set()
    assert scene.ended == [1, 1]


def run(scene: Scene, monkeypatch: pytest.MonkeyPatch, looks: int) -> list[str]:
    """The thread's own course, with `looks` looks and no time between them. What the run was ended with."""
    ends: list[str] = []
    done = threading.Event()

    def end(message: str) -> None:
        ends.append(message)
        done.set()

    class Clock:
        def __init__(self) -> None:
            self.left = looks

        def wait(self, _seconds: float) -> bool:
            self.left -= 1
            return self.left < 0

    times = iter(range(10**6))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times) * LOOK_S)
    monkeypatch.setattr(scene.watchdog, "_closed", Clock())
    monkeypatch.setattr(scene.failures, "end", end)
    scene.watchdog._run()
    assert done.wait(30.0 if scene.watchdog._state.closed else 0.0) or not ends
    return ends


def test_a_run_that_hangs_is_ended_and_by_force_if_somebody_is_stuck(
    ranks: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks.peers is not None
    ranks.peers.are(STANDS)
    with ranks.waiting("block 1"):
        (message,) = run(ranks, monkeypatch, looks=21 + 6)
    assert ranks.ended == [1]
    assert capsys.readouterr().err.endswith(f"ds_slide: {message}\n")
    assert ranks.peers.told[-1] == State(closed=True, what="ended by its watchdog: MainThread waits for block 1")


def test_a_run_that_hangs_is_ended_and_left_alone_if_nobody_is_stuck(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(scene.waiting("block 1"))
        monkeypatch.setattr(
            scene.watchdog, "_end", lambda message: (stack.close(), Watchdog._end(scene.watchdog, message))
        )
        assert len(run(scene, monkeypatch, looks=1000)) == 1
    assert scene.ended == []


def test_a_run_that_does_not_hang_is_not_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(scene, monkeypatch, looks=1000) == [] and scene.ended == []


def test_a_collective_that_fails_says_which_rank_has_ended(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.watchdog.start()
    ranks.peers.are(STANDS, State(closed=True, what="no space"))
    sentence = r"^collective 3 failed: rank 2 \(process 42\) has ended its engine: no space: reset by peer$"
    with pytest.raises(SlideError, match=sentence), ranks.failures.collective("collective 3"):
        raise RuntimeError("reset\nby peer")
    ranks.watchdog.close()


def test_waits_end_by_the_verdict(scene: Scene) -> None:
    scene.failures.end("everyone waits")
    with pytest.raises(SlideError, match=r"^everyone waits$"):
        Future(scene.failures).wait()


# ---- closing ---------------------------------------------------------------------------------------------------------


def test_closing_tells_the_others_once_and_why(ranks: Scene) -> None:
    assert ranks.peers is not None
    ranks.watchdog.start()
    assert ranks.watchdog in Watchdog._of_process
    ranks.watchdog.close("the disk is full")
    ranks.watchdog.close()
    assert ranks.peers.told[-1] == State(closed=True, what="the disk is full") and ranks.peers.closed
    assert not ranks.watchdog._thread.is_alive() and ranks.watchdog not in Watchdog._of_process


def test_a_forked_child_that_drops_the_engine_tells_nobody(ranks: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.peers is not None
    ranks.watchdog.start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        ranks.watchdog.close()
    assert not ranks.peers.closed and ranks.watchdog._thread.is_alive()
    ranks.watchdog.close()
