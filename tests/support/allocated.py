"""What an engine has really taken, entry by entry of its plan: found in its objects, and counted by what holds it.

Host memory is counted by the slabs and pools of `_native` that are alive, files by their sizes, and device memory,
which on the CPU accelerator is memory of torch, by storages.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_slide import _native
from ds_slide.compression.lsp.codec import Lsp
from ds_slide.plan import allocations as names
from ds_slide.plan.allocations import Allocation
from ds_slide.store.ssd.extents import PAGE, whole_pages
from ds_slide.store.way_back import SpareBuffers

SMALL = 1024
"""Bytes of a tensor that does not grow with the parameters, at most: norms and counters of each unit."""


class Counted:
    """The slabs and pools that were made since, and the storages that there were before."""

    def __init__(self) -> None:
        self._slabs: list[tuple[weakref.ref[Any], bool]] = []
        """And whether each is a part of a memory file."""
        self._pools: list[Any] = []
        self._before = storages()

    def slab(self, *arguments: Any) -> Any:
        made = SLAB(*arguments)
        self._slabs.append((weakref.ref(made), arguments[3:] not in ((), (None,))))
        return made

    def pool(self, *arguments: Any) -> Any:
        self._pools.append(POOL(*arguments))
        return self._pools[-1]

    def difference(self, engine: Any) -> list[str]:
        """What `engine`, just built, has taken otherwise than its plan has it: best empty."""
        runtime = engine.optimizer.runtime
        planned = {each.what: each for each in runtime.parts.plan.allocations}
        device, found = storages(), tensors_of(runtime)
        own = self._slab_bytes({each.data_ptr() for tensors in found.values() for each in tensors})
        problems = [f"{what}: in the engine, not in the plan" for what in found.keys() - planned.keys()]
        for what, tensors in found.items():
            sizes = [device.get(each.untyped_storage().data_ptr(), 0) for each in tensors if each.numel()]
            sizes = [own.get(each.data_ptr(), size) for each, size in zip(tensors, sizes, strict=False)]
            sizes = [sum(sizes)] if what.startswith(names.state_buffer_of("", "projectors")) else sizes
            problems += compare(planned[what], sizes, [own.get(each.data_ptr()) is not None for each in tensors])
        pooled = [planned[what] for what in runtime.parts.context.allocator.pools]
        made = Counter((each["buffers"], each["bytes"], each["pinned"]) for each in map(POOL.stats, self._pools))
        if made != Counter((each.count, each.nbytes, each.page_locked) for each in pooled):
            problems.append(f"pools of {made}, not of {pooled}")
        problems += self._on_ssd(runtime, planned)
        left = {what for what, each in planned.items() if each.nbytes and each.tier != "ssd"} - found.keys()
        left -= {*runtime.parts.context.allocator.pools.keys(), names.AVERAGED}  # tensors that come and go
        problems += [f"{what}: in the plan, not in the engine" for what in sorted(left)]
        # And nothing beside it.
        known = {each.untyped_storage().data_ptr() for tensors in found.values() for each in tensors}
        host = sum(each.nbytes for each in planned.values() if each.tier == "host" and each not in pooled)
        if sum(own.values()) != host:
            problems.append(f"slabs of {sum(own.values())} bytes, {host} in the plan")
        more = {pointer: size for pointer, size in device.items() if size > SMALL and pointer not in self._before}
        for pointer in more.keys() - known - self._others():
            problems.append(f"{more[pointer]} bytes of the device that the plan does not have")
        return problems

    def _slab_bytes(self, own: set[int]) -> dict[int, int]:
        """Of those that are alive, by address. `own`: of parts of memory files that this process has brought."""
        alive = [(slab, mapped) for made, mapped in self._slabs if (slab := made()) is not None]
        return {slab.ptr: slab.nbytes for slab, mapped in alive if slab.nbytes and (not mapped or slab.ptr in own)}

    def _others(self) -> set[int]:
        """Addresses of pooled buffers, and of what other ranks have brought."""
        mapped = {slab.ptr for made, mapped in self._slabs if mapped and (slab := made()) is not None}
        return mapped.union(*(each.addresses for each in self._pools))

    def _on_ssd(self, runtime: Any, planned: dict[str, Allocation]) -> Iterator[str]:
        entries = {what: each for what, each in planned.items() if each.tier == "ssd"}
        found = {}
        for unit in runtime.units:
            found.update(places_of(unit))
        for what in entries.keys() | found.keys():
            nbytes = entries[what].nbytes if what in entries else None
            if (nbytes or 0) != found.get(what, 0):
                yield f"{what}: {found.get(what)} bytes on SSD, {nbytes} in the plan"
        files = [] if runtime.parts.ssd is None else runtime.parts.ssd.store.files.descriptors
        # A page more than is ever written, by which a file that was cut is found.
        sizes = sum(os.stat(f"/proc/self/fd/{descriptor}").st_size - PAGE for descriptor in files)
        if sizes != sum(each.nbytes for each in entries.values()):
            yield f"state files of {sizes} bytes, not of {sum(each.nbytes for each in entries.values())}"


SLAB, POOL = _native.Slab, _native.Pool


@contextmanager
def counted() -> Iterator[Counted]:
    """Around `deepspeed.initialize`."""
    gc.collect()
    count = Counted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "Slab", count.slab)
        patch.setattr(_native, "Pool", count.pool)
        yield count


def compare(planned: Allocation, sizes: list[int], in_slabs: list[bool]) -> Iterator[str]:
    """Pieces of an entry as they were found."""
    if sizes != [planned.piece] * len(sizes) or (planned.nbytes and len(sizes) != planned.count):
        yield f"{planned.what}: pieces of {sizes} bytes, not {planned.count} of {planned.piece}"
    if planned.nbytes and (planned.tier == "host") != all(in_slabs):
        yield f"{planned.what} is not in the tier {planned.tier}"


def storages() -> dict[int, int]:
    """Bytes of each storage that a tensor has, by address."""
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.layout == torch.strided and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return {pointer: size for pointer, size in found.items() if size}


def tensors_of(runtime: Any) -> dict[str, list[torch.Tensor]]:
    """What the engine has, by the names that the plan has for it."""
    found: dict[str, list[torch.Tensor]] = {}
    parts, gradients = runtime.parts, runtime.parts.gradients
    for unit in runtime.units:
        home = unit.state if unit.home is None else unit.home
        for name, state_buffer in home.buffers.items():
            if state_buffer.tensor is not None:
                found[names.state_buffer_of(unit.name, name)] = [state_buffer.tensor]
        lends = (
            unit.spec.kind != "block" and parts.context.ranks.world_size == 1
        )  # its weights are those that modules read
        for name, state_buffer in unit.state.buffers.items() if unit.home is not None else ():
            if name != "weight" or not lends:
                found[names.promoted_buffer_of(unit.name, name)] = [state_buffer.tensor]
        if unit.gradient.gpu_sum is not None:
            found[names.gpu_sum_of(unit.name)] = [unit.gradient.gpu_sum]
        own = unit.state.buffers["weight"].tensor
        if isinstance(unit.way_back, SpareBuffers):
            for name, buffer in unit.way_back.spare.items():
                found[names.spare_buffer_of(unit.name, name)] = [buffer.tensor]
        elif (log := unit.way_back) is not None:
            first = log.new_weight if log.new_weight is not None else log.low[0] if log.low else log.old.weight
            found[names.undo_log_of(unit.name)] = [first]
        if isinstance(unit.codec, Lsp):
            found[names.state_buffer_of(unit.name, "projectors")] = list(_projectors(unit.codec))
            found[names.COMPRESSING], found[names.CHANGES] = [unit.codec.encoding], [unit.codec.applying]
            continue
        if unit.resident is not None and (unit.resident is not own or (unit.home is not None and lends)):
            found[names.whole_weights_of(unit.name)] = [unit.resident]
    found[names.SLOTS] = [] if parts.window is None else [slot.buffer for slot in parts.window.slots]
    found[names.STAGED] = [staging.packed for staging in gradients._stagings]
    if parts.context.ranks.world_size > 1:
        found[names.STAGED_PARTS] = [staging.own for staging in gradients._stagings]
    for what, scratch in ((names.GATHERED, parts.gathers.scratch), (names.UPLOADED, parts.uploads._scratch)):
        if scratch is not None:
            found[what] = [scratch]
    if parts.experts is not None:
        found[names.EXPERTS] = list(parts.experts.buffers)
    if runtime.rows is not None:
        buffers = runtime.rows._buffers
        found[names.rows_of(runtime.rows.unit.name)] = list(buffers.weights)
        if buffers.gradients:
            found[names.row_gradients_of(runtime.rows.unit.name)] = list(buffers.gradients)
    if parts.ssd is not None and parts.ssd.store._sums is not None:
        found[names.CHECKSUMS] = [table for _, table in parts.ssd.store._sums._tables]
    return found


def _projectors(codec: Lsp) -> Iterator[torch.Tensor]:
    for group in codec.groups:
        for side in (group.left, group.right):
            yield from (side.indices, side.values, side.starts, side.entries)


def places_of(unit: Any) -> dict[str, int]:
    """Bytes on SSD, by name. The state buffers of a chunk, each in whole pages, make up the chunk."""
    found, first, end = {}, [], []
    for name, state_buffer in (unit.home or unit.state).buffers.items():
        if state_buffer.tier != "ssd":
            continue
        found[names.state_buffer_of(unit.name, name)] = state_buffer.numel * state_buffer.dtype.itemsize
        first.append(state_buffer.offsets[0])
        last = state_buffer.numel - (len(state_buffer.offsets) - 1) * state_buffer.per_piece
        end.append(state_buffer.offsets[-1] + whole_pages(last * state_buffer.dtype.itemsize))
    if found:
        found[names.state_buffer_of(unit.name, "padding")] = max(end) - min(first) - sum(found.values())
    return found
