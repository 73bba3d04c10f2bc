"""Outcomes of DeepSpeed's tests on DS-Slide: of those that have a config of stage 3 and are not skipped.

python summary.py SLIDE.jsonl STOCK.jsonl      a page in Markdown
python summary.py --failed SLIDE.jsonl         the node ids that are to run on stock, too
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KINDS = {
    "passed": "passed",
    "refused": "refused by DS-Slide in a sentence",
    "private": "looks at stock's private state; told so in a sentence that names DS-Slide",
    "failed": "failed otherwise",
    "stock": "does not pass on stock either",
}
_ERRORS = (("private", r"\bSlideAttributeError\b"), ("refused", r"\bSlide(Config)?Error\b"))


def load(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def kind_of(result: dict[str, Any]) -> str:
    """A key of KINDS."""
    if result["outcome"] != "failed":
        return result["outcome"]
    return next((kind for kind, pattern in _ERRORS if re.search(pattern, result["text"])), "failed")


def failed(slide: Iterable[dict[str, Any]]) -> list[str]:
    return [result["test"] for result in slide if result["outcome"] == "failed"]


def last_error(text: str) -> str:
    """The line of a failure that says what was wrong."""
    errors = [line for line in text.splitlines() if re.match(r"(E\s+)?[\w.]*(Error|Exception|Failed)\b.*:", line)]
    lines = errors or [line for line in text.splitlines() if line.strip()] or [""]
    return re.sub(r"^E\s+", "", lines[-1])[:300]


def page(slide: list[dict[str, Any]], stock: list[dict[str, Any]]) -> str:
    on_stock = {result["test"]: result["outcome"] for result in stock}
    meant = [result for result in slide if result["stage3"] and result["outcome"] != "skipped"]
    found: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    for result in meant:
        kind, text = kind_of(result), last_error(result["text"])
        if kind != "passed" and on_stock.get(result["test"]) != "passed":
            kind = "stock"
        found[kind].setdefault(text, []).append(result["test"])
    counts = {kind: sum(map(len, texts.values())) for kind, texts in found.items()}
    lines = [
        f"{len(slide)} tests, of which {len(meant)} ran and made a config of ZeRO stage 3. With the key:",
        "",
        "| outcome | tests |",
        "|---|---|",
        *(f"| {text} | {counts[kind]} |" for kind, text in KINDS.items()),
    ]
    for kind in ("failed", "private", "refused", "stock"):
        if found[kind]:
            lines += ["", f"## {KINDS[kind].capitalize()}"]
        for text, tests in sorted(found[kind].items(), key=lambda row: -len(row[1])):
            lines += ["", f"{len(tests)} x `{text}`", "", *(f"* `{test}`" for test in tests)]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--failed":
        print("\n".join(failed(load(arguments[1]))))
    else:
        print(page(load(arguments[0]), load(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
