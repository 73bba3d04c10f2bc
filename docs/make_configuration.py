"""Writes the table of docs/configuration.md from the settings' own schema and docstrings.

python docs/make_configuration.py
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from ds_slide.config import schema

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- begin of the generated table -->", "<!-- end of the generated table -->"


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The text under each field in the source, on one line."""
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
            raise ValueError(f"{model.__name__}.{field.target.id} has no docstring below it")
        found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, what is accepted, default as JSON, meaning) of every setting, nested ones by their path."""
    of = meanings(model)
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))  # an object, or an object or null
        nested = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)]
        if field.annotation not in nested:
            default = "" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", field.description or "", default, of[name]
        for each in nested:
            yield from rows(each, f"{prefix}{name}.")


def table() -> str:
    def line(*cells: str) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [line("key", "value", "default", "meaning"), line("---", "---", "---", "---")]
    for key, value, default, text in rows(schema.SlideConfig):
        lines.append(line(f"`{key}`", value, f"`{default}`" if default else "required", text))
    return "\n".join(lines)


def page(present: str) -> str:
    """`present` with the table as it is now."""
    before, rest = present.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
