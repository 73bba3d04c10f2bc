"""What a user sees of DS-Slide: the logger "ds_slide", shown on standard error from INFO on.

DeepSpeed's logger is at WARNING, and Python shows nothing below that by itself. A script that has set up logging
decides: its handlers get the records, and ours is silent, so that no line comes twice. A level that the script has
given to the logger "ds_slide" or to the root logger holds.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ds_slide import __version__

log = logging.getLogger("ds_slide")

FORMAT = "[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"


class Console(logging.StreamHandler):  # which takes no type in brackets before Python 3.11
    """Writes the records that no other handler gets."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        if not _handled_elsewhere():
            self.stream = sys.stderr  # the present one: it may have been replaced since
            super().emit(record)


def show() -> None:
    """Show the logger "ds_slide" from here on, unless the script has decided otherwise. Idempotent."""
    if not any(isinstance(handler, Console) for handler in log.handlers):
        log.addHandler(Console())
    # WARNING is what the root logger has by default, so it says nothing about what the script wants.
    if log.level == logging.NOTSET and logging.getLogger().level == logging.WARNING:
        log.setLevel(logging.INFO)


def size(nbytes: float) -> str:
    """Return the text of bytes in messages: "1.5 GB", "2.0 MB", and exact below 1 MB: "1,500 bytes"."""
    for unit, exponent in (("GB", 9), ("MB", 6)):
        if abs(nbytes) >= 10**exponent:
            return f"{nbytes / 10**exponent:,.1f} {unit}"
    return "1 byte" if nbytes == 1 else f"{nbytes:,.0f} bytes"


def start_line(
    memory: dict[str, int],
    *,
    ranks: int,
    deferred: bool | None,
    kernels: dict[str, Any],
    shares_out: bool,
    bound: str,
) -> str:
    """Return the line that says what an engine has decided. `memory`: `Parts.memory_report`. `deferred`: None without
    an optimizer. `kernels`: replaced modules by kind. `shares_out`: spare GPU memory is shared out once it is known.
    `bound`: a clause about the lane that bounds a step; "" where it is not known."""
    blocks, parameters = memory["blocks"], memory["parameters"]
    replaced = ", ".join(f"{kind} {count}" for kind, count in kernels.items()) or "none"
    rounded = ""
    if memory["rounded_masters"]:
        rounded = f", masters of {memory['rounded_masters']:,} parameters in bf16, rounded stochastically"
    return (
        f"DS-Slide {__version__}: {parameters:,} parameters in {blocks} blocks and the modules outside them, "
        f"window of {memory['slots']} slots ({size(memory['window_bytes'])}); states: "
        f"{size(memory['gpu_state_bytes'])} on the GPU, {size(memory['host_state_bytes'])} in host memory, "
        f"{size(memory['ssd_bytes'])} on SSD{rounded}; ranks: {ranks}; {_UPDATES[deferred]}; kernels: {replaced}"
        f"{'; spare GPU memory: shared out after step 3' if shares_out else ''}"
        f"{f'; {bound}' if bound else ''}"
    )


def no_blocks_line(memory: dict[str, int]) -> str:
    """Return the line about a model without blocks to stream. `memory`: `Parts.memory_report`."""
    return (
        "this model has no blocks (no layers of one class in it repeat and hold a tenth of its parameters), so all of "
        f"it has to fit on the GPU, {size(memory['gpu_bytes'])} beside activations; if it has layers that could be "
        'streamed one by one, name them in ds_slide.blocks, such as "blocks": ["encoder.layer?"]'
    )


_UPDATES = {
    True: "gradients wait for the step",
    False: "gradients are applied under backward",
    None: "no optimizer, forwards only",
}


def _handled_elsewhere() -> bool:
    logger: logging.Logger | None = log
    while logger is not None:
        if any(not isinstance(handler, Console) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
