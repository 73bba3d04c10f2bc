"""`ds-slide check` and `ds-slide convert`: a DeepSpeed JSON before any run."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_slide.errors import SlideError

CONFIG_KEY = "ds_slide"  # that of ds_slide.config, whose import takes pydantic


def add_arguments(check: argparse.ArgumentParser, convert: argparse.ArgumentParser) -> None:
    """Declare the options of the two commands."""
    check.description = "Say whether DS-Slide accepts a DeepSpeed JSON, with everything that it would refuse."
    check.epilog = (
        "Exit code: 0 where it is accepted, else 1. The model, the script's optimizer and values that are "
        '"auto" are not known here; ds-slide plan also knows the model.'
    )
    check.add_argument("file", metavar="FILE", help="the JSON of the run")
    convert.description = (
        f'Show how a DeepSpeed JSON becomes one for DS-Slide: with the key "{CONFIG_KEY}", and without the settings of '
        "stock's engine that it replaces."
    )
    convert.epilog = "Exit code: 0 where the result is accepted, else 1. Without --write nothing is written."
    convert.add_argument("file", metavar="FILE", help="the JSON of a run on stock DeepSpeed")
    convert.add_argument("--write", metavar="FILE", dest="out", help="write the result there; it may be the same file")


def run_check(arguments: argparse.Namespace, lines: list[str]) -> int:
    """Append the answer to `lines`. Return 0 for a JSON that is accepted. Raises SlideError for what is no JSON."""
    raw, _ = read(arguments.file)
    block = raw.get(CONFIG_KEY)
    if CONFIG_KEY not in raw or (isinstance(block, Mapping) and block.get("enabled", False) is False):
        state = "has no key" if CONFIG_KEY not in raw else 'has no "enabled": true in'
        lines.append(
            f'{arguments.file}: stock DeepSpeed runs it, because it {state} "{CONFIG_KEY}"; ds-slide convert adds '
            "that. With it:"
        )
        _judge(arguments.file, raw, lines)
        return 1
    return _judge(arguments.file, raw, lines)


def run_convert(arguments: argparse.Namespace, lines: list[str]) -> int:
    """Append changes, diff and verdict to `lines`. Return 0 where the result is accepted. Raises SlideError for what is
    no JSON."""
    from ds_slide.integration.json_check import converted

    raw, is_plain = read(arguments.file)
    made, notes = converted(raw)
    before, after = _text(raw), _text(made)
    if not notes:
        lines.append(f"{arguments.file}: nothing to change")
    else:
        lines += [f"* {note}" for note in notes]
        diff = difflib.unified_diff(
            before.splitlines(), after.splitlines(), arguments.file, arguments.out or arguments.file, lineterm=""
        )
        lines += ["", *diff, ""]
    if arguments.out and notes:
        _write(Path(arguments.out), after, loses_comments=not is_plain and _is_same(arguments.out, arguments.file))
        lines.append(f"{arguments.out}: written")
    return _judge(arguments.out or arguments.file, made, lines)


def read(path: str) -> tuple[dict[str, Any], bool]:
    """Return the object in a file as DeepSpeed reads it, and whether it is plain JSON: DeepSpeed also takes comments
    and commas at the end. Raises SlideError for anything else."""
    import hjson  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SlideError(f"{path} cannot be read ({error}); name the DeepSpeed JSON of the run") from None
    try:
        found = hjson.loads(text, object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise SlideError(f"{path} is not JSON ({error}); DeepSpeed would refuse it as well") from None
    if not isinstance(found, dict):
        raise SlideError(f"{path} is not a JSON object, as a DeepSpeed config is")
    try:
        return json.loads(text), True
    except ValueError:
        return found, False


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the key "{twice}" stands there twice')
    return found


def _judge(name: str, raw: Mapping[str, Any], lines: list[str]) -> int:
    from ds_slide.integration.json_check import refusals

    found = refusals(raw)
    if not found:
        lines.append(f"{name}: accepted")
        return 0
    lines.append(f"{name}: refused, for {len(found)} reason{'s' if len(found) > 1 else ''}")
    lines += [f"* {sentence}" for sentence in found]
    return 1


def _text(raw: Mapping[str, Any]) -> str:
    return json.dumps(raw, indent=2, ensure_ascii=False) + "\n"


def _is_same(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.samefile(one, other)


def _write(path: Path, text: str, *, loses_comments: bool) -> None:
    if loses_comments:
        raise SlideError(
            f"{path} has comments, or a form that only DeepSpeed's reader knows, and they would be lost; write the "
            "result to another file"
        )
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise SlideError(f"{path} cannot be written ({error}); name another file") from None
