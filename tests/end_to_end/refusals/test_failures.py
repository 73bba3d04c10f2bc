"""A failure anywhere ends the threads of an engine at once, whatever they wait for, and what is called afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from harness import batches, ds_config, engine_for, llama, on_ssd, train

from ds_slide.errors import SlideError
from ds_slide.runtime.core.futures import Future

pytestmark = pytest.mark.usefixtures("one_rank")

SECONDS = 60.0


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ds_slide-")]


def config_of(tier: str, disk: Path) -> dict[str, Any]:
    slide = {"window": 2, **({"host_memory": 0} if tier == "ssd" else {})}
    return on_ssd(ds_config(slide), disk) if tier == "ssd" else ds_config(slide)


@pytest.mark.parametrize("tier", ["host", "ssd"])
@pytest.mark.parametrize("standing", ["idle", "in a wait"])
def test_the_lanes_end_and_the_rest_with_the_engine(tier: str, standing: str, disk: Path) -> None:
    with engine_for(llama(num_hidden_layers=3), config_of(tier, disk)) as engine:
        train(engine, batches(1))
        runtime = engine.optimizer.runtime
        parts = runtime.parts
        lanes = [parts.context.lanes.h2d, parts.context.lanes.outer_h2d, parts.context.lanes.d2h]
        threads = [lane._thread for lane in (*lanes, parts.context.lanes.update) if lane._thread is not None]
        assert len(threads) >= 3
        for lane in (*lanes, parts.context.lanes.update):
            lane.drain()
        if standing == "in a wait":
            for lane in lanes:
                if lane._thread is not None:
                    lane.submit(lambda: Future(parts.context.failures, "the sunrise").wait() and None)
        parts.context.failures.end("the plug was pulled")
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), thread.name
        with pytest.raises(SlideError, match=r"^the plug was pulled$"):
            engine(**batches(1)[0])
    assert own_threads() == []
