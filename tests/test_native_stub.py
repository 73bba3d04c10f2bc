"""`_native.pyi`, written by hand for its docstrings, has the names, parameters and defaults of the built module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_slide import _native

STUB = Path(_native.__file__).with_name("_native.pyi")
SIGNATURE = re.compile(r"^(?:\d+\. )?(\w+)\((.*)\) -> ", re.M)

Signature = tuple[str, ...]
"""Its parameters as "name" or "name=default"."""


def _signature(arguments: ast.arguments) -> Signature:
    named = [*arguments.posonlyargs, *arguments.args]
    values = [ast.literal_eval(each) for each in arguments.defaults]
    # pybind11 writes an empty sequence as a list; a stub has a tuple there, which cannot change.
    values = [list(value) if isinstance(value, tuple) else value for value in values]
    defaults = [None] * (len(named) - len(values)) + values
    return tuple(
        each.arg if default is None and number < len(named) - len(arguments.defaults) else f"{each.arg}={default!r}"
        for number, (each, default) in enumerate(zip(named, defaults, strict=True))
    )


def _of_stub(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Signature]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, ("class",)
            yield from _of_stub(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.name != "__buffer__":  # of the type, not a method, before 3.12
            is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
            yield f"{prefix}{node.name}", ("property",) if is_property else _signature(node.args)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not prefix:
            yield node.target.id, ("constant",)


def _of_docstring(function: Any) -> Iterator[Signature]:
    """One for each overload. Types are those of C++ and differ from the stub's."""
    for _, parameters in SIGNATURE.findall(function.__doc__):
        tree = ast.parse(f"def f({re.sub(r'ds_slide[.]_native[.]', '', parameters)}): ...").body[0]
        assert isinstance(tree, ast.FunctionDef)
        yield _signature(tree.args)


def _of_module(names: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Signature]]:
    for name, each in names.items():
        is_hidden = name.startswith("_") and name != "__init__"
        if is_hidden or type(each).__name__ == "wrapper_descriptor":  # object's own: no constructor
            continue
        if isinstance(each, type):
            yield name, ("class",)
            yield from _of_module(dict(vars(each)), f"{name}.")
        elif isinstance(each, property):
            yield f"{prefix}{name}", ("property",)
        elif isinstance(each, int):
            yield name, ("constant",)
        else:
            for signature in _of_docstring(each.__func__ if isinstance(each, staticmethod) else each):
                yield f"{prefix}{name}", signature


def difference(stub: str, module: dict[str, Any]) -> set[tuple[str, Signature]]:
    """What only one of them has."""
    return set(_of_stub(ast.parse(stub).body)) ^ set(_of_module(module))


def test_the_stub_is_the_module() -> None:
    assert difference(STUB.read_text(), vars(_native)) == set()


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("def try_lease(self)", "def try_rent(self)"),
        ("def publish(self, index: int, value: int)", "def publish(self, value: int, index: int)"),
        ("seed: int = 0,", "seed: int = 1,"),
        ("descriptor: int, offset: int, nbytes: int", "descriptor: int, nbytes: int"),
        ("    @property\n    def backend", "    def backend"),
    ],
)
def test_a_stub_that_says_something_else_is_seen(written: str, instead: str) -> None:
    stub = STUB.read_text()
    assert written in stub
    assert difference(stub.replace(written, instead), vars(_native))
