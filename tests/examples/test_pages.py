"""The pages for readers: code fences are closed, links lead somewhere, and what a page cites exists.

A page cites in backticks: a file or folder, by its path from the top, from `ds_slide/` or from the page; a dotted name
of `ds_slide`, a module or what it defines, or a setting; and after a file, in brackets, names that it defines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ds_slide.config import SlideConfig

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
CITING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINKING = [
    *CITING,
    *(
        ROOT / name
        for name in ("LOG.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "benchmarks/results/README.md")
    ),
]
NOT_OURS = {"train.py", "zero_to_fp32.py", "ds_to_universal.py"}
"""Files of users and of DeepSpeed."""

FENCE = re.compile(r"^ *(```+|~~~+)", flags=re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```", flags=re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
SUFFIXES = (".py", ".pyi", ".md", ".cpp", ".hpp", ".sh", ".c")
DOTTED = re.compile(r"\bds_slide(?:\.\w+)+")
DEFINED = re.compile(r"`([\w./-]+\.(?:py|hpp|cpp))`\s+\(((?:`[\w.]+`(?:,\s+)?)+)\)")


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def unclosed(text: str) -> bool:
    return len(FENCE.findall(text)) % 2 == 1


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if "://" not in target and not (there.exists() and (not anchor or anchor in anchors(there))):
            yield target


def missing_files(page: Path, text: str) -> Iterator[str]:
    """Files and folders that `text` cites and that do not exist."""
    for word in {word for span in re.findall(r"`([^`]+)`", text) for word in span.split()}:
        if not PATH.fullmatch(word) or word in NOT_OURS:
            continue
        top, _, rest = word.partition("/")
        if (rest and (ROOT / top).is_dir()) or (word.endswith("/") and not word.startswith(".")):
            places: Iterable[Path] = (ROOT, ROOT / "ds_slide")
        elif word.endswith(SUFFIXES):
            places = (ROOT, ROOT / "ds_slide", page.parent) if rest else all_folders()
        else:
            continue
        if not any(any(place.glob(word.rstrip("/"))) for place in places):
            yield word


@cache
def all_folders() -> list[Path]:
    tops = ("ds_slide", "kernels", "csrc", "tests", "docs", "benchmarks", "examples")
    return [ROOT, *(folder for top in tops for folder in (ROOT / top).glob("**/"))]


def defines(file: Path, dotted: str) -> bool:
    """Whether a source file defines a name: `function`, `Class`, `Class.method`, or a constant."""
    text = file.read_text(encoding="utf-8")
    if file.suffix not in (".py", ".pyi"):
        return all(re.search(rf"\b{name}\b", text) for name in dotted.split("."))
    inside: list[ast.stmt] = ast.parse(text).body
    for name in dotted.split("."):
        found = next((node for node in inside if name in names_of(node)), None)
        if found is None:
            return False
        inside = found.body if isinstance(found, ast.ClassDef) else []
    return True


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement gives a value."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        return {node.name} | (attributes if node.name == "__init__" else set())
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def missing_names(text: str) -> Iterator[str]:
    """Names that `text` cites, of `ds_slide` or of a file before them, and that nothing defines."""
    for span in re.findall(r"`([^`]+)`", text):
        yield from (name for name in DOTTED.findall(span) if not is_setting(name) and not is_in_source(name))
    for path, names in DEFINED.findall(text):
        files = [place / path for place in (ROOT, ROOT / "ds_slide") if (place / path).exists()]
        for name in re.findall(r"`([\w.]+)`", names):
            if not any(defines(file, name) for file in files):
                yield f"{path}: {name}"


def is_setting(dotted: str) -> bool:
    settings = SlideConfig.model_validate({"compression": {"type": "lsp"}}).model_dump()
    for name in dotted.split(".")[1:]:
        if not isinstance(settings, dict) or name not in settings:
            return False
        settings = settings[name]
    return True


def is_in_source(dotted: str) -> bool:
    names = dotted.split(".")
    for count in range(len(names), 0, -1):
        place = ROOT.joinpath(*names[:count])
        files = [place.with_suffix(suffix) for suffix in (".py", ".pyi")] + [place / "__init__.py"]
        if file := next((file for file in files if file.exists()), None):
            return count == len(names) or defines(file, ".".join(names[count:]))
    return False


@pytest.mark.parametrize("page", LINKING, ids=by_name)
def test_fences_are_closed(page: Path) -> None:
    assert not unclosed(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", LINKING, ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", CITING, ids=by_name)
def test_what_a_page_cites_exists(page: Path) -> None:
    text = prose(page)
    assert sorted({*missing_files(page, text), *missing_names(text)}) == []


def test_pages_that_the_source_cites_exist() -> None:
    """With the heading that stands behind them: `docs/page.md`, "Heading"."""
    missing = []
    for file in sorted((ROOT / "ds_slide").rglob("*.py")):
        for name, heading in re.findall(r'docs/([\w.]+\.md)`?(?:, "([^"]+)")?', file.read_text(encoding="utf-8")):
            page = ROOT / "docs" / name
            if not page.exists() or (heading and f"# {heading}\n" not in prose(page)):
                missing.append(f"{file.name}: {name} {heading}")
    assert missing == []


@pytest.mark.parametrize(
    "text",
    [
        "`ds_slide/runtime/nowhere.py`",
        "`runtime/nowhere.py`",
        "`nowhere.py`",
        "`tests/nowhere/`",
        "`ds_slide.runtime.nowhere`",
        "`ds_slide.no_setting`",
        "`runtime/engine.py` (`SlideRuntime`, `SlideRuntime.nowhere`)",
        "`csrc/update/types.hpp` (`NOWHERE`)",
    ],
)
def test_what_does_not_exist_is_found(text: str) -> None:
    assert [*missing_files(ROOT / "README.md", text), *missing_names(text)]


def test_a_fence_that_is_left_open_is_found() -> None:
    assert unclosed("```\ncode\n```\ntext\n```\n")
