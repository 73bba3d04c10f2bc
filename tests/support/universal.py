"""DeepSpeed's conversion to a universal checkpoint, in this process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.checkpoint import ds_to_universal

UNIVERSAL = {"load_universal": True}


def convert(folder: Path, tag: str | None = None) -> Path:
    """Run `ds_to_universal.py` on a tag of `folder`, that of `latest` if none is given; returns the new directory."""
    tag = tag or (folder / "latest").read_text()
    output = folder / f"{tag}_universal"
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(folder / tag),
            output_folder=str(output),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    return output


def universal(config: dict[str, Any]) -> dict[str, Any]:
    """The same config, for loading universal checkpoints."""
    return {**config, "checkpoint": UNIVERSAL}
