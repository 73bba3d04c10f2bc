"""Limits on memory that are lower than what the machine has, set by the kernel to real trainings."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forking import ONE_THREAD

from ds_slide.plan.cgroups import _group_paths, _mounts
from ds_slide.report.log import size

TESTS = Path(__file__).resolve().parents[2]
PATIENCE_S = 280
MIB = 1 << 20
# A minute: four processes that fill memory.
pytestmark = pytest.mark.slow
NAME = f"ds_slide-test-{os.getpid()}"


def make_groups(limit: int) -> tuple[Path, Path] | str:
    """A control group with this limit, and one below it with none: (file of the limit, directory of the lower one).
    Where this user or this kernel makes none: why."""
    root = Path("/")
    paths, mounts = _group_paths(root), _mounts(root)
    tried = []
    for version, file in ((1, "memory.limit_in_bytes"), (2, "memory.max")):
        for mount in mounts[version]:
            # Of version 2, processes are in groups without groups below them only: beside this one's, at the top.
            above = mount.point / paths[1].lstrip("/") if version == 1 else mount.point
            group = above / f"{NAME}-{limit >> 20}"
            try:
                (group / "inner").mkdir(parents=True)
                if version == 2:
                    (group / "cgroup.subtree_control").write_text("+memory")
                (group / file).write_text(str(limit))
                return group / file, group / "inner"
            except OSError as error:
                remove(group)
                tried.append(f"{group}: {error.strerror}")
    return f"no control group with a limit of memory can be made here ({'; '.join(tried) or 'none is mounted'})"


def remove(group: Path) -> None:
    for directory in (group / "inner", group):
        with contextlib.suppress(FileNotFoundError):
            directory.rmdir()


def peak(file: Path) -> int:
    name = "memory.max_usage_in_bytes" if file.name == "memory.limit_in_bytes" else "memory.peak"
    return int((file.parent / name).read_text())


def trained(folder: Path, cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", **ONE_THREAD}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "container_worker.py"), str(folder)],
        input=json.dumps(cases),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    for case in cases:
        assert (folder / f"{case}.status").read_text() == "0", f"{case}\n{done.stdout[-4000:]}"
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


@dataclass
class Runs:
    results: dict[str, dict[str, Any]]
    groups: dict[str, Path]
    """Files of the limits."""
    why_no_groups: str = ""

    def in_group(self, case: str) -> dict[str, Any]:
        if self.why_no_groups:
            pytest.skip(self.why_no_groups)
        return self.results[case]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    cases: dict[str, Any] = {
        "tight space": {"procs": [], "address_space": 1408 * MIB},
        "roomy space": {"procs": [], "address_space": 8192 * MIB},
    }
    groups: dict[str, Path] = {}
    why = ""
    try:
        for case, limit in (("tight", 512 * MIB), ("roomy", 1536 * MIB)):
            made = make_groups(limit)
            if isinstance(made, str):
                why = made
                break
            groups[case], inner = made
            cases[case] = {"procs": [str(inner / "cgroup.procs")], "address_space": None}
        yield Runs(trained(tmp_path_factory.mktemp("runs"), cases), groups, why)
    finally:
        for file in groups.values():
            remove(file.parent)


def test_a_control_group_above_this_one_refuses_before_memory_is_taken(runs: Runs) -> None:
    result, file = runs.in_group("tight"), runs.groups["tight"]
    message = result["error"]
    assert message.startswith("host tier: states, gradients and buffers need 5")
    assert f"are free ({file} is {size(512 * MIB)} and has " in message and "\n" not in message
    assert result["grown"] < 128 * MIB
    assert peak(file) < 512 * MIB


def test_what_fits_the_control_group_trains(runs: Runs) -> None:
    result = runs.in_group("roomy")
    assert "error" not in result and len(result["losses"]) == 1
    # It was in the group, and could not have been in the other. Pages that nothing has written do not count there.
    assert peak(runs.groups["roomy"]) > 0.95 * result["states"] > peak(runs.groups["tight"])


def test_a_limit_of_the_address_space_refuses_before_memory_is_taken(runs: Runs) -> None:
    result = runs.results["tight space"]
    assert "(the limit of address space (ulimit -v) is " in result["error"] and "\n" not in result["error"]
    assert result["grown"] < 128 * MIB


def test_what_fits_the_address_space_trains(runs: Runs) -> None:
    assert len(runs.results["roomy space"]["losses"]) == 1
