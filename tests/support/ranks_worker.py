"""One rank of `test_ranks`: trains in several ways and writes what came out to a file.

python ranks_worker.py FOLDER NAME...
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_ranks
from activation_runs import INPUT, handle_of
from harness import Batch, batches, causal_loss, ds_config, llama, on_ssd, trained
from moving import RandomMoves, RandomSums
from tight_memory import room_for_gradients_of
from tiled import tiled

from ds_slide.integration import assemble
from ds_slide.plan import ssd_settings
from ds_slide.plan.memory import Budgets
from ds_slide.plan.step_model import Step
from ds_slide.runtime.core.ranks.conductor import Conductor, Entry
from ds_slide.runtime.memory import spare_memory

STEPS, BLOCKS = 4, 4
LESS_MEMORY = 1_300_000
RUNS = {
    "clipping": ({"window": 2}, {"clip": 1.0}),
    "immediate": ({"window": 2}, {"clip": 0.0}),
    "immediate-gpu-states": ({"window": 2, "gpu_states": 600_000}, {"clip": 0.0}),
    "accumulation": ({"window": 2}, {"clip": 1.0, "accumulation": 2}),
    "sums": (
        {"window": 3, "update_passes": 2, "debug": {"lane_delay_ms": 2.0, "seed": 6}},
        {"clip": 1.0, "accumulation": 2},
    ),
    "sums-gathered": ({"window": 2, "share_weights": False}, {"clip": 1.0, "accumulation": 2}),
    "delays": ({"window": 3, "debug": {"lane_delay_ms": 3.0, "seed": 5}}, {"clip": 1.0}),
    "speculative": ({"window": 2, "speculate": True, "debug": {"lane_delay_ms": 2.0, "seed": 7}}, {"clip": 1.9}),
    "speculative-gathered": (
        {"window": 2, "share_weights": False, "speculate": True, "debug": {"take_back": 0.3}},
        {"clip": 1.9},
    ),
    "speculative-by-one": (
        {"window": 9, "share_weights": False, "speculate": True},
        {"clip": 1.9},
    ),
    "held": ({"window": 2, "speculate": False}, {"clip": 1.9}),
    "gpu-states": ({"window": 2, "gpu_states": 900_000}, {"clip": 1.0}),
    "ssd": ({"window": 2, "host_memory": 0, "debug": {"lane_delay_ms": 2.0, "seed": 9}}, {"clip": 1.0}),
    "ssd-immediate": ({"window": 2, "host_memory": 0, "ssd_buffers": 2, "weight_buffers": 3}, {"clip": 0.0}),
    "ssd-gradients": ({"window": 2, "gradient_buffers": 2, "debug": {"lane_delay_ms": 2.0, "seed": 11}}, {"clip": 1.0}),
    "gathered": ({"window": 2, "share_weights": False}, {"clip": 1.0}),
    "gathered-immediate": (
        {"window": 2, "share_weights": False, "debug": {"lane_delay_ms": 2.0, "seed": 13}},
        {"clip": 0.0},
    ),
    "gathered-kept": ({"window": 9, "share_weights": False}, {"clip": 1.0, "accumulation": 2}),
    "gathered-gpu-states": ({"window": 2, "gpu_states": 600_000, "share_weights": False}, {"clip": 0.0}),
    "ssd-states": ({"window": 2, "host_memory": 350_000, "share_weights": True}, {"clip": 1.0}),
    "ssd-less-memory": ({"window": 2}, {"clip": 1.0}),
    "moves": ({"window": 2, "debug": {"lane_delay_ms": 2.0, "seed": 15}}, {"clip": 1.0}),
    "moves-immediate": ({"window": 2, "gpu_states": 600_000}, {"clip": 0.0}),
    "moves-gathered": ({"window": 2, "share_weights": False}, {"clip": 1.0, "accumulation": 2}),
    "moves-gathered-kept": ({"window": 9, "share_weights": False}, {"clip": 0.0}),
    "moves-ssd": ({"window": 2, "host_memory": 350_000, "share_weights": True}, {"clip": 1.0}),
    "moves-ssd-immediate": (
        {"window": 2, "host_memory": 0, "debug": {"lane_delay_ms": 2.0, "seed": 19}},
        {"clip": 0.0},
    ),
    "spare": ({"window": 2, "gpu_memory": "4MiB"}, {"clip": 1.0}),
    "spare-gathered": ({"window": 2, "gpu_memory": "4MiB", "share_weights": False}, {"clip": 0.0}),
    "ssd-inputs": (
        {"window": 2, "host_memory": 0, "gpu_memory": "4MiB", "debug": {"lane_delay_ms": 2.0, "seed": 17}},
        {"clip": 1.0},
    ),
    "tiled": ({"window": 2}, {"clip": 1.0}),
    "stock": (None, {"clip": 1.0}),
}
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast", "all_gather_object")


@contextlib.contextmanager
def host_memory(nbytes: int | None) -> Iterator[None]:
    """What this rank finds free, beside what the accelerator computes in, as on a GPU. None: all that there is."""
    find = assemble._budgets

    def found(*given: Any) -> Budgets:
        budgets = dataclasses.replace(find(*given), gpu_is_own=True)
        return budgets if nbytes is None else dataclasses.replace(budgets, host_free=nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "_budgets", found)
        yield


def threads_by_collective() -> dict[str, set[str]]:
    """From here on, the names of the threads that call each of `COLLECTIVES`."""
    callers: dict[str, set[str]] = defaultdict(set)

    def recorded(name: str, call: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            callers[name].add(threading.current_thread().name)
            return call(*args, **kwargs)

        return record

    for name in COLLECTIVES:
        setattr(dist, name, recorded(name, getattr(dist, name)))
    return callers


class Watched:
    """`causal_loss`, preceded by an evaluation of `batch` that the other rank does not do, and by a look at how weights
    are transferred."""

    def __init__(self, batch: Batch, evaluates: bool) -> None:
        self._batch = batch if evaluates else None

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        runtime = getattr(engine.optimizer, "runtime", None)
        if runtime is not None:
            shares = engine.config["ds_slide"].get("share_weights", True)
            assert (runtime.parts.context.shared is not None) == shares
            gathered = {unit.order for unit in runtime.units if unit.is_gathered}
            others = {u.order for u in runtime.units if u.state.buffers["weight"].tier == "host"}
            assert not gathered & others if shares else gathered
        if self._batch is not None:
            with torch.no_grad():
                engine.module(**self._batch)
        return causal_loss(engine, batch)


class Anew:
    """`causal_loss` after a backward that is dropped, with updates ahead on one rank alone: which rank does them is its
    own affair."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        engine.optimizer.runtime.parts.updating.speculating._wanted = self._rank == 0
        engine.backward(causal_loss(engine, batch))
        engine.optimizer.zero_grad()
        return causal_loss(engine, batch)


