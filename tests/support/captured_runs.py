"""Trainings of small models whose blocks replay recordings, and the same with blocks as they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_runs import config_of
from harness import Result, engine_for, llama, on_ssd, states_of

from ds_slide.runtime.captured.block import CapturedBlock, Recording
from ds_slide.runtime.captured.graphs import Graph
from ds_slide.runtime.captured.shapes import STEADY
from ds_slide.runtime.memory.spare_memory import LOOKS

RECORDING = LOOKS[-1] + 2
"""The step that records: behind the last decision about memory, and one more step."""
STEPS = RECORDING + STEADY + 1
RESIDENT = {"gpu_memory": "1GiB", "gpu_states": "1GiB"}
STREAMED = {"gpu_memory": "1GiB", "gpu_states": 0, "window": 3}
"""Blocks are recomputed."""
Train = Callable[[Any], Any]


def counted_replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All replays from now on, of forwards and backwards."""
    found: list[Graph] = []
    replay = Graph.replay

    def counted(self: Graph) -> None:
        found.append(self)
        replay(self)

    monkeypatch.setattr(Graph, "replay", counted)
    return found


def captures_of(engine: Any) -> Any:
    return engine.optimizer.runtime.parts.spare.activations.captures


def both(
    training: Train,
    build: Callable[[], Any] = llama,
    schedule: str = "clipping",
    slide: Any = RESIDENT,
    folder: Path | None = None,
) -> list[Result]:
    """The results of `training` with blocks as they are written, and with recordings. `folder`: on SSD, where weights
    and states are to lie there."""
    return [one(training, build, schedule, slide, folder, wanted=wanted) for wanted in (False, True)]


def one(
    training: Train,
    build: Callable[[], Any] = llama,
    schedule: str = "clipping",
    slide: Any = RESIDENT,
    folder: Path | None = None,
    *,
    wanted: bool,
) -> Result:
    """Of `both`: whether recordings are `wanted`."""
    model = build()
    torch.manual_seed(3)
    config = config_of({**slide, "captured_blocks": wanted}, schedule)
    with engine_for(model, config if folder is None else on_ssd(config, folder)) as engine:
        result: Result = training(engine) or Result()
        result.states = states_of(model)
    return result


def weights_as_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replays read the trained weights where these lay at the recording, as CUDA graphs do."""
    record, stand_ins = CapturedBlock._record, CapturedBlock._stand_ins
    places: list[tuple[Any, list[torch.Tensor]]] = []

    def recorded(self: CapturedBlock, recording: Recording, *given: Any) -> None:
        trained = recording.weights.trained
        places.append((trained, [each.data for each in trained]))
        record(self, recording, *given)

    @contextmanager
    def there(self: CapturedBlock, trained: Any) -> Iterator[list[Any]]:
        with stand_ins(self, trained) as made:
            found = next((tensors for of, tensors in places if of is trained), ())
            for each, tensor in zip(made, found, strict=bool(found)):
                each.data = tensor
            yield made

    monkeypatch.setattr(CapturedBlock, "_record", recorded)
    monkeypatch.setattr(CapturedBlock, "_stand_ins", there)
