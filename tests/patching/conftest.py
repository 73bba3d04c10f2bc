"""Models of transformers, patched with the kernels: on the GPU, or by Triton's interpreter on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The test files of this folder import `models` by this name, and `harness` from the one beside it.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]

pytest.importorskip("triton")
pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> None:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    import ds_slide  # noqa: F401 - switches the "ds_slide" key on where the package is not installed

    if get_accelerator().device_name() != "cpu":
        pytest.skip("these tests run on the CPU accelerator: set DS_ACCELERATOR=cpu")
    if not torch.distributed.is_initialized():
        # A store in a file needs no port.
        store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo")


@pytest.fixture
def one_rank(_process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group of one rank."""
    monkeypatch.setenv("LOCAL_RANK", "0")
