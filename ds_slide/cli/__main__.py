"""The options of `ds-slide`. This module does not import torch, which takes seconds: the commands do, once they run."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_slide import __version__
from ds_slide.cli import json_files, trace
from ds_slide.errors import SlideError
from ds_slide.report.tested import installed_version

BESIDE = ("torch", "deepspeed", "triton")
"""Packages whose versions the report of a fault needs."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments` (None: the process's own). Raises SystemExit with the code of a command."""
    parser = argparse.ArgumentParser(
        prog="ds-slide",
        description='DS-Slide, an offload engine for DeepSpeed that the JSON key "ds_slide" switches on.',
        epilog="What a report of a fault needs: the output of ds-slide --version, the JSON and the whole message.",
    )
    parser.add_argument("--version", action="store_true", help="print the versions of DS-Slide and what it runs on")
    commands = parser.add_subparsers(title="commands", dest="command")
    _doctor_options(commands.add_parser("doctor", help="measure this machine, and say what is missing"))
    _plan_options(
        commands.add_parser("plan", help="say what a JSON and a model will take, and how long a step will be")
    )
    json_files.add_arguments(
        commands.add_parser("check", help="say whether a JSON is accepted, with everything that is refused"),
        commands.add_parser("convert", help="add the key to a JSON of stock DeepSpeed, and drop what it replaces"),
    )
    trace.add_arguments(commands.add_parser("trace", help="say what a recorded step did and waited for"))
    given = parser.parse_args(arguments)
    if given.version:
        print("\n".join(versions()))
    elif given.command:
        raise SystemExit(_run(given))
    else:
        parser.print_help()


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure what this machine can do, in seconds, and say what is missing and what to do about it."
    )
    parser.epilog = "Exit code: 0, or 1 where DS-Slide cannot run here."
    parser.add_argument("--json", action="store_true", help="answer with a JSON object")
    parser.add_argument("--path", action="append", default=[], metavar="DIR", help="a directory on a disk for states")
    parser.add_argument(
        "--ranks", type=_positive, help="measure so many ranks at once, too; by default as many as there are GPUs"
    )
    parser.add_argument("--refresh", action="store_true", help="measure again what was measured before")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say what a DeepSpeed JSON and a model will take in every tier, and how long a step will be."
    parser.epilog = "Exit code: 0 where it fits, 1 where it does not or cannot be planned, 2 for wrong options."
    config = parser.add_mutually_exclusive_group(required=True)
    # Without SUPPRESS a positional argument that is not given would overwrite the option's value.
    config.add_argument("deepspeed_config", nargs="?", metavar="FILE", default=argparse.SUPPRESS, help="a JSON")
    config.add_argument("--deepspeed_config", metavar="FILE", default=argparse.SUPPRESS, help="the same")
    parser.add_argument("--model", required=True, help="a preset, or a directory with Hugging Face's config.json")
    parser.add_argument(
        "--lora",
        "--adapter",
        dest="adapter",
        metavar="ADAPTER",
        help="LoRA's rank on all linear layers, or a directory with PEFT's config",
    )
    parser.add_argument(
        "--quantization",
        choices=("none", "nf4", "nf4-double", "nf4-experts", "int8", "fp8"),
        default="none",
        help="how the frozen weights are packed, with --lora",
    )
    parser.add_argument("--batch", type=_positive, help="sequences of a micro-batch; those of the JSON by default")
    parser.add_argument("--seq", type=_positive, required=True, help="tokens of a sequence")
    parser.add_argument("--ranks", type=_positive, default=1, help="GPUs of the machine (1 by default)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help='memory of a GPU, such as "24GiB"')
    parser.add_argument("--host-memory", metavar="SIZE", help="host memory for the run")
    parser.add_argument("--nvme-memory", metavar="SIZE", help="room on the SSD")
    parser.add_argument("--ceilings", metavar="FILE", help="a preset, or what `ds-slide doctor --json` has written")
    parser.add_argument(
        "--no-checkpointing",
        action="store_true",
        help='the script does no gradient checkpointing (matters with "activations": "as_written")',
    )
    parser.add_argument("--fit", action="store_true", help="say first whether it fits, and with which batch")
    parser.add_argument("--json", action="store_true", help="answer with a JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the plan, for instance as plan.png")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _run(given: argparse.Namespace) -> int:
    """Run a command and return its exit code. Libraries print to the error stream, so that the answer is alone. Lines
    that were answered before a refusal are printed before it."""
    lines: list[str] = []
    try:
        with contextlib.redirect_stdout(sys.stderr):
            run: Any
            if given.command == "doctor":
                from ds_slide.cli.doctor.command import run
            elif given.command == "plan":
                from ds_slide.cli.planning.command import run
            elif given.command in ("check", "convert"):
                run = json_files.run_check if given.command == "check" else json_files.run_convert
            else:
                run = trace.run
            code = int(run(given, lines))
    except SlideError as error:
        _print(lines)
        print(f"ds-slide {given.command}: {error}", file=sys.stderr)
        return 1
    _print(lines)
    return code


def _print(lines: Sequence[str]) -> None:
    """Print the lines. A reader that stops early, such as `head`, is no fault."""
    try:
        print("\n".join(lines), end="\n" if lines else "", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains of it at its end


def versions() -> Iterator[str]:
    """Yield a line each for DS-Slide, the packages beside it, Python, and what of the machine an engine uses."""
    yield f"ds-slide {__version__}"
    for package in BESIDE:
        yield f"{package} {installed_version(package) or 'is not installed'}"
    yield f"python {platform.python_version()}"
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
    yield f"cores: {usable} of {there}, {platform.machine()}"
    gpus = sorted(_gpus())
    yield f"GPUs: {', '.join(f'{gpus.count(name)} x {name}' for name in dict.fromkeys(gpus)) or 'no driver of NVIDIA'}"
    yield from _native_module()


def _gpus() -> Iterator[str]:
    """Yield the model of each GPU that NVIDIA's driver names. To ask torch would take seconds."""
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with contextlib.suppress(OSError):
            models = [line.partition(":")[2] for line in path.read_text().splitlines() if line.startswith("Model:")]
            yield from (model.strip() for model in models)


def _native_module() -> Iterator[str]:
    try:
        from ds_slide import _native
    except ImportError as error:
        yield f"native module: cannot be loaded ({error})"
        return
    yield f"native module: updates in {_native.isa()}, checksums in {_native.sum_isa()}"
    try:
        engine = _native.IoEngine("auto", 1, 4096, burst_bytes=0)
    except (RuntimeError, OSError) as error:
        yield f"files: {' '.join(str(error).split())}"
        return
    yield f"files: by {engine.backend}"
    engine.close()


if __name__ == "__main__":
    main()
