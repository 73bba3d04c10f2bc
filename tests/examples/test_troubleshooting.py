"""docs/troubleshooting.md quotes what the source says, and has an entry for every error that it raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "ds_slide"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Arguments of functions that only this project's own code calls, and errors that pass another one on.
NOT_FOR_USERS = {
    "cpu.py",
    "learning.py",
    "projection.py",
    "projector.py",
    "low_precision.py",
    "extents.py",
    "layout.py",
    "reference.py",
    "rounding.py",
    "tier_moves.py",
}


VALUE = "\0"
"""Stands in a text for what the program puts in."""


def text_of(node: ast.AST) -> str | None:
    """What a string expression says; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(VALUE if isinstance(part, ast.FormattedValue) else str(text_of(part)) for part in node.values)
    return None


def texts(folder: Path) -> Iterator[str]:
    """Of every Python file below."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = text_of(node)
            if text:
                yield " ".join(text.split(" "))


def refusals(folder: Path) -> Iterator[tuple[Path, str]]:
    """Texts of the SlideErrors that are raised below, where they stand in the call itself."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                is_error = name.startswith("Slide") and name.endswith("Error")
                if is_error or name == "DoesNotFit":  # the sentence is the last argument of this one
                    if node.args and (text := text_of(node.args[0 if is_error else -1])):
                        yield path, text


def quotations() -> list[str]:
    rows = re.findall(r"^\| (`.+?) \| .+ \| .+ \|$", PAGE, flags=re.MULTILINE)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


def found_in(quotation: str, texts: list[str]) -> bool:
    """Whether one of them says it. Most lack its longest piece, which is quicker to see than a match of it all."""
    found, piece = pattern(quotation), max(quotation.split("…"), key=len)
    return any(piece in text and found.search(text) for text in texts)


def pattern(quotation: str) -> re.Pattern[str]:
    """Any text may stand for "…", within one message."""
    return re.compile(".*?".join(re.escape(part) for part in quotation.split("…")), flags=re.DOTALL)


@pytest.fixture(scope="module")
def source() -> list[str]:
    """Each text once."""
    return sorted({text.replace(VALUE, "…") for text in texts(SOURCE)})


@pytest.mark.parametrize("quotation", quotations())
def test_the_source_says_it(quotation: str, source: list[str]) -> None:
    assert re.search(r"[a-zA-Z]", quotation.replace("…", "")) or quotation.count("…") > 1
    assert found_in(quotation, source), quotation


def test_every_error_is_there() -> None:
    known = [pattern(text) for text in quotations() if len(text.replace("…", "").strip(" :;.,")) > 8]
    known += [pattern(text) for text in ("… is …; expected …", "SSD tier: …", "rank …: …", "… failed: …: …")]
    missing = {
        f"{path.name}: {text.replace(VALUE, '…')}"
        for path, text in refusals(SOURCE)
        if path.name not in NOT_FOR_USERS
        and re.search(r"[a-z]{3}", text.replace(VALUE, ""))
        and not any(quoted.search(text.replace(VALUE, "…")) for quoted in known)
    }
    assert missing == set()