class Sharing:
    """`causal_loss` of a model that checkpoints its blocks, and what spare memory is used for by then."""

    def __init__(self, *, reentrant: bool) -> None:
        self._form = {"use_reentrant": reentrant}
        self.promoted = self.kept = 0

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self._form)
        loss = causal_loss(engine, batch)
        parts = engine.optimizer.runtime.parts
        self.promoted, self.kept = len(parts.plan.placement.promoted), parts.spare.activations.statistics["keep"]
        return loss


class Moving:
    """`causal_loss`, and how many bytes of inputs of blocks it has sent to SSD."""

    moved = 0

    def __call__(self, engine: Any, batch: Batch) -> torch.Tensor:
        loss = causal_loss(engine, batch)
        self.moved = engine.optimizer.runtime.parts.spare.activations.statistics["moved_to_ssd_bytes"]
        return loss


def entries_of_rank_0() -> list[str]:
    """What rank 0 enters into the log from now on: "UNIT", "ORDER", "END"."""
    entries: list[str] = []
    append = Conductor.append

    def noted(conductor: Conductor, entry: Entry) -> None:
        entries.append(entry.kind.name)
        append(conductor, entry)

    Conductor.append = noted  # type: ignore[method-assign]
    return entries


def ends_of_backwards() -> list[bool]:
    """Of each backward that has ended by the log of rank 0, whether it was settled, from now on."""
    ends: list[bool] = []
    close = Conductor._close

    def noted(conductor: Conductor, member: Any, *, settled: bool = False) -> None:
        ends.append(settled)
        close(conductor, member, settled=settled)

    Conductor._close = noted  # type: ignore[method-assign]
    return ends


def main(rank: int, folder: Path) -> None:
    ssd_settings.CHUNK_NUMEL = 4096  # several chunks a block
    # Spare memory goes to states: which of the lanes stands still is a matter of chance here.
    spare_memory._measured = lambda *_: Step("deferred", 2.0, {"compute": 1.0, "update": 0.5})
    with two_ranks.as_rank(rank, folder) as results:
        callers = threads_by_collective()
        ends, settled = ends_of_backwards(), results.setdefault("settled", {})
        entries, entered = entries_of_rank_0(), results.setdefault("entered", {})
        for name in sys.argv[2:]:
            slide, settings = RUNS[name]
            data = batches(2 * STEPS * settings.get("accumulation", 1))
            # Every rank draws other weights: rank 0's have to win.
            config = ds_config(slide, **settings)
            if "ssd" in name:
                on_ssd(config, folder / "disk")
            found = LESS_MEMORY if name == "ssd-less-memory" and rank == 1 else None
            with (
                room_for_gradients_of(1 if name == "ssd-gradients" else None) as plan,
                host_memory(found),
                pytest.MonkeyPatch.context() as patch,
            ):
                evaluates = name in ("clipping", "immediate") and rank == 1
                loss_of: Any = RandomMoves() if name.startswith("moves") else Watched(data[0], evaluates)
                if name.startswith("sums"):
                    loss_of = RandomSums()
                if name == "speculative-by-one":
                    loss_of = Anew(rank)
                if name.startswith("spare"):
                    loss_of = Sharing(reentrant=name == "spare")
                if name == "ssd-inputs":
                    handle_of(patch)(0, 2 + rank)  # each for itself
                    loss_of = Moving()
                model = llama(seed=rank, num_hidden_layers=BLOCKS)
                model = tiled(model) if name == "tiled" else model
                result = trained(model, config, data[rank::2], loss_of=loss_of)
            assert not isinstance(loss_of, Sharing) or (loss_of.promoted and loss_of.kept)
            assert not isinstance(loss_of, Moving) or loss_of.moved == (2 + rank) * INPUT
            assert not isinstance(loss_of, RandomMoves) or any(made.demoted for made in loss_of.made if made)
            assert not isinstance(loss_of, RandomSums) or any(loss_of.made)
            if name.startswith("speculative"):
                assert plan().placement.undo_logs
            assert slide is None or bool(plan().placement.gradients_on_ssd) == (name == "ssd-gradients")
            assert name != "ssd-less-memory" or plan().placement.chunks_on_ssd
            results[name] = {"losses": result.losses, "norms": result.norms, "states": result.states}
            settled[name], ends[:] = list(ends), []
            entered[name], entries[:] = list(entries), []
        results["callers"] = dict(callers)


if __name__ == "__main__":
    two_ranks.fork_ranks(main)
