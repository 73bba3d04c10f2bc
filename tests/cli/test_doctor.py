"""`ds-slide doctor` on this machine, end to end, and what it says of others."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from setuptools.config.pyprojecttoml import load_file

from ds_slide.cli.doctor import ceilings
from ds_slide.cli.doctor.command import findings, package
from ds_slide.errors import SlideError
from ds_slide.plan import kept_ceilings
from ds_slide.plan.ceilings import Ceilings, DiskCeilings, preset_names, read_ceilings
from ds_slide.report import tested
from ds_slide.report.tested import TESTED

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_this_machine_once(
    ds_slide: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = time.monotonic()
    first = ds_slide("doctor", "--json", "--path", tmp_path)
    assert time.monotonic() - begin < 60
    answer = first.answer
    assert (first.code, answer["schema"], answer["can_run"]) == (0, 1, True)
    assert set(answer) == {"schema", "can_run", "findings", "versions", "ceilings"}
    assert {"name", "state", "advice", "fatal"} == set(answer["findings"][0])
    named = {each["name"] for each in answer["findings"]}
    assert {
        "accelerator",
        "page-locked memory",
        "NUMA",
        "disk requests",
        f"disk {tmp_path}",
        "process",
        *TESTED,
    } <= named
    found = Ceilings.model_validate(answer["ceilings"])
    assert found.gpu is None and found.cpu.product_tflop_s and [disk.path for disk in found.disks] == [str(tmp_path)]
    assert list(tmp_path.iterdir()) == [] and found.process_bytes and 200e6 < found.process_bytes < 4e9

    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(ceilings, "cpu_ceilings", measured)
    monkeypatch.setattr(ceilings, "disk_ceilings", measured)
    monkeypatch.setattr(ceilings, "measure_process", measured)
    again = ds_slide("doctor", "--json", "--path", tmp_path)
    assert again.answer["ceilings"] == answer["ceilings"]
    with pytest.raises(AssertionError, match="measured again"):
        ds_slide("doctor", "--refresh", "--path", tmp_path)


@pytest.mark.slow
def test_a_process_that_fails_is_told_in_one_sentence_and_tried_again(
    ds_slide: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(**_: Any) -> int:
        if fails:
            raise SlideError("ImportError: no such luck")
        return 345_000_000

    def told() -> tuple[int | None, dict[str, Any]]:
        ran = ds_slide("doctor", "--json", "--path", tmp_path)
        (finding,) = [each for each in ran.answer["findings"] if each["name"] == "process"]
        assert (ran.code, ran.answer["can_run"]) == (0, True)
        return ran.answer["ceilings"]["process_bytes"], finding

    before, _ = ceilings.of_this_machine()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ceilings, "measure_process", process)
    monkeypatch.setattr(ceilings, "cpu_ceilings", lambda *_, **__: before.cpu)
    disk = {"read_gb_s": 1, "write_gb_s": 1, "mixed_gb_s": 1, "direct": True, "backend": "threads"}
    found = DiskCeilings(path=str(tmp_path), **disk)
    monkeypatch.setattr(ceilings, "disk_ceilings", lambda _: found)

    fails = True
    nbytes, finding = told()
    assert nbytes is None and finding["state"] == "not measured (ImportError: no such luck)" and finding["advice"]
    # A plan does not pay for it again, and doctor does, for who has mended it.
    fails = False
    assert ceilings.of_this_machine()[0].process_bytes is None
    nbytes, finding = told()
    assert nbytes == 345_000_000 and finding["state"].startswith("0.34 GB") and not finding["advice"]
    assert ceilings.of_this_machine()[0].process_bytes == 345_000_000

    # A file of before is read without what it has of the host's time.
    (file,) = kept_ceilings.folder().iterdir()
    kept = json.loads(file.read_text())
    kept["ceilings"]["engine_operation_s"] = 7e-5
    file.write_text(json.dumps(kept))
    monkeypatch.setattr(ceilings, "measure_process", lambda **_: 456_000_000)
    assert ceilings.of_this_machine()[0].process_bytes == 345_000_000

    monkeypatch.setattr(
        "ds_slide.cli.doctor.command.installed_version",
        lambda name: None if name == "transformers" else tested.installed_version(name),
    )
    assert "without transformers, which is not installed" in told()[1]["state"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_are_measured_alone_and_at_once(
    ranks: int,
    ds_slide: Callable[..., Any],
    config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = ds_slide("doctor", "--json", "--path", tmp_path, "--ranks", ranks)
    found = Ceilings.model_validate(ran.answer["ceilings"])
    measured = found.measured(ranks)
    assert measured is not None and [*tmp_path.iterdir()] == []
    assert set(measured.least.named()) == {"copy_gb_s", "product_tflop_s", "update_gb_s", str(tmp_path)}
    assert [each.ranks for each in measured.pairs] == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    named = {each["name"]: each["state"] for each in ran.answer["findings"]}
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == ranks:
        assert [named[f"rank {rank} of {ranks}"] for rank in range(ranks)] == [f"cores {core}" for core in cores]
    assert "; beside one other rank the slowest keeps " in named["copies of ranks"]
    text = ds_slide("doctor", "--path", tmp_path, "--ranks", ranks).out  # kept, as the next lines are
    assert text.count(f"{ranks} ranks at once") == 4 and "GB/s a rank (alone " in text

    def again(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(ceilings, "measure_ranks", again)
    kept, _ = ceilings.of_this_machine([tmp_path])
    assert ceilings.with_ranks(kept, ranks).measured(ranks) == measured
    with pytest.raises(AssertionError, match="measured again"):
        ceilings.with_ranks(kept, ranks + 1)
    # A plan has these rates.
    file = tmp_path / "here.json"
    file.write_text(ran.out)
    path = config(ds_slide={"enabled": True, "update_passes": 1})
    model = Path(__file__).parent / "two_blocks"
    options = ("plan", "--deepspeed_config", path, "--model", model, "--seq", 64, "--json", "--ceilings", file)
    one, several = (ds_slide(*options, "--ranks", count).answer for count in (1, ranks))
    assert any(f"the slowest of {ranks} ranks that were measured at once" in note for note in several["notes"])
    # A rank updates its part of the states, at its own rate.
    longer = found.cpu.update_gb_s / measured.least.update_gb_s / ranks
    assert several["lanes"]["update"] == pytest.approx(longer * one["lanes"]["update"], rel=0.01)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_is_named(
    ds_slide: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds_slide("doctor", "--path", tmp_path)
    fails = tmp_path / "fails"  # which a process of a rank finds where it looks for the disk
    kept, _ = ceilings.of_this_machine([tmp_path])
    disks = (kept.disks[0].model_copy(update={"path": str(fails)}),)
    monkeypatch.setattr(ceilings, "of_this_machine", lambda *_, **__: (kept.model_copy(update={"disks": disks}), ""))
    ran = ds_slide("doctor", "--json", "--path", tmp_path, "--ranks", 2)
    (told,) = [each for each in ran.answer["findings"] if each["name"] == "2 ranks at once"]
    assert ran.code == 0 and re.fullmatch(r"not measured \(rank [01]: .*No such file or directory.*\)", told["state"])
    assert "`ds-slide plan` divides" in told["advice"]


def test_more_ranks_than_gpus_are_refused(ds_slide: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "gpu_count", lambda: 2)
    ran = ds_slide("doctor", "--ranks", 3)
    assert ran.code == 1 and "--ranks is 3, but this machine has 2 GPUs; name at most 2" in ran.error


@pytest.mark.parametrize("package", ["transformers", "deepspeed"])
def test_other_versions_of_the_libraries_are_measured_again(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_ceilings.machine_key()
    monkeypatch.setattr(kept_ceilings, "installed_version", lambda name: "0.1" if name == package else before[name])
    assert kept_ceilings.machine_key() == {**before, package: "0.1"} != before


def test_a_file_of_doctor_are_ceilings(ds_slide: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(ds_slide("doctor", "--json", "--path", tmp_path).out)
    assert read_ceilings(str(file)).cpu.update_gb_s > 0


@pytest.mark.parametrize("name", preset_names())
def test_presets_can_be_read(name: str) -> None:
    found = read_ceilings(name)
    assert found.gpu is not None and found.source


def test_a_path_that_is_not_there_is_refused(ds_slide: Callable[..., Any], tmp_path: Path) -> None:
    ran = ds_slide("doctor", "--path", tmp_path / "no")
    assert ran.code == 1 and "cannot be measured" in ran.error
    assert not (tmp_path / "no").exists()


def test_a_missing_c_compiler_is_told_for_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = (each for each in findings() if each.name == "C compiler")
    assert found.state == "none on the PATH" and not found.fatal and "apt-get install gcc" in found.advice
    (tmp_path / "clang").touch(mode=0o700)
    (found,) = (each for each in findings() if each.name == "C compiler")
    assert (found.state, found.advice) == (str(tmp_path / "clang"), "")


@pytest.mark.parametrize(
    ("installed", "fatal", "advice"),
    [
        (None, True, 'pip install "torch>=2.8"'),
        ("2.7.1", True, 'pip install "torch>=2.8"'),
        ("2.13.0+cpu", False, ""),
        ("2.14.0.dev20261101", False, "newer than tested; where it fails, pip install torch==2.13.0"),
    ],
)
def test_what_is_said_of_versions(installed: str | None, fatal: bool, advice: str) -> None:
    found = package("torch", tested.Tested("2.13.0", ">=2.8", needed=True), installed)
    assert (found.fatal, found.advice) == (fatal, advice)


def test_without_what_it_needs_ds_slide_cannot_run(
    ds_slide: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_slide.cli.doctor.command.TESTED", {"no-such-package": tested.Tested("1", needed=True)})
    ran = ds_slide("doctor", "--json")
    assert ran.code == 1 and ran.answer["can_run"] is False and ran.answer["ceilings"] is None


def test_the_versions_are_those_of_the_tests() -> None:
    pinned = {}
    for name in ("requirements/torch.txt", "requirements/test.txt", "tests/clients/requirements-trl.txt"):
        pinned.update(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE))
    assert {name: pinned[name] for name in TESTED} == {name: each.version for name, each in TESTED.items()}


def test_the_accepted_versions_are_those_of_the_package() -> None:
    project = load_file(ROOT / "pyproject.toml")["project"]
    listed = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["hf"]])
    accepted = {required.name: required.specifier for required in listed}
    for name, each in TESTED.items():
        if each.accepted:
            assert Requirement(f"{name}{each.accepted}").specifier == accepted[name]
