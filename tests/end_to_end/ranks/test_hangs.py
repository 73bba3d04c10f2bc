"""A run in which a hand-over is broken ends by itself and says who waits for what; one that is only slow does not.

Every run is one process for each rank (hang_worker.py), with a watchdog that loses its patience after a second or two.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ssd_fault_runs import Actions, Launcher, Run, launched, needs_shim

LIMIT_S = 1.0
"""For runs that hang."""
PATIENT_S = 1.5
"""For runs that do not, and must not be taken for it on a busy machine either."""
LONGER_S = 2 * PATIENT_S
SSD = {"ssd_buffers": 2, "weight_buffers": 2, "window": 2}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    yield from launched(tmp_path_factory.mktemp("runs"), "hang_worker.py")


def on_ssd(disk: Path, limit_s: float = LIMIT_S, **slide: Any) -> list[Any]:
    return ["start", str(disk), {**SSD, "hang_timeout": limit_s, **slide}, {}]


def in_memory(limit_s: float = LIMIT_S, **slide: Any) -> list[Any]:
    return ["start_in_memory", {"window": 2, "hang_timeout": limit_s, **slide}, {}]


def sentence_of(run: Run) -> str:
    """The last line of a run that has ended with one SlideError: of a traceback, or the watchdog's own."""
    code = run.end()
    assert code == 1, f"{code}\n{run.log[-3000:]}"
    last = run.log.strip().splitlines()[-1]
    assert last.startswith(("ds_slide.errors.SlideError: ", "ds_slide: ")), run.log[-3000:]
    return last


def check(sentence: str, *parts: str) -> None:
    for part in parts:
        assert re.search(part, sentence), sentence


def results_of(runs: list[Run]) -> list[dict[str, Any]]:
    for run in runs:
        assert run.end() == 0, run.log[-3000:]
    return [run.result for run in runs]


# ---- one rank --------------------------------------------------------------------------------------------------------


def test_a_completion_of_the_disk_is_dropped(launcher: Launcher, disk: Path) -> None:
    run = launcher.begin(on_ssd(disk), ["train", 1], ["drop_completion", 5], ["train", 3])
    sentence = sentence_of(run)
    check(
        sentence,
        "nothing has come forward for",
        "MainThread waits for",
        r"ds_slide-h2d( of outer modules)? waits for",
        "hang_timeout",
    )
    assert run.result["broken"] == "read"
    assert not list(disk.iterdir())


def test_the_end_of_an_update_is_dropped(launcher: Launcher) -> None:
    run = launcher.begin(in_memory(), ["train", 1], ["drop_finish", 4], ["train", 3])
    sentence = sentence_of(run)
    # A unit that the next forward waits for is updated before others, so timing decides which update is the fourth.
    dropped = re.escape(run.result["dropped"])
    check(sentence, "nothing has come forward for", "MainThread waits for", f"ds_slide-[\\w ]+ waits for .*{dropped}")


# ---- two ranks -------------------------------------------------------------------------------------------------------


def both(launcher: Launcher, start: list[Any], *actions: list[Any], second: Actions) -> list[Run]:
    """`second`: what rank 1 does in between."""
    first = [start, ["train", 1], *actions]
    return launcher.begin_ranks(first, [*first[:2], *second, *actions])


def test_a_completion_is_dropped_on_one_rank(launcher: Launcher, disk: Path) -> None:
    runs = both(launcher, on_ssd(disk), ["train", 3], second=[["drop_completion", 5]])
    first, second = (sentence_of(run) for run in runs)
    check(second, "waits for")
    check(first, "rank 1", "waits for|has ended")
    check(first + second, "MainThread waits for", r"ds_slide-h2d( of outer modules)? waits for")
    assert not list(disk.iterdir())


def test_a_rank_skips_a_collective(launcher: Launcher, disk: Path) -> None:
    runs = both(launcher, on_ssd(disk), ["train", 3], second=[["skip_reduction"]])
    sentences = [sentence_of(run) for run in runs]
    assert runs[1].result["broken"] == "all_reduce"
    # Whichever notices first: a rank counts the collectives of the others, or a wait ends by the watchdog.
    check(" ".join(sentences), "waits for the other ranks in|have called different collectives")
    check(sentences[0], "rank 1")
    check(sentences[1], "rank 0")
    assert not list(disk.iterdir())


def test_a_rank_is_killed_in_the_middle_of_a_step(launcher: Launcher) -> None:
    runs = both(launcher, in_memory(), ["train", 3], second=[["in_forward", "kill", signal.SIGKILL]])
    check(sentence_of(runs[0]), rf"rank 1 \(process {runs[1].pid}\) is gone")
    assert runs[1].end() == -signal.SIGKILL


@pytest.mark.slow
def test_one_of_four_ranks_is_killed_in_the_middle_of_a_step(launcher: Launcher) -> None:
    start: Actions = [in_memory(), ["train", 1]]
    kill = ["in_forward", "kill", signal.SIGKILL]
    runs = launcher.begin_ranks(*[[*start, *([kill] if rank == 2 else []), ["train", 3]] for rank in range(4)])
    assert runs[2].end() == -signal.SIGKILL
    for rank in (0, 1, 3):
        check(sentence_of(runs[rank]), rf"rank 2 \(process {runs[2].pid}\) is gone")


