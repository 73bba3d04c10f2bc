"""Nothing hangs: the hand-over protocol under many schedules.

The classes of `ds_slide.runtime` themselves (window, lanes, futures, rings, caches, updates) are built by
`build_runtime` with two to ten blocks of 128 parameters, and driven by the calls that hooks and facade make. From
outside, `threading`, `queue`, `time` and `atexit` in the modules of the engine are replaced by stand-ins (`patching`),
the SSD store by one whose transfers complete in any order (`disk`), `torch.distributed` by collectives between the
ranks of one process (`collectives`), the counters of shared weights by operations of the scheduler (`weights`), the C++
update by three torch operations. Every thread is a greenlet, one runs at a time, and before each operation on something
shared a chooser says who goes on (`scheduler`, `strategies`). So a run is a list of choices, and can be repeated from
it.

A run fails when nothing can go on (the report names every thread, what it waits for, its stack and what stands in the
caches), when a thread raises or is left after the end, when ranks issue different collectives at one place of a group,
when memory changes while the disk reads it, or when the weights that were computed with, or the states at the end,
differ by a bit from the same training in host memory. Waits of less than five seconds are polls: they time out only
when nothing else can run, and what is then the same as before is a deadlock. Longer waits do not time out, nor do those
of a thread with "watchdog" in its name.

How schedules are searched:

* `explore_orders`: each lane (and the disk) the slowest of all, one schedule for each.
* `explore_by_chance`: random priorities of threads and transfers, with changes at random places (PCT), by seeds; every
  operation on a lock, event or queue is a point.
* `explore_all`: all schedules with at most so many departures from one order of the lanes, fewest first, or all there
  are. A state of the engine that was met before is not followed again (`state` says what a state is).

What the last one reduces by, and what it therefore does not show:

* Points lie before taking a lock, setting an event, putting into a queue, issuing a collective and where a transfer
  completes, nowhere between: a critical section is one step. That is enough if all that threads share is guarded by
  them; a data race between two operations is not seen.
* Locks that one thread takes, events that nobody asks without waiting and queues into which one thread puts are no
  points, as they can be swapped with whatever the others do. Which these are is learned; where a run shows another one
  to be shared, the exploration begins again.
* That a thread registers its wait (`Failures.waiting`) is no point either, except where the engine is closed under way
  (`locks` says why).
* Bits are compared where a schedule comes to its end, not where it meets a known state: the contents of memory are no
  part of a state.
* With a bound, only schedules within the bound. Without, only `configurations.EXHAUSTIVE`.

Not covered at all: CUDA streams and events (work on the device is over when its call returns, so what is explored are
the host's hand-overs), the C++ I/O engine and `SsdStore` itself (`tests/store`), the kernels, autograd and DeepSpeed
around the engine, a head whose rows are streamed, states on the GPU, checkpoint files, failing disks and lanes, killed
processes, the watchdog, the sockets and system calls under shared weights, and anything that takes more than the
blocks, buffers and steps of a configuration.

    python -m pytest tests/liveness -m "not slow"          the short part, also in the default run
    python -m pytest tests/liveness -m slow                each configuration for minutes
    PYTHONPATH=tests:. python -m liveness.table --out ...  a table of all

No configuration may hang on the present engine. On commit 6029051, before its waits were mended, the same tests find
ten that do; `test_mends` undoes the mends one by one.
To look at a finding again: `print(liveness.engine.replay(configuration, choices).labels)`, with the list of the report.
"""
