"""fio and DeepSpeed's aio handle under the loads of `ssd_io.py`."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from ssd import BURST_BYTES

from ds_slide.store.ssd.disk_load import Sample

# Long enough for fio to lay out nothing and to end; a run that hangs must not stop the others.
SPARE_SECONDS = 30.0


_FIO_ENGINES = {"io_uring": "io_uring", "libaio": "libaio", "threads": "psync"}
_FIO_MODES = {"read": "read", "write": "write", "mixed": "rw"}


class Fio:
    """`fio` from the PATH. It has no alternating bursts."""

    PATTERNS = ("read", "write", "mixed")

    def __init__(self, path: Path) -> None:
        if shutil.which("fio") is None:
            raise FileNotFoundError("not on the PATH")
        self._path = path

    def run(self, pattern: str, depth: int, request_bytes: int, seconds: float, backend: str, direct: bool) -> Sample:
        """One run. In `mixed` its latencies are those of reads or writes, whichever are longer."""
        jobs = depth if backend == "threads" else 1
        options = {
            "name": "rival",
            "filename": str(self._path),
            "size": self._path.stat().st_size,
            "rw": _FIO_MODES[pattern],
            "bs": request_bytes,
            "ioengine": _FIO_ENGINES[backend],
            "iodepth": 1 if backend == "threads" else depth,
            "numjobs": jobs,
            "direct": int(direct),
            "runtime": f"{max(1, round(seconds * 1000))}ms",
            "percentile_list": "50:99",
            "output-format": "json",
        }
        if jobs > 1:
            # Each job walks a part of its own, as one queue would, instead of all of them over the same bytes.
            part = self._path.stat().st_size // jobs // request_bytes * request_bytes
            options |= {"size": part, "offset_increment": part}
        words = ["fio", *(f"--{name}={value}" for name, value in options.items())]
        words += ["--time_based", "--group_reporting", "--overwrite=1", "--thread", "--randrepeat=0"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + SPARE_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"fio ended with {done.returncode}: {done.stderr.strip()[:300]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        sample = Sample(job["read"]["io_bytes"], job["write"]["io_bytes"])
        # Its own clock: start-up and the reading of options are not part of it.
        sample.seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
        found = [job[way]["clat_ns"]["percentile"] for way in ("read", "write") if job[way]["io_bytes"]]
        sample.p50_s = max(one["50.000000"] for one in found) / 1e9
        sample.p99_s = max(one["99.000000"] for one in found) / 1e9
        return sample


class DeepSpeedAio:
    """DeepSpeed's `aio_handle` with locked buffers. Raises where its operator cannot be compiled."""

    _TOGETHER = 4
    _PARALLELISM = (1, 4)
    _TRIAL_S = 0.3

    def __init__(self, path: Path) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise RuntimeError("async_io cannot be compiled here: libaio's headers and library are missing")
        self._module: Any = AsyncIOBuilder().load(verbose=False)
        self._path = path
        self._faster: dict[tuple[str, int, int], int] = {}

    def run(self, pattern: str, depth: int, request_bytes: int, seconds: float) -> Sample:
        """One run with the parallelism that was faster in a short trial of the same load."""
        case = (pattern, depth, request_bytes)
        if case not in self._faster:
            rates = {threads: self._run(*case, self._TRIAL_S, threads).gb_s for threads in self._PARALLELISM}
            self._faster[case] = max(rates, key=lambda threads: rates[threads])
        return self._run(*case, seconds, self._faster[case])

    def _run(self, pattern: str, depth: int, request_bytes: int, seconds: float, threads: int) -> Sample:
        handles = [
            self._module.aio_handle(request_bytes, depth, False, True, threads)
            for _ in range(2 if pattern == "mixed" else 1)
        ]
        count = 1 if pattern == "bursts" else self._TOGETHER
        memory = [
            handles[0].new_cpu_locked_tensor(BURST_BYTES, torch.empty(0, dtype=torch.uint8)) for _ in range(2 * count)
        ]
        try:
            return self._turns(pattern, handles, memory, seconds)
        finally:
            for tensor in memory:
                handles[0].free_cpu_locked_tensor(tensor)

    def _turns(self, pattern: str, handles: list[Any], memory: list[torch.Tensor], seconds: float) -> Sample:
        count = len(memory) // 2
        half = self._path.stat().st_size // 2 // BURST_BYTES
        sample, name, turn = Sample(), str(self._path), 0
        begin = time.perf_counter()
        while sample.seconds < seconds:
            ways = {"read": [False], "write": [True], "mixed": [False, True], "bursts": [turn % 2 == 1]}[pattern]
            for handle, write in zip(handles, ways, strict=True):
                for place in range(count):
                    block = (turn * count + place) % half + (half if write else 0)
                    buffer = memory[place + (count if write else 0)]
                    move = handle.async_pwrite if write else handle.async_pread
                    if move(buffer, name, block * BURST_BYTES) != 0:
                        raise RuntimeError("DeepSpeed's aio handle refused a transfer")
                moved = count * BURST_BYTES
                sample.read_bytes += 0 if write else moved
                sample.written_bytes += moved if write else 0
            for handle in handles:
                if handle.wait() != count:
                    raise RuntimeError("DeepSpeed's aio handle lost a transfer")
            turn += 1
            sample.seconds = time.perf_counter() - begin
        return sample
