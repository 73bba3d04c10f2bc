"""The options of `ds-slide`. Nothing here imports torch: its version stands in the metadata of its package."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from ds_slide import __version__
from ds_slide.cli import trace
from ds_slide.errors import SlideError

BESIDE = ("torch", "deepspeed", "triton")
"""Packages whose versions a report needs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, those of the process if None."""
    parser = argparse.ArgumentParser(
        prog="ds-slide",
        description='DS-Slide, an offload engine for DeepSpeed that the JSON key "ds_slide" switches on.',
        epilog="What a report of a fault needs: the output of ds-slide --version, the JSON and the whole message.",
    )
    parser.add_argument("--version", action="store_true", help="print the versions of DS-Slide and what it runs on")
    actions = parser.add_subparsers(dest="action", metavar="COMMAND")
    trace.add_arguments(actions.add_parser("trace", help="what a recorded step did and waited for"))
    chosen = parser.parse_args(arguments)
    if chosen.version:
        print("\n".join(versions()))
    elif chosen.action == "trace":
        try:
            trace.run(chosen)
        except SlideError as error:
            sys.exit(f"ds-slide trace: {error}")
    else:
        parser.print_help()


def versions() -> Iterator[str]:
    """A line each: DS-Slide, the packages beside it, Python, and what the updates on the CPU are compiled for."""
    yield f"ds-slide {__version__}"
    for package in BESIDE:
        yield f"{package} {_installed(package)}"
    yield f"python {platform.python_version()}"
    yield f"native module: {_instruction_set()}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"


def _instruction_set() -> str:
    try:
        from ds_slide import _native
    except ImportError as error:
        return f"cannot be loaded ({error})"
    return _native.isa()
