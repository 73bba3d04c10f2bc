"""Tables, index and pages of results agree, and no page is kept that nothing cites."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import results_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md", RESULTS / "README.md"]


def index() -> list[dict[str, str]]:
    with open(RESULTS / "index.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("path", results_tables.TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_written_from_the_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    made = results_tables.filled(text, results_tables.TABLES[path], results_tables.read_index())
    assert made == text, "run python3 benchmarks/results_tables.py"


def test_every_figure_stands_on_its_page() -> None:
    pages = {path.name: path.read_text(encoding="utf-8").replace(",", "") for path in RESULTS.glob("*.md")}
    assert len(index()) > 100
    for line in index():
        assert re.search(rf"(?<![\d.]){re.escape(line['figure'])}(?![\d.]\d)", pages[line["file"]]), line
        assert line["file"].startswith(f"{line['date']}_{line['machine']}_") and line["command"]


def test_no_figure_stands_twice() -> None:
    keys = [(line["system"], line["case"], line["setting"], line["file"], line["unit"]) for line in index()]
    assert len(keys) == len(set(keys))


def test_what_is_kept_is_cited() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in TEXTS)
    cited = {name for before in ("results/", r"\]\(") for name in re.findall(rf"{before}([\w.\-]+)", texts)}
    kept = {path.name for path in RESULTS.iterdir()} - {"README.md", "index.csv"}
    assert kept - cited == set()