@pytest.mark.slow
def test_one_of_four_ranks_takes_its_time(launcher: Launcher) -> None:
    """The others wait longer than the watchdog's limit, for a rank that is stopped, and go on with the same bits."""

    def four(*second: list[Any], limit_s: float) -> list[Run]:
        start: Actions = [in_memory(limit_s), ["train", 1]]
        return launcher.begin_ranks(*[[*start, *(second if rank == 2 else []), *BITS] for rank in range(4)])

    expected = results_of(four(limit_s=0.0))
    runs = four(["in_forward", "kill", signal.SIGSTOP], limit_s=PATIENT_S)
    wait_for_stop(runs[2])
    assert not runs[0].has_ended(LONGER_S), runs[0].log[-3000:]
    runs[2].kill(signal.SIGCONT)
    for result, one in zip(results_of(runs), expected, strict=True):
        assert same(result, one)


def test_a_rank_ends_its_engine_while_the_other_trains(launcher: Launcher, disk: Path, tmp_path: Path) -> None:
    """The other one waits for it at a meeting of the ranks, as long as this process lives."""
    os.mkfifo(fifo := tmp_path / "fifo")
    start = on_ssd(disk, share_weights=False)  # for shared ones it would wait in a lane, and be woken
    runs = launcher.begin_ranks(
        [start, ["train", 1], ["train", 3]], [start, ["train", 1], ["destroy"], ["hear", str(fifo)]]
    )
    sentence = sentence_of(runs[0])
    check(sentence, rf"rank 1 \(process {runs[1].pid}\) has ended its engine: look there for the cause")
    check(sentence, "waits for the other ranks in")
    assert not list(disk.iterdir())
    fifo.write_text("x")
    assert runs[1].end() == 0


# ---- slow, and no hang -----------------------------------------------------------------------------------------------

STEPS = 2
BITS = [["train", 1], ["digest", "end"]]


