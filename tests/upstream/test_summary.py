"""The counts of the page: what a failure says decides what it is, and what stock does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("upstream_summary", Path(__file__).with_name("summary.py"))
assert SPEC is not None and SPEC.loader is not None
summary = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(summary)

ATTRIBUTE = "E   ds_slide.errors.SlideAttributeError: DS-Slide's optimizer has no attribute 'averaged_gradients': ..."
REFUSAL = (
    "E   ds_slide.errors.SlideConfigError: the optimizer is torch.optim.sgd.SGD, but DS-Slide updates with Adam only"
)
VALUE = "unit/x.py:3: in test\nE   AssertionError: 1 != 2"


def result(test: str, outcome: str = "failed", text: str = "", stage3: bool = True) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "stage3": stage3, "seconds": 1.0, "text": text}


@pytest.mark.parametrize(
    ("outcome", "text", "kind"),
    [
        ("passed", "", "passed"),
        ("skipped", "", "skipped"),
        ("failed", ATTRIBUTE, "private"),
        ("failed", REFUSAL, "refused"),
        ("failed", VALUE, "failed"),
        ("failed", "E   AttributeError: 'SlideZeroOptimizer' object has no attribute 'x'", "failed"),
    ],
)
def test_kinds(outcome: str, text: str, kind: str) -> None:
    assert summary.kind_of(result("a", outcome, text)) == kind


def test_the_page() -> None:
    slide = [
        result("passes", "passed"),
        result("other stage", "passed", stage3=False),
        result("skipped", "skipped"),
        result("private", text=ATTRIBUTE),
        result("refused", text=REFUSAL),
        result("wrong", text=VALUE),
        result("wrong on stock", text=VALUE),
    ]
    assert summary.failed(slide) == ["private", "refused", "wrong", "wrong on stock"]
    stock = [result(name, "passed") for name in ("private", "refused", "wrong")] + [result("wrong on stock")]
    page = summary.page(slide, stock)
    assert page.startswith("7 tests, of which 5 ran and made a config of ZeRO stage 3.")
    counts = [line.split(" | ")[-1].rstrip(" |") for line in page.splitlines() if line.startswith("| ")][1:]
    assert counts == ["1", "1", "1", "1", "1"]
    assert "1 x `AssertionError: 1 != 2`\n\n* `wrong`" in page
