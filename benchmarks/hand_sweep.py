"""The key alone beside the best that somebody finds by hand: what the engine decides, against a sweep of its knobs.

    python3 benchmarks/hand_sweep.py --records sweep.jsonl [--only REGEX] [--nvme-path DIR] [--out PAGE.md]

By hand are GPU memory for states, slots of the window, and whether the script does gradient checkpointing, with
`"activations": "as_written"`: what a user would turn who knows the engine. Each run is a process of its own; those that
the records have already are not run again. A run by hand may end without memory, which is a row, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_check import H200_BYTES, ceilings_of_this_machine, lines_of, run, share_of_gpu
from settings import HIDDEN_FOLDER, Setting

DECIDED: dict[str, Any] = {"steps": 5, "warmup": 9, "checkpointing": "reentrant"}
"""Of the key alone: decisions are made after steps 3 and 6, and the next makes the room."""
BY_HAND: dict[str, Any] = {"steps": 5, "warmup": 3}
LEVEL = 1.03
"""The key alone may take so much of the best hand's time."""


@dataclass(frozen=True)
class Hand:
    """`states`: "gpu_states". `window`: slots; 0 for the engine's default. `keeps`: no gradient checkpointing."""

    states: str
    window: int = 0
    keeps: bool = False

    def of(self, about: dict[str, Any]) -> Setting:
        slide = {**about.get("slide", {}), "gpu_states": self.states, "activations": "as_written"}
        if self.window:
            slide["window"] = self.window
        checkpointing = "none" if self.keeps else "reentrant"
        return Setting("slide", **{**BY_HAND, **about, "checkpointing": checkpointing, "slide": slide})

    def __str__(self) -> str:
        window = f", {self.window} slots" if self.window else ""
        return f"{self.states} of states{window}, {'no ' if self.keeps else ''}checkpointing"


@dataclass(frozen=True)
class Sweep:
    """One setting: what all of its runs share, and what is tried by hand."""

    about: dict[str, Any]
    hands: tuple[Hand, ...]

    @property
    def alone(self) -> Setting:
        return Setting("slide", **{**DECIDED, **self.about})

    def settings(self) -> Iterator[Setting]:
        yield self.alone
        yield from (hand.of(self.about) for hand in self.hands)

    def __str__(self) -> str:
        setting = self.alone
        cap = ", SSD" if setting.offload == "nvme" else ""
        cap += f", GPU {setting.gpu_fraction:.1%}" if setting.gpu_fraction < 1 else ""
        turns = f" x {setting.grad_accum}" if setting.grad_accum > 1 else ""
        return f"{setting.model} {setting.batch} x {setting.seq}{turns}, clipping {setting.clip:g}{cap}"


