"""States on SSD under random programs: whatever is called between two steps, and however slow the disk, the bits are
those of a run in memory, and nothing waits for ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from harness import VOCABULARY, Result, batches, differences, ds_config, engine_for, states_of
from tight_memory import room_for_gradients_of
from torch import nn

from ds_slide.runtime.core.lanes import Delay
from ds_slide.store.ssd.unit import OnSsd

WIDTH = 32
SECONDS = 120.0
MOMENTS = ("exp_avg", "exp_avg_sq")
Operation = tuple[Any, ...]

pytestmark = pytest.mark.usefixtures("one_rank")


class Block(nn.Module):
    """4288 parameters: two or three chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, fail: str = "") -> torch.Tensor:
        y = self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        if fail == "forward":
            raise KeyError("the forward failed")
        if fail == "backward":
            y.register_hook(_fail)
        return x + y


def _fail(_: torch.Tensor) -> None:
    raise KeyError("the backward failed")


class Toy(nn.Module):
    """Blocks called in any order, some of them not at all; the last call fails where it is to."""

    def __init__(self, count: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, order: Sequence[int], fail: str = ""
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for place, index in enumerate(order):
            x = self.blocks[index](x, fail=fail if place == len(order) - 1 else "")
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


class Case:
    """A model, a config and a program, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.count = pick([3, 4, 6])
        self.tied = pick([True, False, False])
        self.clip = pick([1.0, 1.0, 0.0])
        self.accumulation = pick([1, 1, 2, 3])
        self.frozen = [i for i in range(self.count) if self.random.random() < 0.3] if pick([True, False]) else []
        self.devices = pick([("nvme", "nvme")] * 4 + [("cpu", "nvme"), ("nvme", "cpu")])
        self.chunk_numel = pick([2048, 4096])
        self.disk_ms = pick([0.0, 1.0, 4.0])
        self.window = pick([2, 3, 4])
        self.slide = {
            "ssd_buffers": pick([2, 3, 4, 5]),
            "weight_buffers": pick([2, 3, 4, 5, 6, 7]),
            "host_memory": pick([0, 0, 0, 300_000, 600_000]),
            "io_backend": pick(["io_uring", "libaio", "threads"]),
            "debug": {"lane_delay_ms": pick([0.0, 1.0, 3.0]), "seed": seed},
        }
        self.held = self.clip > 0 or self.accumulation > 1
        self.program = [operation for _ in range(5) for operation in self._step()]
        self.room: int | None = None
        """Of how many blocks host memory takes the held gradients; None: of all."""

    def spilling(self) -> Case:
        """The same, with held gradients on SSD as far as it has any."""
        if self.held and self.devices[1] == "nvme":
            self.room = 0
            self.slide["gradient_buffers"] = 2  # with many, memory takes as many gradients
        return self

    def _step(self) -> Iterator[Operation]:
        pick = self.random.choice
        for _ in range(self.accumulation):
            if (chance := self.random.random()) < 0.1:
                yield "fail", self._order(), "backward" if self.held and chance < 0.05 else "forward"
            yield "train", self._order(), self._name() if self.held and self.random.random() < 0.2 else None
        for _ in range(pick([0, 0, 1, 2])):
            kind = pick(["master", "moments", "moments", "gather", "evaluate", "save", "load", "zero_grad", "states"])
            yield kind, self._order(), self._name()

    def _name(self) -> str:
        matrix = self.random.choice(["inner.weight", "outer.weight", "norm.weight"])
        return f"blocks.{self.random.randrange(self.count)}.{matrix}"

    def _order(self) -> list[int]:
        chance, everyone = self.random.random(), list(range(self.count))
        if chance < 0.5:
            return everyone
        order = [i for i in everyone if self.random.random() < 0.6] or [0]
        if chance > 0.85:
            self.random.shuffle(order)
        return [*order, self.random.choice(order)] if chance > 0.93 and self.held else order

    def model(self) -> Toy:
        torch.manual_seed(0)
        model = Toy(self.count, self.tied)
        for index in self.frozen:
            model.blocks[index].requires_grad_(False)
        return model


@contextmanager
def time_limit(engine: Any, where: list[Any]) -> Iterator[None]:
    """Whoever waits for longer gets an error, which says where the program was."""

    def stop() -> None:
        engine.optimizer.runtime.parts.context.failures.record("test", TimeoutError(f"nothing moved in {where[-1:]}"))

    timer = threading.Timer(SECONDS, stop)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(case: Case, config: dict[str, Any], folder: Path) -> Result:
    """What the program read, under the names of the results, and the states at its end."""
    result, where, model = Result(), [], case.model()
    parameters, data, is_saved = dict(model.named_parameters()), iter(batches(100, length=8)), False
    with engine_for(model, config) as engine, time_limit(engine, where):
        for number, (kind, order, extra) in enumerate(case.program):
            where.append((number, kind, order, extra))
            batch, read = next(data), result.states.setdefault(f"operation {number}", {})
            if kind == "train":
                loss = engine(**batch, order=order)
                engine.backward(loss)
                if extra is not None and (gradient := safe_get_full_grad(parameters[extra])) is not None:
                    read["gradient"] = gradient.clone()
                engine.step()
                result.losses.append(loss.item())
            elif kind == "fail":
                if extra == "backward" and order[-1] in case.frozen:
                    continue
                with pytest.raises(KeyError):
                    engine.backward(engine(**batch, order=order, fail=extra))
            elif kind == "evaluate":
                engine.eval()
                with torch.no_grad():
                    result.losses.append(engine(**batch, order=order).item())
                engine.train()
            elif kind == "save":
                engine.save_checkpoint(str(folder), tag="last")
                is_saved = True
            elif kind == "load" and is_saved:
                engine.load_checkpoint(str(folder), tag="last")
            elif kind == "zero_grad":
                engine.optimizer.zero_grad()
            elif kind == "states":
                result.states |= {f"{number} {name}": state for name, state in states_of(model).items()}
            elif kind == "gather":
                with deepspeed.zero.GatheredParameters([parameters[extra]], modifier_rank=0):
                    parameters[extra].data.mul_(1.125)
            elif kind in ("master", "moment", "moments") and parameters[extra].requires_grad:
                change(parameters[extra], kind)
        where.append("the states at the end")
        result.states |= states_of(model)
    return result


def change(parameter: nn.Parameter, kind: str) -> None:
    if kind == "master":
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 1.25)
        return
    for key in MOMENTS if kind == "moments" else MOMENTS[:1]:
        value = safe_get_full_optimizer_state(parameter, key) * 0.5 + 1e-4
        safe_set_full_optimizer_state(parameter, value, key)


Compare = Callable[..., list[str]]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Names of what differs between a case in memory and on SSD. `must_spill`: whether held gradients have to be there,
    None if it does not matter. `more`: of the config, in both."""

    def make(case: Case, must_spill: bool | None = False, **more: Any) -> list[str]:
        monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", case.chunk_numel)
        monkeypatch.setattr("ds_slide.runtime.ssd.space.Delay", lambda _, seed: Delay(case.disk_ms, seed))
        results = []
        for on_ssd in (False, True):
            slide = {"window": case.window, **(case.slide if on_ssd else {})}
            config = ds_config(slide, clip=case.clip, accumulation=case.accumulation, **more)
            for section, device in zip(("offload_param", "offload_optimizer"), case.devices, strict=True):
                if on_ssd:
                    config["zero_optimization"][section] = {"device": device, "nvme_path": str(tmp_path)}
            with room_for_gradients_of(case.room) as plan:
                results.append(run(case, config, tmp_path / f"checkpoint-{on_ssd}"))
        assert must_spill is None or bool(plan().placement.gradients_on_ssd) == must_spill
        return differences(*results)

    return make


@pytest.mark.parametrize("seed", [2, 3, 11])
def test_random_programs(compare: Compare, seed: int) -> None:
    assert compare(Case(seed)) == []


@pytest.mark.parametrize("seed", [16, 152, 237])
def test_random_programs_with_gradients_on_ssd(compare: Compare, seed: int) -> None:
    assert compare(Case(seed).spilling(), must_spill=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_programs(compare: Compare, seed: int) -> None:
    assert compare(Case(seed).spilling() if seed % 2 else Case(seed), must_spill=None) == []


def case_of(program: list[Operation], **settings: Any) -> Case:
    """A plain case: six blocks, all states on SSD."""
    case = Case(0)
    plain = {"count": 6, "tied": False, "clip": 1.0, "accumulation": 1, "frozen": [], "devices": ("nvme", "nvme")}
    plain |= {"held": True}
    slide = {"host_memory": 0, "ssd_buffers": 4, "weight_buffers": 3}
    for name, value in (plain | {"window": 2, "disk_ms": 0.0, "slide": slide} | settings).items():
        setattr(case, name, value)
    case.program = program
    return case


def test_moments_that_are_written_are_not_read_ahead_before(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk begins to read for the next step at any time, also while somebody writes a moment."""
    caches: list[Any] = []
    write = OnSsd.write

    def remember(cache: Any) -> None:
        caches.append(cache)

    def write_late(state_buffer: OnSsd, items: slice, values: torch.Tensor) -> None:
        if caches:  # the updates of the other blocks end, and the disk has read ahead whatever it can
            cache = caches[-1]
            with cache._changed:
                cache._changed.wait_for(
                    lambda: not cache._demands and all(entry.idle for entry in cache._entries.values()), SECONDS
                )
        write(state_buffer, items, values)

    monkeypatch.setattr("ds_slide.runtime.ssd.buffers.BufferCache.read_ahead", remember)
    monkeypatch.setattr(OnSsd, "write", write_late)
    train, change_one = ("train", list(range(6)), None), ("moment", [], "embed.weight")
    # Fewer buffers than the embedding has chunks: when its update has ended the first of them have left.
    slide = {"host_memory": 0, "ssd_buffers": 2, "weight_buffers": 3}
    assert compare(case_of([train, change_one] * 3, disk_ms=1.0, chunk_numel=2048, slide=slide)) == []


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("accumulation", "spill"), [(2, False), (2, True), (1, True)])
def test_a_block_that_is_unused_while_its_last_update_waits_for_the_disk(
    compare: Compare, accumulation: int, spill: bool
) -> None:
    """Its zero gradient arrives, to be added up in fp32 or to be written to SSD, before the disk has brought the states
    for the update."""
    full, little = ("train", list(range(6)), None), ("train", [0], None)
    more = {"data_types": {"grad_accum_dtype": "fp32"}} if accumulation > 1 else {}
    case = case_of([full, full] + [little] * 4, accumulation=accumulation, disk_ms=8.0)
    assert compare(case.spilling() if spill else case, must_spill=spill, **more) == []
