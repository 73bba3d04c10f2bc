"""README and configs say what the engine does, with a stock twin for each config."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_slide.config import SlideConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_json_enables_the_engine() -> None:
    blocks = re.findall(r"```json\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    config = SlideConfig.from_deepspeed(json.loads(blocks[0]))
    assert config is not None and config.enabled


@pytest.mark.parametrize("kind", ["cpu", "bf16"])
def test_stock_config_is_the_slide_config_without_the_key(kind: str) -> None:
    slide = json.loads((ROOT / "configs" / f"slide_{kind}.json").read_text())
    stock = json.loads((ROOT / "configs" / f"stock_{kind}.json").read_text())
    assert SlideConfig.from_deepspeed(slide) is not None
    del slide["ds_slide"]
    assert stock == slide


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900