def sweeps(nvme_path: str = HIDDEN_FOLDER, gpu_bytes: int = H200_BYTES) -> Iterator[Sweep]:
    """0.5 to 14 G parameters, caps of 12, 24 and 80 GiB, SSD, accumulation, sequences of 512 to 32,768 tokens."""
    three, seven = "qwen2.5-3b", "qwen2.5-7b"
    eighty, small, smaller = (share_of_gpu(gib, gpu_bytes) for gib in (80, 24, 12))
    whole = (Hand("46GB", 40, True), Hand("46GB", 40), Hand("20GB", 40, True), Hand("20GB", 40))
    many: dict[str, Any] = {"steps": 20}  # short ones, which the host makes longer by a tenth now and then
    tiny = (Hand("8GB", 26, True), Hand("8GB", 26), Hand("0B", 26, True))
    yield Sweep({"model": "qwen2.5-0.5b", **many}, tiny)
    light = (Hand("24GB", 30, True), Hand("24GB", 30), Hand("0B", 30, True))
    yield Sweep({"model": "qwen2.5-1.5b", "clip": 0.0, **many}, light)
    yield Sweep({"model": three}, whole)
    yield Sweep({"model": three, "batch": 4, "grad_accum": 4, "gpu_fraction": eighty}, whole)
    by_slots = (Hand("12GB", 3), Hand("10GB", 6), Hand("8GB", 16), Hand("6GB", 19))
    yield Sweep({"model": three, "gpu_fraction": small}, by_slots)
    yield Sweep({"model": three, "batch": 4, "gpu_fraction": smaller}, (Hand("3GB", 3), Hand("2GB", 6), Hand("0B", 10)))
    tight = (Hand("4GB", 3), Hand("2GB", 6), Hand("0B", 9))
    yield Sweep({"model": seven, "batch": 4, "clip": 0.0, "gpu_fraction": small}, tight)
    yield Sweep(
        {"model": three, "batch": 1, "seq": 32_768}, (Hand("46GB", 40), Hand("60GB", 40), Hand("20GB", 40, True))
    )
    yield Sweep({"model": three, "batch": 32, "seq": 512}, whole[:3])
    on_ssd = {"offload": "nvme", "nvme_path": nvme_path, "slide": {"host_memory": "2GB"}}
    few = (Hand("5GB", 3), Hand("3GB", 10), Hand("0B", 24))
    yield Sweep({"model": "qwen2.5-0.5b", "gpu_fraction": smaller, **on_ssd}, few)
    # With 114 of a machine's 125 GiB the process that waits for the next run had no room, and the system ended one.
    yield Sweep({"model": "qwen2.5-14b", "slide": {"host_memory": "104GiB"}}, (Hand("88GB", 4), Hand("80GB", 14)))


def key_of(setting: Setting | dict[str, Any]) -> str:
    return json.dumps(vars(setting) if isinstance(setting, Setting) else setting)


def cards_of(records: list[dict[str, Any]]) -> list[int]:
    """Bytes of the GPUs on which they were made; of an H200 where they do not say."""
    measured = [record["ceilings"].get("gpu") for record in records if "setting" not in record]
    return list({gpu["memory_bytes"]: None for gpu in measured if gpu}) or [H200_BYTES]


def page(records: list[dict[str, Any]]) -> Iterator[str]:
    yield "| setting | the key alone, s | best by hand, s | alone / best | by hand |"
    yield "|---|---|---|---|---|"
    # Settings without a cap are the same on each card.
    yield from dict.fromkeys(row for card in cards_of(records) for row in rows(records, card))


def rows(records: list[dict[str, Any]], card: int) -> Iterator[str]:
    """Of the settings whose caps are parts of a GPU of `card` bytes."""
    found = {key_of(record["setting"]): record for record in records if "setting" in record}
    for sweep in sweeps(gpu_bytes=card):
        alone = found.get(key_of(sweep.alone.shown()), {}).get("step_s")
        tried = [(hand, found.get(key_of(hand.of(sweep.about).shown()))) for hand in sweep.hands]
        times = {hand: record["step_s"] for hand, record in tried if record and record.get("step_s")}
        if alone is None or not times:
            continue
        best = min(times, key=lambda hand: times[hand])
        said = "; ".join(f"{hand}: {times[hand]:.3f}" if hand in times else f"{hand}: no step" for hand, _ in tried)
        mark = "" if alone <= LEVEL * times[best] else " **above**"
        yield f"| {sweep} | {alone:.3f} | {times[best]:.3f} | {alone / times[best]:.3f}{mark} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--only", default="", help="runs whose command has it")
    parser.add_argument("--show", action="store_true", help="run nothing, write the table of the records")
    parser.add_argument("--nvme-path", default="", help="a folder on the disk for states; without, none go to SSD")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.show:
        here = ceilings_of_this_machine()
        every = sweeps(options.nvme_path, here.gpu.memory_bytes if here.gpu else H200_BYTES)
        able = [each for each in every if options.nvme_path or "nvme_path" not in each.about]
        run([setting for sweep in able for setting in sweep.settings()], options.records, options.only, here)
    text = "\n".join(page(lines_of(str(options.records)))) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
