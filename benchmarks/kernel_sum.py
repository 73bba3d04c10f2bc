"""The seconds that the GPU's kernels take in a step of plain torch, summed, without the gaps between them.

    python3 benchmarks/kernel_sum.py --system gpu-only --batch 1 --grad-accum 8 --patch ours --checkpointing none

No step can be shorter, unless kernels change or run side by side. Takes the options of `step.py` for `gpu-only`, and
needs a GPU.
"""

from __future__ import annotations

import argparse
import json

import settings
import step
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings.add_arguments(parser)
    setting = settings.from_arguments(parser.parse_args())
    _trainer, run, _log = step.warmed_up(setting, "")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(STEPS)
    on_gpu = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    seconds = sum(event.device_time_total for event in on_gpu if "Memcpy HtoD" not in event.name) / 1e6
    print(json.dumps({"command": setting.command(), "kernels_s": seconds / STEPS, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
