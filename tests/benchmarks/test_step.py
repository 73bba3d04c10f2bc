"""What all scripts that train one setting share: the limits of a setting hold in each of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import step
import torch
from settings import Setting


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done for a GPU that is not there, in order."""
    seen: list[str] = []

    def noting(name: str, result: Any = None) -> Any:
        return lambda *_, **__: seen.append(name) or result

    monkeypatch.setattr(step, "accelerator_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(step, "prepare_model", noting("model", SimpleNamespace(config=SimpleNamespace(vocab_size=8))))
    monkeypatch.setattr(step, "make_trainer", noting("system"))
    for name in ("token_batches", "apply_patch", "synchronize"):
        monkeypatch.setattr(step, name, lambda *_: None)
    monkeypatch.setattr(step, "run_steps", noting("steps"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(str(device)))
    limit = "set_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, limit, lambda share, device: seen.append(f"{share} of {device}"))
    return seen


@pytest.mark.parametrize("system", ["slide", "gpu-only"])
def test_a_share_of_the_gpu_holds_from_the_beginning(system: str, seen: list[str]) -> None:
    step.warmed_up(Setting(system, gpu_fraction=0.25), "")
    assert seen == ["cuda:1", "0.25 of cuda:1", "model", "system", "steps"]


def test_stocks_share_of_the_gpu_holds_when_the_model_is_divided(seen: list[str]) -> None:
    step.warmed_up(Setting("stock", gpu_fraction=0.25), "")
    assert seen == ["cuda:1", "model", "system", "0.25 of cuda:1", "steps"]


def test_the_folder_on_the_disk_is_where_the_setting_says_and_goes_with_its_files(tmp_path: Path) -> None:
    with step.folder_on_disk(Setting("slide", offload="nvme", nvme_path=str(tmp_path))) as folder:
        assert Path(folder).parent == tmp_path
        (Path(folder) / "states").write_text("")
    assert list(tmp_path.iterdir()) == []
    with step.folder_on_disk(Setting("slide")) as folder:
        assert folder == ""
