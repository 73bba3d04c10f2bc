"""The packages beside DS-Slide: the versions that it accepts, the versions of its tests, and those that are here.

tests/cli compares this with pyproject.toml, requirements/ and tests/clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Tested:
    """`version`: the tests run with it. `accepted`: a version specifier, "" for any. `needed`: DS-Slide does not run
    without it."""

    version: str
    accepted: str = ""
    needed: bool = False


TESTED: Mapping[str, Tested] = {
    "torch": Tested("2.13.0", ">=2.8", needed=True),
    "deepspeed": Tested("0.19.8", ">=0.19.5,<0.20", needed=True),
    "triton": Tested("3.6.0", ">=3.3"),
    "transformers": Tested("5.24.0", ">=4.51"),
    "accelerate": Tested("1.15.0"),
    "trl": Tested("1.16.0"),
    "peft": Tested("0.21.2"),
}


def installed_version(name: str) -> str | None:
    """Return the version of a package; None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, dict[str, str | None]]:
    """Return the installed, tested and accepted versions by package."""
    return {
        name: {"installed": installed_version(name), "tested": tested.version, "accepted": tested.accepted}
        for name, tested in TESTED.items()
    }
