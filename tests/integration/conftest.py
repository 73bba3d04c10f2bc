"""Engines in this process: one rank over gloo on the CPU accelerator, shared by all tests of a session.

Importing torch, transformers and DeepSpeed takes longer than most of these tests, so they do not run in processes of
their own; an engine that is destroyed must leave nothing behind, and two engines must not disturb each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# The test files of this folder import `harness` by this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed

    if get_accelerator().device_name() != "cpu":
        pytest.skip("these tests run on the CPU accelerator: set DS_ACCELERATOR=cpu")
    if not torch.distributed.is_initialized():
        # A store in a file needs no port, and nothing goes to the environment of the processes that other tests start.
        store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo")


@pytest.fixture(scope="module")
def one_rank(_process_group: None) -> Iterator[None]:
    """A process group of one rank, and one torch thread: the models are too small for two, and bits must repeat."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        yield
    torch.set_num_threads(threads)
