"""Are losses, weights, masters and moments of two commits the same to the bit?

    DS_ACCELERATOR=cpu python tests/identity/identity.py --parent COMMIT [--only REGEX]

checks out COMMIT and HEAD (`--new COMMIT`: another one) in a temporary folder, trains the tiny models of `runs.py` in
both, and compares the bits of losses, norms, fp32 masters, moments and weights. Checkpoints that the parent has saved
are loaded in the new tree, which has to find the same bits there and to go on with the same losses. It prints a table
and exits with 1 on any difference, and when a run fails in either tree. About three minutes on two cores.

Both trees run the files beside this one, and these call what users may call, so that it does not matter what has moved
inside. The engine's constants are as they are: a block of these models is one chunk on SSD and one span of an update.

The built library of this checkout serves a tree whose C++ is the same; another one is built, and kept in
`build/identity` for the next time. With `--wheel FILE` the new tree gets the library of that wheel, so that
`--parent HEAD --wheel FILE` compares two compilers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
LIBRARY = "_native/libds_slide.so"
EXTENSION = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
"""What commits before the C interface have instead."""
NATIVE_SOURCES = ("csrc", "setup.py")
TIMEOUT_S = 900
SHOWN = 4
"""Differences of one run that are printed by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description="compares two commits to the bit")
    parser.add_argument("--parent", required=True, help="the commit that is right by definition")
    parser.add_argument("--new", default="HEAD", help="the commit that is compared with it")
    parser.add_argument("--only", default="", help="regular expression: the runs with such a name")
    parser.add_argument("--wheel", type=Path, help="a wheel whose library the compared commit gets")
    options = parser.parse_args()

    started = time.monotonic()
    if options.new == "HEAD" and git("status", "--porcelain", "--untracked-files=no"):
        print("note: what is not committed takes no part")
    with tempfile.TemporaryDirectory(prefix="identity-") as folder:
        with checked_out(options.parent, Path(folder) / "parent") as parent:
            with checked_out(options.new, Path(folder) / "new", options.wheel) as new:
                results = run_both(parent, new, options.only)
    wrong = table(results)
    print(f"\n{len(results)} results, {wrong} with differences, {time.monotonic() - started:.0f} s")
    sys.exit(1 if wrong or not results else 0)


# ---- trees -----------------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextmanager
def checked_out(commit: str, folder: Path, wheel: Path | None = None) -> Iterator[Path]:
    """A working tree of `commit` with its library, for as long as the context lasts."""
    print(f"{folder.name}: {git('log', '-1', '--format=%h %s', commit)}", flush=True)
    git("worktree", "add", "--detach", str(folder), commit)
    try:
        built = folder / "ds_slide" / library_of(folder)
        if wheel is None:
            shutil.copy2(build_of(folder), built)
        else:
            print(f"  with the library of {wheel.name}", flush=True)
            with zipfile.ZipFile(wheel) as archive:
                built.write_bytes(archive.read(f"ds_slide/{LIBRARY}"))
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def library_of(tree: Path) -> str:
    """Where the sources in `tree` look for their library, below its `ds_slide`."""
    return LIBRARY if (tree / "ds_slide" / LIBRARY).parent.is_dir() else EXTENSION