@pytest.fixture(scope="module")
def alone(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of one rank gives that nothing holds up."""
    disk = tmp_path_factory.mktemp("disk")
    return launcher.run(on_ssd(disk, 0.0), ["train", STEPS - 1], *BITS)


@pytest.fixture(scope="module")
def together(launcher: Launcher) -> list[dict[str, Any]]:
    """As `alone`, of two ranks."""
    return results_of(both(launcher, in_memory(0.0), *BITS, second=[]))


def same(result: dict[str, Any], expected: dict[str, Any]) -> bool:
    return (result["losses"], result["digests"]) == (expected["losses"], expected["digests"])


def test_a_slow_disk(launcher: Launcher, disk: Path, alone: dict[str, Any]) -> None:
    """Every request ends long before the watchdog loses its patience, a whole transfer long after."""
    needs_shim()
    requests, milliseconds = 15, 300
    assert milliseconds / 1e3 <= PATIENT_S / 5 and requests * milliseconds / 1e3 > 2 * PATIENT_S
    small = ["small_requests", 4096]  # of 90 thousand bytes of weights, in one transfer
    slow = ["slow_disk", milliseconds, requests]
    run = launcher.begin(small, on_ssd(disk, PATIENT_S, io_backend="threads"), ["train", STEPS - 1], slow, *BITS)
    (result,) = results_of([run])
    assert same(result, alone)


@pytest.mark.slow
def test_a_process_is_stopped_while_it_waits(launcher: Launcher, disk: Path, alone: dict[str, Any]) -> None:
    run = launcher.begin(on_ssd(disk, PATIENT_S), ["train", STEPS - 1], ["stop_while_waiting"], *BITS)
    wait_for_stop(run)
    assert not run.has_ended(LONGER_S)
    run.kill(signal.SIGCONT)
    (result,) = results_of([run])
    assert same(result, alone)


def wait_for_stop(run: Run) -> None:
    """Until the process has stopped itself."""
    while psutil.Process(run.pid).status() != psutil.STATUS_STOPPED:
        assert not run.has_ended(0.01), run.log[-3000:]


def test_the_other_rank_takes_its_time(launcher: Launcher, together: list[dict[str, Any]], tmp_path: Path) -> None:
    """Its script does something else between two steps, or stands at a line in a debugger; then a debugger, or a
    signal, stops the whole process in the middle of a step. The first rank is in a collective meanwhile."""
    there, fifo = tmp_path / "there", tmp_path / "fifo"
    os.mkfifo(there)
    os.mkfifo(fifo)
    pauses = [["tell", str(there)], ["hear", str(fifo)], ["in_forward", "kill", signal.SIGSTOP]]
    runs = both(launcher, in_memory(PATIENT_S), *BITS, second=pauses)
    there.read_text()
    assert not runs[0].has_ended(LONGER_S), runs[0].log[-3000:]
    fifo.write_text("x")
    wait_for_stop(runs[1])
    assert not runs[0].has_ended(LONGER_S), runs[0].log[-3000:]
    runs[1].kill(signal.SIGCONT)
    for result, expected in zip(results_of(runs), together, strict=True):
        assert same(result, expected)


INTERRUPTED = r"backward\(\) on rank 1 ended with an exception in the middle of what all ranks do"


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("slide", [{}, {"share_weights": False}], ids=["shared", "gathered"])
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipping", "immediate"])
def test_a_rank_catches_an_exception_out_of_backward(launcher: Launcher, slide: dict[str, Any], clip: float) -> None:
    """It goes on with its next batch: its gradients would be averaged with those of other blocks."""
    start = ["start_in_memory", {"window": 2, "hang_timeout": LIMIT_S, **slide}, {"clip": clip}]
    actions: Actions = [start, ["train", 1]]
    runs = launcher.begin_ranks([*actions, ["train", 2]], [*actions, ["interrupt_backward", 2], ["train", 1]])
    check(sentence_of(runs[1]), INTERRUPTED, "end all ranks and resume from the last checkpoint")
    assert "the script has failed" in runs[1].result["caught"]
    check(sentence_of(runs[0]), rf"rank 1 \(process {runs[1].pid}\) (is gone|has ended its engine)")


def test_a_rank_catches_what_it_is_told_as_well(launcher: Launcher, tmp_path: Path) -> None:
    """And stays alive: the other rank hears of it all the same."""
    os.mkfifo(fifo := tmp_path / "fifo")
    actions: Actions = [in_memory(), ["train", 1]]
    second: Actions = [["interrupt_backward", 2], ["failing", ["train", 1]], ["hear", str(fifo)]]
    runs = launcher.begin_ranks([*actions, ["train", 2]], [*actions, *second])
    told = rf"rank 1 \(process {runs[1].pid}\)"
    check(sentence_of(runs[0]), rf"{told} has ended its engine", rf"{told}: {INTERRUPTED}")
    check(runs[1].result["errors"][0], INTERRUPTED)
    runs[1].kill(signal.SIGKILL)
    runs[1].end()


# ---- two engines -----------------------------------------------------------------------------------------------------

GATHERED = {"share_weights": False, "window": 2}
REFERRED = [["train_beside", 2], ["digest", "end"]]


def beside(
    launcher: Launcher, *actions: list[Any], second: Actions, limit_s: float = LIMIT_S, first: Actions = ()
) -> list[Run]:
    """An engine that trains and a reference on both ranks; `first`, `second`: what each rank does before `actions`."""
    start = [
        in_memory(limit_s, share_weights=False),
        ["start_reference", {**GATHERED, "hang_timeout": limit_s}],
        ["train_beside", 1],
    ]
    return launcher.begin_ranks([*start, *first, *actions], [*start, *second, *actions])


@pytest.mark.slow
def test_a_rank_takes_its_time_in_one_of_two_engines(launcher: Launcher) -> None:
    """The other one waits in a collective of the first engine, and then of the second."""
    expected = results_of(beside(launcher, *REFERRED, second=[], limit_s=0.0))
    pauses = [["in_the_reference", "kill", signal.SIGSTOP], ["in_forward", "kill", signal.SIGSTOP]]
    runs = beside(launcher, *REFERRED, second=pauses, limit_s=PATIENT_S)
    for _ in pauses:
        wait_for_stop(runs[1])
        assert not runs[0].has_ended(LONGER_S), runs[0].log[-3000:]
        runs[1].kill(signal.SIGCONT)
    for result, one in zip(results_of(runs), expected, strict=True):
        assert same(result, one) and result["referred"] == one["referred"]
        assert len(result["referred"]) == 3


def test_a_rank_is_killed_in_a_forward_of_the_second_engine(launcher: Launcher) -> None:
    runs = beside(launcher, ["train_beside", 3], second=[["in_the_reference", "kill", signal.SIGKILL]])
    check(sentence_of(runs[0]), rf"rank 1 \(process {runs[1].pid}\) is gone")
    assert runs[1].end() == -signal.SIGKILL


def test_a_rank_calls_the_two_engines_in_another_order(launcher: Launcher) -> None:
    """Both gather as many weights as the other, of blocks alike: nothing would hang, and their bits be mixed."""
    edges = ["infer", 1]  # once, after the last step
    first, second = [edges, ["refer", 1], ["infer", 1]], [edges, ["infer", 1], ["refer", 1]]
    runs = beside(launcher, ["train_beside", 3], first=first, second=second)
    for run in runs:
        check(sentence_of(run), "the ranks have come to different places of the program: rank 0 to gathering")


def test_a_rank_ends_one_engine_while_the_other_rank_uses_it(launcher: Launcher, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    runs = beside(launcher, ["train_beside", 2], second=[["destroy_reference"], ["hear", str(fifo)]])
    sentence = sentence_of(runs[0])
    check(sentence, rf"rank 1 \(process {runs[1].pid}\) has ended its engine: look there for the cause")
    runs[1].kill(signal.SIGKILL)
    runs[1].end()
