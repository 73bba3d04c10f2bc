"""Which room may import which: only those on lower floors, and of DeepSpeed nothing but in `integration`.

Read from the sources, so imports within functions and for type checkers count like all others.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_namespace_packages
from setuptools.config.pyprojecttoml import load_file

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ds_slide"

FLOORS = (
    ("errors", "kernels", "report", "_native"),
    ("config", "model", "optim"),
    ("compression", "store"),
    ("patching", "plan"),
    ("runtime", "checkpoint"),
    ("integration", "cli"),
)
"""From the ground up."""
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ENTRANCES = ("__init__", "__main__", "_autoload", "run")
"""The modules in front of all rooms."""

BESIDE = {
    ("checkpoint", "runtime"): "a checkpoint is made of the units of a running engine, and read into them",
    ("kernels", "errors"): "a kernel refuses what it cannot compute",
    ("report", "errors"): "what cannot be read or written is refused",
    ("cli", "integration"): "a JSON is planned as an engine reads it",
}
"""Imports within one floor, and why: the first of each pair may import the second, never the other way round."""

WITH_DEEPSPEED = ("integration",)


def room_of(module: str) -> str:
    """ "runtime" for "ds_slide.runtime.weights.window"; the module itself for those without a room."""
    return module.split(".")[1] if "." in module else "__init__"


def modules() -> dict[str, Path]:
    """By name. `kernels` is reached through its link, as it is imported."""
    found = {}
    for top in (PACKAGE, ROOT / "kernels"):
        prefix = Path("ds_slide") if top == PACKAGE else Path("ds_slide/kernels")
        for path in top.rglob("*.py"):
            name = ".".join((prefix / path.relative_to(top)).with_suffix("").parts).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = modules()


def python_files(part: str) -> Iterator[Path]:
    return (ROOT / part).rglob("*.py")


def imports(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[str]:
    """The modules that a source imports. `from a import b` is a.b where that is a module of ours, else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            here = parents[: len(parents) - node.level + (1 if is_package else 0)] if node.level else []
            base = ".".join([*here, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in MODULES else base


def imported_by(module: str) -> set[str]:
    path = MODULES[module]
    return set(imports(ast.parse(path.read_text("utf-8")), module, is_package=path.name == "__init__.py"))


def is_forbidden(module: str, imported: str) -> bool:
    top = imported.split(".")[0]
    room = room_of(module)
    if top == "deepspeed":
        return room not in WITH_DEEPSPEED
    if top != "ds_slide" or imported == "ds_slide":  # the package itself: its version
        return False
    if room in ENTRANCES:
        return False
    other = room_of(imported)
    if other == room or (room, other) in BESIDE:
        return False
    return other in ENTRANCES or FLOOR_OF[other] >= FLOOR_OF[room]


def test_every_module_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES} <= {*FLOOR_OF, *ENTRANCES}


def test_a_room_imports_only_rooms_below_it() -> None:
    broken = {(module, name) for module in MODULES for name in imported_by(module) if is_forbidden(module, name)}
    assert not broken, "imports that go up or across: move what is needed down, or hand it in"


def test_imports_within_a_floor_are_needed_and_go_one_way() -> None:
    used = {(room_of(module), room_of(name)) for module in MODULES for name in imported_by(module) if "." in name}
    assert BESIDE.keys() <= used, "no longer needed: take it off BESIDE"
    assert all(FLOOR_OF[one] == FLOOR_OF[other] for one, other in BESIDE)
    assert not {(other, one) for one, other in BESIDE} & BESIDE.keys()


def test_the_core_of_the_runtime_imports_none_of_its_other_rooms() -> None:
    core = "ds_slide.runtime.core"
    inside = [module for module in MODULES if module.startswith(f"{core}.")]
    broken = {
        (module, name)
        for module in inside
        for name in imported_by(module)
        if name.startswith("ds_slide.runtime") and not name.startswith(core)
    }
    assert inside and not broken


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("from ds_slide.runtime import engine", True),
        ("from ds_slide.runtime.engine import SlideRuntime", True),
        ("from ds_slide import runtime", True),
        ("import ds_slide.runtime.engine as engine", True),
        ("def f():\n    from ds_slide.integration import access", True),
        ("if TYPE_CHECKING:\n    from ds_slide.plan.memory import Plan", True),
        ("from ..plan import memory", True),
        ("import deepspeed.comm as dist", True),
        ("def f():\n    from deepspeed import comm", True),
        ("from ds_slide import _autoload", True),
        ("from ds_slide import _native, __version__", False),
        ("from ds_slide.model import layout", False),
        ("from ds_slide.store import state", False),
        ("from . import state_buffers", False),
        ("import torch.distributed", False),
    ],
)
def test_the_rule_sees_every_way_to_import(source: str, is_found: bool) -> None:
    """In a module of the store."""
    module = "ds_slide.store.state"
    assert any(is_forbidden(module, name) for name in imports(ast.parse(source), module)) is is_found


def test_a_room_does_not_import_the_one_beside_it() -> None:
    assert is_forbidden("ds_slide.runtime.engine", "ds_slide.checkpoint.state_buffers")
    assert not is_forbidden("ds_slide.checkpoint.state_buffers", "ds_slide.runtime.engine")
    assert is_forbidden("ds_slide.plan.memory", "ds_slide.patching.apply")


def test_kernels_are_imported_by_one_name() -> None:
    """By another one a module would exist twice, and register its operators twice."""
    files = [path for part in ("ds_slide", "kernels", "tests", "benchmarks", "examples") for path in python_files(part)]
    assert len(files) > len(MODULES)
    named = {path: set(imports(ast.parse(path.read_text("utf-8")), "ds_slide.x.y")) for path in files}
    assert not [path for path, names in named.items() if any(name.split(".")[0] == "kernels" for name in names)]


def test_the_wheel_holds_every_folder() -> None:
    settings = load_file(ROOT / "pyproject.toml")["tool"]["setuptools"]["packages"]["find"]
    packages = find_namespace_packages(str(ROOT), include=settings["include"])
    assert {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in MODULES.items()} <= {
        *packages
    }


def test_no_benchmark_has_the_name_of_a_standard_module() -> None:
    """A script's folder comes first on the path, so that it would be imported instead of that module."""
    assert not {path.stem for path in (ROOT / "benchmarks").glob("*.py")} & sys.stdlib_module_names
