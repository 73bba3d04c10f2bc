"""The update threads: where they run, what they do to each other and to their callers."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from ds_slide import _native


def update_threads() -> dict[int, set[int]]:
    """Thread id -> cores, of the update threads of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end while we look
            if (task / "comm").read_text().startswith("slide-update"):
                found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def test_threads_are_pinned_in_turn_and_end_with_their_object():
    before = update_threads()
    cores = sorted(os.sched_getaffinity(0))[:2]
    workers = _native.Workers(3, cores)
    mine = {thread: where for thread, where in update_threads().items() if thread not in before}
    expected = [{cores[index % len(cores)]} for index in range(3)]
    assert [mine[thread] for thread in sorted(mine)] == expected
    assert workers.num_threads == 3
    del workers
    while set(update_threads()) & set(mine):  # a thread that was joined leaves /proc a moment later
        os.sched_yield()


def test_without_cores_threads_go_where_the_process_may():
    before = update_threads()
    workers = _native.Workers(2, [])
    mine = {thread: where for thread, where in update_threads().items() if thread not in before}
    assert list(mine.values()) == [os.sched_getaffinity(0)] * workers.num_threads


@pytest.mark.parametrize("core", [-1, 1023, 5000])
def test_a_core_that_does_not_exist_is_named(core):
    if core in os.sched_getaffinity(0):
        pytest.skip("this machine has that core")
    with pytest.raises(RuntimeError, match=rf"thread 1 cannot be pinned to core {core} .*taskset"):
        _native.Workers(2, [min(os.sched_getaffinity(0)), core])


def test_calls_from_many_threads_do_not_mix():
    workers = _native.Workers(3, [])
    values = [torch.full((200_000,), float(index)) for index in range(1, 7)]
    expected = [200_000.0 * index**2 for index in range(1, 7)]
    wrong: list[tuple[int, float]] = []

    def call(index: int) -> None:
        for _ in range(40):
            total = _native.sum_of_squares(workers, values[index].data_ptr(), "fp32", 200_000)
            if not math.isclose(total, expected[index], rel_tol=1e-12):
                wrong.append((index, total))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_python_runs_during_a_call():
    """Were the GIL held in the call, this thread would learn of its start only after its end.

    With so long a switch interval no thread gives the GIL up by itself. Several attempts, because a busy machine may
    wake this thread late; a held GIL fails them all.
    """
    workers = _native.Workers(1, [])
    values = torch.ones(50_000_000, dtype=torch.bfloat16)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        assert any(_runs_during_a_call(workers, values) for _ in range(10))
    finally:
        sys.setswitchinterval(interval)


def _runs_during_a_call(workers: _native.Workers, values: torch.Tensor) -> bool:
    started, ended = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        _native.sum_of_squares(workers, values.data_ptr(), "bf16", values.numel(), "portable")
        ended.set()

    caller = threading.Thread(target=call)
    caller.start()
    started.wait()
    during = not ended.is_set()
    caller.join()
    return during


def test_a_forked_child_is_told_and_can_end():
    """Threads do not survive fork; a child must hang neither in a call nor when it lets go of the object."""
    script = """
        import os, sys, gc
        from ds_slide import _native
        workers = _native.Workers(2, [])

        def asleep(task):
            return open(f"/proc/self/task/{task}/stat").read().rsplit(")", 1)[1].split()[0] == "S"

        others = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
        while not all(asleep(task) for task in others):
            os.sched_yield()
        child = os.fork()
        if child == 0:
            try:
                _native.sum_of_squares(workers, 4096, "bf16", 100000)
            except RuntimeError as error:
                told = "forked" in str(error)
            del workers
            gc.collect()
            own = _native.Workers(2, [])
            del own
            os._exit(0 if told else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_format": "bf16"}, "weight_format is .bf16. but must be one of bf16_split, fp32, fp16_master"),
        ({"grad_dtype": "float"}, "grad_dtype is .float. but must be one of bf16, fp16, fp32"),
        ({"isa": "sse"}, "isa is .sse. but must be one of"),
        ({"rule": "adagrad"}, "rule is .adagrad. but must be one of adamw"),
        ({"state_ptrs": [0, 4096]}, "state_ptrs is 0"),
        ({"state_ptrs": [4096, 4097]}, "state_ptrs is 4097"),
        ({"state_ptrs": [4096]}, "state_ptrs has 1 elements but the rule has 2"),
        ({"numbers": [1.0]}, "numbers has 1 elements but the rule has 10"),
        ({"scale_ptrs": [4096, 4096]}, "scale_ptrs has 2 elements but the rule has 0"),
        ({"step": 0}, "step is 0"),
    ],
)
def test_arguments_that_cannot_be(change, words):
    state_buffers = torch.zeros(64)
    fields = {
        "rule": "adamw",
        "weight_format": "fp32",
        "weight_ptr": state_buffers.data_ptr(),
        "remainder_ptr": 0,
        "state_ptrs": [state_buffers.data_ptr(), state_buffers.data_ptr()],
        "grad_ptr": state_buffers.data_ptr(),
        "grad_dtype": "fp32",
        "numel": 64,
        "numbers": [1.0] * 10,
    }
    with pytest.raises(ValueError, match=words):
        _native.update(_native.Workers(1, []), _native.UpdateCall(**(fields | change)))
