"""The ceilings of this machine: measured within seconds, and kept in the user's cache folder."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

from ds_slide.cli.doctor.measuring import cpu_ceilings, disk_ceilings, gpu_ceilings
from ds_slide.cli.doctor.process import measure_process
from ds_slide.cli.doctor.together import measure_ranks
from ds_slide.errors import SlideError
from ds_slide.plan.ceilings import Ceilings, DiskCeilings
from ds_slide.plan.cores import Share
from ds_slide.plan.kept_ceilings import cpu_name, gpu_computes, keep, kept_ceilings
from ds_slide.runtime.updates.threads import update_cores


def of_this_machine(paths: Sequence[Path] = (), *, refresh: bool = False, again: bool = False) -> tuple[Ceilings, str]:
    """Return the ceilings, and the reason why a process cannot be measured, "" for none. Kept measurements are used
    where the machine is the same. They have the disks below `paths`, or without paths all disks that were measured
    before. `again`: a failed measurement of a process is tried again. Raises SlideError where a path cannot be
    measured."""
    kept = None if refresh else kept_ceilings()
    disks = {disk.path: disk for disk in (kept.disks if kept else ())}
    wanted = [str(path.resolve()) for path in paths]
    missing = [path for path in wanted if path not in disks]
    needs_process = kept is None or (again and kept.process_bytes is None)
    if kept is not None and not missing and not needs_process:
        return _with_disks(kept, disks, wanted), ""
    disks.update({path: _disk(Path(path)) for path in missing})
    if kept is None:
        threads, cores = update_cores("auto", "auto", Share.whole().cores)
        on_gpu = gpu_computes()
        kept = Ceilings(
            source=f"measured on {platform.node()}, {date.today().isoformat()}",
            cpu=cpu_ceilings(cpu_name(), threads, cores, with_products=not on_gpu),
            gpu=gpu_ceilings(torch.device("cuda", 0)) if on_gpu else None,
        )
    failed = ""
    if needs_process:
        try:
            kept = kept.model_copy(update={"process_bytes": measure_process(on_gpu=gpu_computes())})
        except SlideError as error:
            failed = str(error)
    kept = _with_disks(kept, disks, list(disks))
    keep(kept)
    return _with_disks(kept, disks, wanted), failed


def with_ranks(ceilings: Ceilings, ranks: int, *, refresh: bool = False) -> Ceilings:
    """Return `ceilings`, which are this machine's, with what each of `ranks` ranks gets, on the disks of `ceilings`.
    Kept measurements are used as in `of_this_machine`. Raises SlideError, with a reason that is part of a sentence,
    where the ranks cannot be measured."""
    measured = ceilings.measured(ranks)
    if measured is not None and not refresh and all(disk.path in measured.least.disks_gb_s for disk in ceilings.disks):
        return ceilings
    measured = measure_ranks(ranks, [Path(disk.path) for disk in ceilings.disks])
    kept = kept_ceilings()
    if kept is not None:
        keep(kept.with_measured(measured))
    return ceilings.with_measured(measured)


def gpu_count() -> int:
    """Return the number of GPUs; 0 where the processor computes."""
    return torch.cuda.device_count() if gpu_computes() else 0


def _with_disks(ceilings: Ceilings, disks: Mapping[str, DiskCeilings], paths: Sequence[str]) -> Ceilings:
    """Return a copy with the disks below `paths`; without paths `ceilings` itself."""
    return ceilings.model_copy(update={"disks": tuple(disks[path] for path in paths)}) if paths else ceilings


def _disk(path: Path) -> DiskCeilings:
    try:
        return disk_ceilings(path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, SlideError):
            raise
        why = getattr(error, "strerror", None) or error
        raise SlideError(f"--path {path} cannot be measured ({why}); name a directory on a local disk") from error
