"""Whatever stands in the "ds_slide" block: a config, or one sentence that names the key."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from any_values import EXTREMES, anything, blocks, enabled_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_slide.config import SlideConfig
from ds_slide.config.values import shown_key
from ds_slide.errors import SlideConfigError
from ds_slide.integration.early import check_json

SECONDS = 2.0
CALM = settings(deadline=None, derandomize=True, max_examples=200, suppress_health_check=list(HealthCheck))
WILD = settings(CALM, derandomize=False, max_examples=10_000)


def check_sentence(text: str, *names: str) -> None:
    assert "\n" not in text and len(text) < 1200, text
    assert any(text.startswith(name) for name in names), (text, names)


def check_block(block: Any) -> None:
    threads, start = threading.active_count(), time.monotonic()
    try:
        config = SlideConfig.from_deepspeed({"ds_slide": block})
    except SlideConfigError as error:
        keys = block if isinstance(block, dict) else {}
        check_sentence(str(error), "ds_slide is ", *(f"ds_slide.{shown_key(key)}" for key in keys))
    else:
        assert config is None or SlideConfig.from_deepspeed({"ds_slide": config.model_dump()}) == config
    assert time.monotonic() - start < SECONDS
    assert threading.active_count() == threads


@given(block=blocks)
@CALM
def test_any_block(block: Any) -> None:
    check_block(block)


@given(block=blocks)
@WILD
@pytest.mark.slow
def test_very_many_blocks(block: Any) -> None:
    check_block(block)


@pytest.mark.parametrize("key", sorted(SlideConfig.model_fields))
def test_every_key_with_every_extreme_value(key: str) -> None:
    for value in EXTREMES:
        check_block({"enabled": True, key: value})


def offload(value: Any) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {}, optional={"device": value, "nvme_path": value, "ratio": value, "pin_memory": value}
    )


SECTIONS = {
    "zero_optimization": anything
    | st.fixed_dictionaries(
        {"stage": st.just(3) | anything},
        optional={
            section: anything | offload(st.sampled_from(["none", "cpu", "nvme", "/tmp"]) | anything)
            for section in ("offload_optimizer", "offload_param")
        },
    ),
    "aio": anything | st.fixed_dictionaries({}, optional={"block_size": anything, "queue_depth": anything}),
    "gradient_clipping": anything,
    "fp16": anything,
}


def check_whole(config: dict[str, Any]) -> None:
    start = time.monotonic()
    try:
        check_json(config)
    except SlideConfigError as error:
        for line in str(error).splitlines():
            check_sentence(line, "ds_slide", "zero_optimization", "aio", "gradient_", "torch_")
    assert time.monotonic() - start < SECONDS


@given(block=enabled_blocks | st.just({"enabled": True}), others=st.fixed_dictionaries({}, optional=SECTIONS))
@CALM
def test_the_sections_around_it(block: Any, others: dict[str, Any]) -> None:
    check_whole({"zero_optimization": {"stage": 3}, "ds_slide": block, **others})


@given(block=enabled_blocks | st.just({"enabled": True}), others=st.fixed_dictionaries({}, optional=SECTIONS))
@WILD
@pytest.mark.slow
def test_very_many_sections(block: Any, others: dict[str, Any]) -> None:
    check_whole({"zero_optimization": {"stage": 3}, "ds_slide": block, **others})
