"""What each rank of a host gets: alone, together with all others, and its copies beside each other rank.

Each rank is a process, with a GPU of its own or, on the CPU accelerator, with its share of the cores. All of them meet
at a barrier before each measurement, and then work for the same time. So a rank works for at most one round beside
ranks that have ended.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError

import torch

from ds_slide.cli.doctor.measuring import CPU, CPU_SHAPE, Copy, Link, copy_rate, product_rate, updates
from ds_slide.errors import SlideError
from ds_slide.plan.cores import GpuPlace, Seat, Share, as_list, gpu_bus_id, memory_nodes, share_of
from ds_slide.plan.kept_ceilings import gpu_computes
from ds_slide.plan.rank_ceilings import PairOfRanks, RankRates, RanksCeilings
from ds_slide.runtime.updates.threads import running_on, update_cores
from ds_slide.store.directories.run_files import RunFiles
from ds_slide.store.ssd.bandwidth import mixed_load

WINDOW_S = 0.3
"""Seconds of each measurement, which ends with the round that fills them. A round of copies takes 10 ms on PCIe 5."""
PATIENCE_S = 120
"""Limit for each wait for the others. The longest is for a rank that imports torch and makes its buffers."""

_Lanes = Mapping[str, Callable[[], float]]
"""Measurements by the name of their field in RankRates, or by the path of a disk."""


@dataclass(frozen=True)
class _Found:
    """What one rank has measured. `beside`: its copies beside each other rank, as a part of their rate alone."""

    alone: RankRates
    together: RankRates
    beside: dict[int, float]


def measure_ranks(ranks: int, paths: Sequence[Path]) -> RanksCeilings:
    """Measure `ranks` ranks, at most one for each GPU. `paths`: directories on the disks for states. Raises SlideError,
    with a reason that is part of a sentence, where a rank fails."""
    on_gpu = gpu_computes()
    torch.cuda.empty_cache()
    bus_ids = [gpu_bus_id(rank) if on_gpu else None for rank in range(ranks)]
    places = [GpuPlace() if bus_id is None else GpuPlace.of(bus_id) for bus_id in bus_ids]
    seats = [Seat.of_this_process(place.node) for place in places]
    shares = [share_of(rank, seats, memory_nodes()) for rank in range(ranks)]
    found = _in_processes([_Rank(rank, ranks, share, on_gpu, paths) for rank, share in enumerate(shares)])
    return RanksCeilings(
        alone=tuple(each.alone for each in found),
        together=tuple(each.together for each in found),
        places=tuple(_told(place, share) for place, share in zip(places, shares, strict=True)),
        pairs=tuple(
            PairOfRanks(ranks=(one, other), kept=min(found[one].beside[other], found[other].beside[one]))
            for one, other in itertools.combinations(range(ranks), 2)
        ),
    )


def _told(place: GpuPlace, share: Share) -> str:
    node = "" if place.node is None else f"GPU at memory node {place.node}, "
    port = "" if place.port is None else f"PCIe port {place.port}, "
    return f"{node}{port}cores {as_list(share.cores)}"


# ----------------------------------------------------------------------------------------------------------------------
# The processes.


def _in_processes(ranks: Sequence[_Rank]) -> list[_Found]:
    """Return what ranks have measured at the same time, in a process each. Raises SlideError where one fails."""
    context: SpawnContext = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
    barrier = context.Barrier(len(ranks))
    # Each rank waits for all others before it ends, so no process has two.
    with ProcessPoolExecutor(len(ranks), mp_context=context, initializer=_take, initargs=(barrier,)) as pool:
        running = [pool.submit(_measure, each) for each in ranks]
        failures = [(rank, error) for rank, each in enumerate(running) if (error := each.exception()) is not None]
    if failures:
        # A rank that fails breaks the barrier for the others.
        rank, error = min(failures, key=lambda each: isinstance(each[1], BrokenBarrierError))
        if isinstance(error, BrokenProcessPool):  # which does not tell whose process it was
            raise SlideError("the process of a rank was ended, perhaps because memory is short") from error
        raise SlideError(f"rank {rank}: {' '.join(str(error).split()) or type(error).__name__}") from error
    return [each.result() for each in running]


_meeting: Barrier
"""The barrier of a process of a rank."""


def _take(barrier: Barrier) -> None:
    global _meeting
    _meeting = barrier


def _measure(rank: _Rank) -> _Found:
    try:
        return rank.measure()
    except BaseException:
        _meeting.abort()  # or the others would wait for this rank
        raise


def _meet() -> None:
    _meeting.wait(PATIENCE_S)


# ----------------------------------------------------------------------------------------------------------------------
# One rank.


@dataclass(frozen=True)
class _Rank:
    """A rank with lanes like those of an engine on the same cores. `paths`: as of `measure_ranks`."""

    rank: int
    ranks: int
    share: Share
    on_gpu: bool
    paths: Sequence[Path]

    def measure(self) -> _Found:
        # Where there are more ranks than cores, all have the same cores.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.ranks))
        with ExitStack() as stack:
            stack.enter_context(running_on(self.share.around))
            lanes = self._lanes(stack)
            alone = dict.fromkeys(lanes, 0.0)
            for turn in range(self.ranks):
                _meet()
                if turn == self.rank:
                    alone = {name: measure() for name, measure in lanes.items()}
            together = {}
            for name, measure in lanes.items():
                _meet()
                together[name] = measure()
            link = next(iter(lanes))
            beside = {}
            for pair in itertools.combinations(range(self.ranks), 2):
                _meet()
                if self.rank in pair:
                    beside[sum(pair) - self.rank] = min(1.0, lanes[link]() / alone[link])
            _meet()
        return _Found(self._rates(alone), self._rates(together), beside)

    def _lanes(self, stack: ExitStack) -> _Lanes:
        """Return the measurements, copies first. Their memory and files are there until `stack` is closed."""
        lanes: dict[str, Callable[[], float]] = {}
        if self.on_gpu:
            torch.cuda.set_device(self.rank)
            link = Link(torch.device("cuda", self.rank))
            lanes["h2d_gb_s"] = partial(copy_rate, link.up, least_s=WINDOW_S)
            lanes["d2h_gb_s"] = partial(copy_rate, link.down, least_s=WINDOW_S)
            lanes["both_ways_gb_s"] = partial(copy_rate, link.up, link.down, least_s=WINDOW_S)
        else:
            copy = Copy.in_host_memory()
            lanes["copy_gb_s"] = lambda: 2 * copy_rate(copy, least_s=WINDOW_S)
            lanes["product_tflop_s"] = partial(product_rate, CPU_SHAPE, CPU, WINDOW_S)
        threads, cores = update_cores("auto", "auto", self.share.cores)
        updated = stack.enter_context(updates(threads, cores, self.ranks))
        lanes["update_gb_s"] = partial(updated.rate, WINDOW_S)
        for path in self.paths:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="ds_slide-", dir=path))
            load = stack.enter_context(mixed_load(RunFiles(Path(own), json_path="--path"), "auto"))
            lanes[str(path)] = partial(_in_gb_s, load)
        for warm_up in lanes.values():
            warm_up()
        return lanes

    def _rates(self, found: Mapping[str, float]) -> RankRates:
        disks = {str(path): found[str(path)] for path in self.paths}
        return RankRates(disks_gb_s=disks, **{name: rate for name, rate in found.items() if name not in disks})


def _in_gb_s(rate: Callable[[], float]) -> float:
    return rate() / 1e9
