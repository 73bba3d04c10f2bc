"""The plan lists what an engine takes: every entry is there with its bytes, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import two_ranks
from allocated import counted
from harness import batches, ds_config, engine_for, llama, on_ssd, train
from tight_memory import room_for_gradients_of

from ds_slide.runtime.gradients.sources import Scattered

STREAM = {"stream_head": True}
ALL_ON_SSD = {"host_memory": 0}
LSP = {"type": "lsp", "d": 32}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # slide, and settings of DeepSpeed
    "host": ({}, {}),
    "under backward": ({}, {"clip": 0.0}),
    "accumulation": ({"huge_pages": True}, {"accumulation": 3, "data_types": {"grad_accum_dtype": "fp32"}}),
    "gpu states": ({"gpu_states": 700_000}, {}),
    "all on the GPU": ({"gpu_states": "1GiB"}, {"clip": 0.0}),
    "8 bit": ({"state_dtype": "8bit"}, {}),
    "compressed": ({"compression": LSP}, {}),
    "compressed, rounded masters": ({"compression": LSP | {"master_dtype": "bf16"}}, {}),
    "streamed head": (STREAM, {}),
    "streamed head, under backward": (STREAM, {"clip": 0.0}),
    "ssd": (ALL_ON_SSD, {}),
    "ssd, no checksums": (ALL_ON_SSD | {"checksums": False}, {"clip": 0.0}),
    "ssd, a part": ({"host_memory": 2_000_000}, {}),
    "ssd, 8 bit": (ALL_ON_SSD | {"state_dtype": "8bit"}, {"clip": 0.0}),
    "ssd, gpu states": (ALL_ON_SSD | {"gpu_states": 700_000, "ssd_buffers": 2, "weight_buffers": 2}, {}),
    "ssd, gradients, too": (
        {"gradient_buffers": 2},
        {},
    ),  # with more, and few blocks, their way takes more than they do
    "ssd, streamed head": (ALL_ON_SSD | STREAM, {"accumulation": 2}),
}


def config_of(name: str, disk: Path) -> dict[str, Any]:
    slide, settings = RUNS[name]
    config = ds_config(slide, **settings)
    return on_ssd(config, disk) if name.startswith("ssd") else config


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_slide.plan.ssd_settings.CHUNK_NUMEL", 4096)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in RUNS), ("host", True), ("ssd", True)])
def test_of_an_engine_that_trains(name: str, tied: bool, disk: Path) -> None:
    """The first block is frozen, and so is a part of the second."""
    model = llama(num_hidden_layers=8 if "gradients" in name else 4, tie_word_embeddings=tied)
    for part in (model.model.layers[0], model.model.layers[1].mlp):
        part.requires_grad_(False)
    with room_for_gradients_of(0 if name == "ssd, gradients, too" else None) as plan, counted() as count:
        with engine_for(model, config_of(name, disk)) as engine:
            assert count.difference(engine) == []
            assert bool(plan().placement.gradients_on_ssd) == (name == "ssd, gradients, too")
            memory = engine.optimizer.runtime.parts.context.memory
            assert plan().report() == engine.optimizer.runtime.parts.memory_report
            assert (plan().host_bytes, plan().report()["pinned_bytes"]) == (memory.total_bytes, memory.pinned_bytes)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["host", "ssd", "ssd, a part", "streamed head"])
def test_of_an_engine_without_an_optimizer(name: str, disk: Path) -> None:
    config = {key: value for key, value in config_of(name, disk).items() if key != "optimizer"}
    if name == "ssd, a part":
        config["ds_slide"]["host_memory"] = 400_000
    with counted() as count:
        engine, *_ = deepspeed.initialize(model=llama(num_hidden_layers=4), config=config)
        try:
            assert count.difference(engine) == []
        finally:
            engine.destroy()


@pytest.mark.usefixtures("one_rank")
def test_an_engine_that_has_failed_keeps_no_gradients_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of outer modules stay on the GPU until they have been copied."""

    def copy(*_: Any) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr(Scattered, "copy", copy)
    with engine_for(llama(), ds_config({}, clip=1.0)) as engine:
        gradients = engine.optimizer.runtime.parts.gradients
        with pytest.raises(RuntimeError, match="no copy"):
            train(engine, batches(1))
        assert gradients.on_their_way
    assert not gradients.on_their_way


@pytest.mark.slow  # half a minute: six runs of two ranks
def test_of_two_ranks(tmp_path: Path) -> None:
    for found in two_ranks.seen_by(two_ranks.run("allocated_worker.py", tmp_path)):
        assert len(found) == 6
        assert {name: problems for name, problems in found.items() if problems} == {}
