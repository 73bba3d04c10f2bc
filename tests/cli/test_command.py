"""`ds-slide` as a process, and what the installed command calls."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import load_file

from ds_slide import __version__, _native
from ds_slide.cli.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((sys.executable, *command), cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [("ds_slide.cli", "--version"), ("ds_slide",)])
def test_version_names_what_a_report_needs(command: tuple[str, ...]) -> None:
    found = run("-m", *command)
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    gpus = lines.pop(-3)
    assert gpus.startswith("GPUs: ") and ("driver" in gpus or " x " in gpus)
    engine = _native.IoEngine("auto", 1, 4096)
    assert lines == [
        f"ds-slide {__version__}",
        *(f"{package} {version(package)}" for package in ("torch", "deepspeed", "triton")),
        f"python {platform.python_version()}",
        f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()}, {platform.machine()}",
        f"native module: updates in {_native.isa()}, checksums in {_native.sum_isa()}",
        f"files: by {engine.backend}",
    ]


@pytest.mark.parametrize("arguments", [("--help",), ()])
def test_help_comes_without_torch(arguments: tuple[str, ...]) -> None:
    found = run("-X", "importtime", "-m", "ds_slide.cli", *arguments)
    assert found.returncode == 0 and found.stdout.startswith("usage: ds-slide") and "--version" in found.stdout
    imported = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert "ds_slide.cli.trace" in imported and not {"torch", "deepspeed", "ds_slide._native"} & imported


def test_an_unknown_option_is_refused() -> None:
    found = run("-m", "ds_slide.cli", "--versoin")
    assert found.returncode == 2 and "unrecognized arguments: --versoin" in found.stderr


def test_the_console_script_is_this_command() -> None:
    scripts = load_file(ROOT / "pyproject.toml")["project"]["scripts"]
    assert EntryPoint("ds-slide", scripts["ds-slide"], "console_scripts").load() is main
