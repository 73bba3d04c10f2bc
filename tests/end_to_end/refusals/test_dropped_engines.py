"""An engine ends with its last reference, as by `destroy()`: threads, descriptors, files and memory go with it."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import pytest
import warm
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from harness import batches, causal_loss, ds_config, llama, on_ssd, train
from interrupting import Client, Model

from ds_slide.errors import SlideError
from ds_slide.runtime.core import running

pytestmark = pytest.mark.usefixtures("one_rank")

CONFIGURATIONS = pytest.mark.parametrize(
    ("tier", "clip"),
    [
        ("host", 1.0),
        ("ssd", 1.0),
        pytest.param("host", 0.0, marks=pytest.mark.slow),
        pytest.param("ssd", 0.0, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value),
)
PATIENCE_S = 30.0


def config_for(tier: str, disk: Path, clip: float, **options: Any) -> dict[str, Any]:
    config = ds_config({"window": 2, **({"host_memory": 0} if tier == "ssd" else {})}, clip=clip, **options)
    return on_ssd(config, disk) if tier == "ssd" else config


def start(model: Any, config: dict[str, Any]) -> Any:
    return deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]


def use(config: dict[str, Any]) -> None:
    """An engine of one's own, dropped with work of its last step still under way."""
    engine = start(llama(num_hidden_layers=2), config)
    train(engine, batches(2))


def held(disk: Path) -> dict[str, Any]:
    """What engines of this process hold."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ds_slide")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "directories": sorted(path.name for path in disk.iterdir()),
        "modules": len(FWD_MODULE_STACK),
        "engines": len(running._engines),
    }


def until(expected: dict[str, Any], disk: Path) -> None:
    """Collect garbage until that is held: a lane that is still at work keeps its engine until it is done."""
    deadline = time.monotonic() + PATIENCE_S
    while gc.collect() >= 0 and held(disk) != expected:
        assert time.monotonic() < deadline, held(disk)


@pytest.fixture(autouse=True)
def no_other_engine(one_rank: None, tmp_path: Path) -> None:  # noqa: ARG001
    """What the first engine of a process opens for all that follow is open, and those of other tests have ended."""
    (warm := tmp_path / "warm").mkdir()
    for tier in () if _is_warm else ("host", "ssd"):
        use(config_for(tier, warm, 1.0))
    _is_warm.append(True)
    deadline = time.monotonic() + PATIENCE_S
    while gc.collect() >= 0 and held(warm)["threads"]:
        assert time.monotonic() < deadline, held(warm)


_is_warm: list[bool] = []


@CONFIGURATIONS
def test_nothing_grows(tier: str, clip: float, disk: Path) -> None:
    config = config_for(tier, disk, clip)
    before = held(disk)
    use(config)
    until(before, disk)
    resident = psutil.Process().memory_info().rss
    assert before["directories"] == []
    for _ in range(5):
        use(config)
        until(before, disk)
    # Each has 1.5 MB of states; the process' own noise is a few hundred kB.
    assert psutil.Process().memory_info().rss - resident < 6 << 20


@pytest.mark.parametrize(("tier", "clip"), [("host", 0.0), ("ssd", 1.0)])
def test_one_of_two_is_dropped(tier: str, clip: float, disk: Path) -> None:
    config, data = config_for(tier, disk, clip), batches(4)
    kept = start(llama(num_hidden_layers=2), config)
    try:
        losses = train(kept, data[:2]).losses
        before = held(disk)
        use(config)
        until(before, disk)
        losses += train(kept, data[2:]).losses
    finally:
        kept.destroy()
    alone = start(llama(num_hidden_layers=2), config)
    try:
        assert train(alone, data).losses == losses
    finally:
        alone.destroy()


@pytest.mark.parametrize("place", ["forward of block 2", "backward of block 1"])
@pytest.mark.parametrize(("tier", "clip"), [("host", 1.0), ("ssd", 0.0)])
def test_one_that_was_interrupted(tier: str, clip: float, place: str, disk: Path) -> None:
    config = config_for(tier, disk, clip)
    before = held(disk)

    def interrupted() -> None:
        client = Client(start(Model(), config))
        client.train(batches(1))
        client.fail(batches(1)[0], place)

    interrupted()
    until(before, disk)


def test_one_whose_lane_has_failed(disk: Path) -> None:
    before = held(disk)

    def fail() -> None:
        raise OSError("the disk is gone")

    def failed() -> None:
        engine = start(llama(num_hidden_layers=2), config_for("ssd", disk, 1.0))
        train(engine, batches(1))
        engine.optimizer.runtime.parts.context.lanes.d2h.submit(fail)
        with pytest.raises(SlideError, match="the disk is gone"):
            train(engine, batches(2))

    failed()
    until(before, disk)


def test_a_model_that_is_kept_keeps_its_engine(disk: Path) -> None:
    """It computes with the engine's hooks."""
    before = held(disk)
    model = llama(num_hidden_layers=2)
    engine = start(model, config_for("host", disk, 1.0))
    expected = causal_loss(engine, batches(1)[0]).item()
    del engine
    gc.collect()
    assert causal_loss(model, batches(1)[0]).item() == expected
    del model
    until(before, disk)


def test_at_the_end_of_the_interpreter(disk: Path) -> None:
    """Nobody drops it, and nobody destroys it."""
    script = disk.parent / "script.py"
    script.write_text(f"""
import os, sys
import torch, deepspeed
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_dropped_engines import config_for, start, llama, train, batches
os.environ["LOCAL_RANK"] = "0"
store = torch.distributed.FileStore({str(disk.parent / "store")!r}, 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
deepspeed.init_distributed("gloo")
engine = start(llama(num_hidden_layers=2), config_for("ssd", Path({str(disk)!r}), 1.0))
train(engine, batches(2))
""")
    run = warm.start(script, folder=disk.parent)
    assert run.end() == 0, run.log[-3000:]
    assert list(disk.iterdir()) == []
