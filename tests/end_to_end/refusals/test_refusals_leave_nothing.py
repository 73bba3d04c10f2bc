"""A refused engine leaves no thread, no file and no directory, wherever on its way it is refused; blocks that are not
refused are run."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import batches, ds_config, engine_for, llama, on_ssd, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideError
from ds_slide.runtime import build

pytestmark = pytest.mark.usefixtures("one_rank")

PATIENCE_S = 30.0
SECONDS = 2.0
NAMES = re.compile(r"ds_slide|slide-update")


def own_threads() -> dict[int, str]:
    """Threads of this package that are alive, of Python and of the extension, by the number that the kernel has."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has just ended
        if NAMES.match(name):
            found[int(task.name)] = name
    return found


def wait_for_threads(before: dict[int, str]) -> None:
    """No thread is left but those of `before`, of engines of other tests. One that has been joined is in /proc for a
    moment longer."""
    deadline = time.monotonic() + PATIENCE_S
    while own_threads().keys() - before.keys() and time.monotonic() < deadline:
        os.sched_yield()
    assert not own_threads().keys() - before.keys(), own_threads()


@contextmanager
def nothing_left(disk: Path) -> Iterator[None]:
    """After the engine, no thread of ours is alive that was not before, and `disk` is as it was."""
    files, threads = sorted(disk.rglob("*")), own_threads()
    yield
    wait_for_threads(threads)
    assert sorted(disk.rglob("*")) == files


def config_of(slide: dict[str, Any], disk: Path | None) -> dict[str, Any]:
    return ds_config(slide) if disk is None else on_ssd(ds_config(slide), disk / "new" / "folder")


def small() -> Any:
    return llama(num_hidden_layers=2)


@pytest.mark.parametrize("part", ["provide_buffers", "Gradients", "running", "CpuUpdater"])
def test_an_engine_that_fails_while_it_is_built(part: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, say, that cannot be had: after the files were made, and before or after the threads were started."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise SlideError("host tier: no memory")

    if part == "running":
        monkeypatch.setattr(build.running, "enter", refuse)
    else:
        monkeypatch.setattr(build, part, refuse)
    with nothing_left(disk):
        with pytest.raises(SlideError, match="no memory"), engine_for(small(), config_of({"host_memory": 0}, disk)):
            pass


# What is within the limits of the schema, and what a machine, a model or another setting may still refuse.
VALUES: dict[str, Any] = {
    "window": [2, 3, 4096],
    "gpu_memory": [1, "1MiB", "8EiB", "1GiB", None],
    "host_memory": [0, 1, "1MiB", 10**12, None],
    "state_dtype": ["fp32", "bf16", "8bit"],
    "ssd_buffers": [2, 4096, "auto"],
    "weight_buffers": [2, 4096, "auto"],
    "io_backend": ["auto", "io_uring", "libaio", "threads"],
    "activations": ["auto", "whole_blocks", "as_written"],
    "captured_blocks": ["auto", True, False],
    "update_passes": ["auto", 1, 2],
    "speculate": ["auto", True, False],
    "gpu_states": [0, 1, "1MiB", 2**62, "auto"],
    "share_weights": [True, False, "auto"],
    "defer_updates": [True, False, "auto"],
    "gradient_buffers": [2, 64],
    "cpu_threads": [1, 2, 65, 5000],
    "cpu_cores": ["auto", "none", [0], [0, 0], [1023], [10**20]],
    "blocks": ["auto", ["model.layers"], ["model.layers"] * 2, ["model"], ["no.such"], ["\ud800"], ["x" * 300]],
    "stream_head": [True, False],
    "experts": ["auto", 0, 1, "1MiB", 2**62],
    "flat_pieces": [True, False],
    "muon_scale": ["deepspeed", "moonlight"],
    "muon_norm": ["gradient", "update"],
    "muon_kernel": ["auto", True, False],
    "huge_pages": [True, False],
    "kernels": ["auto", "off", ["loss"], ["norm", "norm"]],
    "async_save": [True, False],
    "checksums": [True, False],
    "compression": [
        None,
        {"type": "lsp"},
        {"type": "lsp", "d": 16, "r": 16},
        {"type": "lsp", "d": 65_536, "master_dtype": "bf16"},
        {"type": "lsp", "d": 15},
        {"type": "lsp", "check_every": 0},
        {},
    ],
    "checkpoint": [{}, {"require_manifest": True}],
    "hang_timeout": [0, 1e8, 300, 1e-9],
    "trace": [{}, {"path": "/no/such/folder/trace.json"}, {"path": ""}, {"steps": [3, 2]}, {"steps": [0, 1]}],
    "debug": [{}, {"lane_delay_ms": 0.5}, {"seed": 2**63 - 1}, {"lane_delay_ms": 1e300}],
    "no_such_key": [1],
}
assert set(SlideConfig.model_fields) - {"enabled", "nvme_path"} < set(VALUES)
SLIDES = st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: st.sampled_from(VALUES[key]) for key in keys})
)
FEW = settings(deadline=None, derandomize=True, max_examples=12, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, derandomize=False, max_examples=300)


def run(slide: dict[str, Any], disk: Path | None) -> None:
    with engine_for(small(), config_of(slide, disk)) as engine:
        assert len(train(engine, batches(2)).losses) == 2


def check(slide: dict[str, Any], on_disk: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        disk, threads = Path(folder), own_threads()
        start = time.process_time()  # of the clock's seconds others may have most
        try:
            run(slide, disk if on_disk else None)
            gc.collect()  # the threads of a destroyed engine's update end with the object
            left = ["new", "new/folder"] if on_disk and (disk / "new").exists() else []
        except SlideError as error:
            text, left = str(error), []
            assert time.process_time() - start < SECONDS, (slide, text)
            assert all("; " in line for line in text.splitlines()), text
            assert any(f"ds_slide.{key}" in text for key in slide), (slide, text)
        wait_for_threads(threads)
        assert sorted(str(path.relative_to(disk)) for path in disk.rglob("*")) == left


@given(slide=SLIDES, on_disk=st.booleans())
@FEW
@pytest.mark.slow
def test_some_blocks_run_or_are_refused(slide: dict[str, Any], on_disk: bool) -> None:
    check(slide, on_disk)


@given(slide=SLIDES, on_disk=st.booleans())
@MANY
@pytest.mark.slow
def test_many_blocks_run_or_are_refused(slide: dict[str, Any], on_disk: bool) -> None:
    check(slide, on_disk)