def build_of(tree: Path) -> Path:
    """A built library of the C++ in `tree`: this checkout's, one that was kept, or a new one."""
    sources, name = native_sources(tree), library_of(tree)
    built = REPOSITORY / "ds_slide" / name
    if built.exists() and sources == native_sources(REPOSITORY) and is_newer(built, REPOSITORY):
        return built
    kept = REPOSITORY / "build" / "identity" / f"{sources}-{Path(name).name}"
    if not kept.exists():
        print(f"  building the library of {tree.name}: its C++ is not that of this checkout's built file", flush=True)
        build = (sys.executable, "setup.py", "build_ext", "--inplace")
        subprocess.run(build, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(tree / "ds_slide" / name, kept)
    return kept


def native_sources(tree: Path) -> str:
    """A hash of the files that the library is built from, as they are in the folder `tree`."""
    listed = subprocess.run(
        ("git", "ls-files", "--", *NATIVE_SOURCES), cwd=tree, check=True, capture_output=True, text=True
    ).stdout.split("\n")[:-1]
    hashes = subprocess.run(
        ("git", "hash-object", "--stdin"),
        cwd=tree,
        input="".join(f"{name}\n{(tree / name).read_text()}" for name in listed),
        check=True,
        capture_output=True,
        text=True,
    )
    return hashes.stdout.strip()[:16]


def is_newer(built: Path, tree: Path) -> bool:
    """Whether no source of `tree` was written after `built`, as a checkout of other sources would."""
    sources = [path for name in NATIVE_SOURCES for path in [tree / name, *(tree / name).rglob("*")]]
    return all(path.stat().st_mtime <= built.stat().st_mtime for path in sources if path.is_file())


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One process: the runs of one number of ranks in one tree."""

    tree: Path
    ranks: int
    only: str
    resume: Path | None = None

    @property
    def out(self) -> Path:
        return self.tree.parent / f"out-{self.tree.name}"

    @property
    def name(self) -> str:
        return f"{'resume' if self.resume else 'train'}-{self.ranks}"

    def start(self) -> subprocess.Popen[bytes]:
        self.out.mkdir(exist_ok=True)
        command = [sys.executable, str(HERE / "worker.py"), "--tree", str(self.tree), "--ranks", str(self.ranks)]
        command += ["--out", str(self.out), "--only", self.only]
        command += ["--resume", str(self.resume)] if self.resume else []
        apart = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**apart, **threads, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(self.tree)}
        with (self.out / f"{self.name}.log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=self.out, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for `process`; a run that fails ends the comparison with the end of its log."""
        try:
            code: int | str = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"no end after {TIMEOUT_S} s"
        if code:
            log = (self.out / f"{self.name}.log").read_text(errors="replace")
            sys.exit(f"{log[-4000:]}\n{self.name} in {self.tree.name} failed ({code}); the last lines above say why")

    def records(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / f"{self.name}-{rank}.json").read_text())
        return found


def run_together(*jobs: Job) -> None:
    processes = [job.start() for job in jobs]
    try:
        for job, process in zip(jobs, processes, strict=True):
            job.finish(process)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):  # which is so after a run that has ended well
                os.killpg(process.pid, signal.SIGKILL)


def run_both(parent: Path, new: Path, only: str) -> dict[str, tuple[Any, Any]]:
    """What both trees give, by the name of the run; at most two processes compute at a time."""
    results: dict[str, tuple[Any, Any]] = {}
    for ranks in (1, 2):
        old, young = Job(parent, ranks, only), Job(new, ranks, only)
        for jobs in [(old, young)] if ranks == 1 else [(old,), (young,)]:
            run_together(*jobs)
        again = Job(new, ranks, only, resume=old.out)
        run_together(again)
        for rank in range(ranks):
            where = f" [{rank}]" if ranks > 1 else ""
            before, after, resumed = (job.records(rank) for job in (old, young, again))
            results |= {f"{title}{where}": (before[title], after[title]) for title in before}
            for title, record in resumed.items():
                continued = {part: before[title][part] for part in record}
                results[f"{title}{where}: parent's checkpoint"] = (continued, record)
    return results


# ---- comparison ------------------------------------------------------------------------------------------------------


def flat(record: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries and lists, by path."""
    if isinstance(record, dict):
        items = [(str(key), value) for key, value in record.items()]
    elif isinstance(record, list):
        items = [(str(number), value) for number, value in enumerate(record)]
    else:
        return {path: record}
    return {name: leaf for key, value in items for name, leaf in flat(value, f"{path}/{key}" if path else key).items()}


def differences(old: Any, new: Any) -> list[str]:
    """Paths of the values in which two records differ, or which one of them lacks."""
    before, after = flat(old), flat(new)
    return [path for path in before | after if path not in before or path not in after or before[path] != after[path]]


def table(results: dict[str, tuple[Any, Any]]) -> int:
    """Prints a line for each result; returns how many differ."""
    width = max(map(len, results), default=0)
    wrong = 0
    print(f"\n{'run':{width}}  values  differ")
    for name, (old, new) in results.items():
        found = differences(old, new)
        wrong += bool(found)
        shown = ", ".join(found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")
        print(f"{name:{width}}  {len(flat(old)):6}  {len(found):6}  {shown}".rstrip())
    return wrong


if __name__ == "__main__":
    main()
