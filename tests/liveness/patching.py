"""Puts the stand-ins into the modules of the engine, from outside, and takes them out again."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed

import ds_slide.report
import ds_slide.runtime
import ds_slide.store
from ds_slide import _native
from ds_slide.optim.cpu import NOTHING_BESIDE, Beside
from ds_slide.optim.rule import Elements, Part
from ds_slide.runtime.core.context import AS_THEY_ARE
from liveness import stand_ins, weights
from liveness.disk import Disk

ENGINE = (ds_slide.runtime, ds_slide.store, ds_slide.report)


def engine_modules() -> list[Any]:
    """All modules of the engine that have threads, imported."""
    for package in ENGINE:
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(found.name)
    prefixes = tuple(package.__name__ for package in ENGINE)
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(prefixes)]


class Updater:
    """Instead of the C++ kernels on threads of their own, which take most of the time of a tiny run: an update that
    depends on all it is given, and on the order of updates."""

    num_threads = 1

    def __init__(self, *_args: Any, idle: bool = False, **_kwargs: Any) -> None:
        self._has_threads = not idle
        self._logs: dict[int, list[torch.Tensor]] = {}

    def end_threads(self) -> None:
        self._has_threads = False

    def update_(
        self,
        elements: Elements,
        hyper: Any,
        grad_scale: float = 1.0,
        *,
        part: Part = "whole",
        beside: Beside = NOTHING_BESIDE,
    ) -> None:
        assert self._has_threads
        (weight, remainder, states, grad, *_), (new_weight, *_, slices) = elements, beside
        exp_avg, exp_avg_sq = states
        written = [each for each in (weight, remainder, *states) if each is not None]
        if part == "rest":
            return
        if part == "back":
            assert slices is not None
            for each, old in zip(written, self._logs.pop(slices.data_ptr()), strict=True):
                each.copy_(old)
            return
        if part == "with_log":
            assert slices is not None
            self._logs[slices.data_ptr()] = [each.clone() for each in written]
        if new_weight is not None:
            weight = new_weight.copy_(weight)
        new = exp_avg.mul(0.9).add_(grad, alpha=grad_scale)
        if part != "states":
            weight.sub_(new, alpha=0.01 * hyper.step)
            if remainder is not None:
                remainder.mul_(3).add_(hyper.step)
        if part != "weights":
            exp_avg.copy_(new)
            exp_avg_sq.mul_(0.5).addcmul_(exp_avg, exp_avg)

    def copy_(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert self._has_threads
        dst.copy_(src)

    def accumulate_(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert self._has_threads
        dst.add_(src)

    def sum_of_squares(self, tensor: torch.Tensor) -> float:
        assert self._has_threads
        return float(tensor.double().square().sum())


class Replaceable:
    """What a run may set: `Disk` with its arguments, and the collectives."""

    def __init__(self) -> None:
        self.make_disk: Callable[..., Any] = Disk
        self.collectives: Any = torch.distributed

    def store(self, *args: Any, **kwargs: Any) -> Any:
        return self.make_disk(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collectives, name)


@contextmanager
def patched_engine() -> Iterator[Replaceable]:
    """Threads, queues, clocks, the store and collectives of the engine are those of this package."""
    replaceable = Replaceable()
    replaced = {
        id(stand_ins.real_threading): stand_ins.threading,
        id(stand_ins.real_queue): stand_ins.queue,
        id(stand_ins.real_time): stand_ins.time,
        id(stand_ins.real_atexit): stand_ins.atexit,
        id(torch.distributed): replaceable,
        # Of the thread that all greenlets share: it would be left by one while another is inside.
        id(AS_THEY_ARE): nullcontext,
    }
    # For modules that import names: `from threading import Event`.
    for real, fake in (
        (stand_ins.real_threading, stand_ins.threading),
        (stand_ins.real_queue, stand_ins.queue),
        (stand_ins.real_time, stand_ins.time),
    ):
        for name, value in vars(fake).items():
            if not name.startswith("_") and hasattr(real, name):
                replaced[id(getattr(real, name))] = value
    with pytest.MonkeyPatch.context() as patch:
        if weights.HAS_SHARED_WEIGHTS:
            patch.setattr(_native, "Generations", weights.Generations)
            patch.setattr("ds_slide.runtime.core.ranks.shared_weights.map_bytes", weights.file_of)
            patch.setattr("ds_slide.runtime.core.ranks.board.map_bytes", weights.file_of)
            patch.setattr("ds_slide.runtime.core.ranks.board.share", weights.sharing_of)
        for module in engine_modules():
            statistics = module.__name__.startswith("ds_slide.report")
            for name, value in list(vars(module).items()):
                if name == "SsdStore" and module.__name__.startswith("ds_slide.runtime"):
                    patch.setattr(module, name, replaceable.store)
                elif name == "CpuUpdater":
                    patch.setattr(module, name, Updater)
                elif id(value) in replaced:
                    stand_in = replaced[id(value)]
                    quiet = statistics and value is stand_ins.real_threading
                    patch.setattr(module, name, stand_ins.quiet_threading if quiet else stand_in)
        yield replaceable
