"""`ds-slide` run in this process: what it prints, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_slide.cli.__main__ import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    error: str

    @property
    def answer(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def ds_slide(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*arguments: object) -> Ran:
        code = 0
        try:
            main([str(each) for each in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of these tests alone, and measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def small_config(**others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "ds_slide": {"enabled": True},
        **others,
    }


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a DeepSpeed JSON."""

    def write(**others: Any) -> Path:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(small_config(**others)))
        return path

    return write
