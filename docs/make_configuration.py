"""Writes the table and the details of docs/configuration.md from the settings' own schema and docstrings.

python docs/make_configuration.py

The first paragraph of a docstring is a cell of the table; the others are the details.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from ds_slide.config import schema

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- begin of the generated {} -->", "<!-- end of the generated {} -->"
WIDTH = 120


@dataclass(frozen=True)
class Setting:
    """`value`: what is accepted. `default`: as JSON, empty for a setting that must be given."""

    key: str
    value: str
    default: str
    meaning: str
    details: str


def meanings(model: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """The text under each field in the source: its first paragraph, and the rest on one line."""
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            raise ValueError(f"{model.__name__}.{field.target.id} has no docstring below it")
        first, _, rest = inspect.cleandoc(str(text.value.value)).partition("\n\n")
        found[field.target.id] = " ".join(first.split()), " ".join(rest.split())
    return found


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every setting, nested ones by their path."""
    texts = meanings(model)
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))  # an object, or an object or null
        nested = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)]
        if field.annotation not in nested:
            default = "" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
            yield Setting(f"{prefix}{name}", field.description or "", default, *texts[name])
        for each in nested:
            yield from settings(each, f"{prefix}{name}.")


def table() -> str:
    """Padded, so that it can be read as it is."""
    lines = [("key", "default", "meaning")]
    for each in settings(schema.SlideConfig):
        lines.append((f"`{each.key}`", f"`{each.default}`" if each.default else "required", each.meaning))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    lines.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2]))
    padded = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(f"| {line} |" for line in padded)


def details() -> str:
    sections = []
    for each in settings(schema.SlideConfig):
        default = f"Default: `{each.default}`." if each.default else "It must be given."
        paragraphs = f"Value: {each.value}. {default}", f"{each.meaning} {each.details}".rstrip()
        sections.append("\n\n".join([f"### {each.key}", *map(_wrapped, paragraphs)]))
    return "\n\n".join(sections)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def page(present: str) -> str:
    """`present` with table and details as they are now."""
    for name, make in (("table", table), ("details", details)):
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = present.split(begin)
        present = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return present


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
