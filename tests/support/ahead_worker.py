"""Training processes for test_speculation.py: updates are done ahead at every step, until the process is killed."""

from __future__ import annotations

from typing import Any

import deepspeed
from harness import ds_config, llama
from ssd_fault_worker import Run, main


class RunAhead(Run):
    def start(self, slide: dict[str, Any]) -> None:  # type: ignore[override]
        """Make the engine, with all states in host memory."""
        model, slide = llama(), {"window": 2, "gpu_states": 0, **slide}
        self.engine, *_ = deepspeed.initialize(
            model=model, config=ds_config(slide, clip=2.2), model_parameters=list(model.parameters())
        )


if __name__ == "__main__":
    main(RunAhead)
