"""A setting under the name that it had once: it is obeyed, said once, and refused beside the new one."""

from __future__ import annotations

import pytest

from ds_slide.config import old_names
from ds_slide.config.schema import SlideConfig
from ds_slide.errors import SlideConfigError


def read(**block: object) -> SlideConfig:
    config = SlideConfig.from_deepspeed({"ds_slide": {"enabled": True, **block}})
    assert config is not None
    return config


def test_the_old_name_is_obeyed_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(old_names, "_said", set())
    assert read(hold_gradients=True).defer_updates is True
    assert read(hold_gradients=False).defer_updates is False
    (line,) = caplog.messages
    assert line == "ds_slide.hold_gradients is called ds_slide.defer_updates now; the old name will go"


def test_a_wrong_value_is_named_under_the_new_name() -> None:
    with pytest.raises(SlideConfigError, match=r'^ds_slide\.defer_updates is "yes"; expected "auto", true or false$'):
        read(hold_gradients="yes")


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(SlideConfigError, match=r"^ds_slide\.hold_gradients is the old name of ds_slide\.defer_updates"):
        read(hold_gradients=True, defer_updates=True)
