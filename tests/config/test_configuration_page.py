"""docs/configuration.md is what its script makes of the schema, and its table can be read as it is."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

from ds_slide.config import SlideConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("<!-- begin of the generated table -->")[2].partition("<!-- end of the generated table -->")[0]


def test_the_page_is_as_its_script_writes_it() -> None:
    made = runpy.run_path(str(DOCS / "make_configuration.py"))["page"](PAGE)
    assert made == PAGE, "run python docs/make_configuration.py"


def test_it_lists_every_setting_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `([\w.]+)` +\| `(.*?)` +\| .+ \|$", TABLE, flags=re.MULTILINE))
    expected = {"compression": None}
    settings = SlideConfig.model_validate({"compression": {"type": "lsp"}})
    for name, value in json.loads(settings.model_dump_json(exclude={"compression": {"type"}})).items():
        nested = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        expected.update(nested)
    assert {name: json.loads(default) for name, default in listed.items()} == expected


def test_every_setting_of_the_table_has_its_details() -> None:
    assert re.findall(r"^\| `([\w.]+)`", TABLE, flags=re.MULTILINE) == re.findall(r"^### (\S+)$", PAGE, re.MULTILINE)


def test_a_line_of_the_table_fits_a_screen() -> None:
    lines = TABLE.strip().splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 120
