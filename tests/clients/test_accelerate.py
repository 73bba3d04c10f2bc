"""accelerate with a script's own optimizer, through `accelerate launch`, on one rank and on two, beside stock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from workers import ENVIRONMENT, HERE, distance

pytestmark = pytest.mark.timeout(600)

LOSS_TOLERANCE = 2.0**-8


def launched(folder: Path, engine: str, ranks: int) -> dict[str, Any]:
    """What the script has left on that engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    if engine == "slide":
        config["ds_slide"] = {"enabled": True, "window": 2}
    json_file, out = folder / f"{engine}.json", folder / f"{engine}.pt"
    json_file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_machines", "1"]
    command += ["--num_processes", str(ranks), "--main_process_port", "0", "--deepspeed_config_file", str(json_file)]
    run = subprocess.run(
        [*command, str(HERE / "accelerate_script.py"), str(out)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    result: dict[str, Any] = torch.load(out)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_weights_are_stocks(ranks: int, tmp_path: Path) -> None:
    stock, slide = launched(tmp_path, "stock", ranks), launched(tmp_path, "slide", ranks)
    assert stock["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert slide["optimizer"] == "SlideZeroOptimizer"
    assert slide["ranks"] == stock["ranks"] == ranks
    assert slide["rates"] == stock["rates"]
    assert len(slide["losses"]) == 12
    assert slide["losses"] == pytest.approx(stock["losses"], abs=LOSS_TOLERANCE)
    names = sorted(stock["weights"])
    assert names == sorted(slide["weights"])
    ours, theirs, start = (
        [result[key][name] for name in names]
        for result, key in ((slide, "weights"), (stock, "weights"), (stock, "before"))
    )
    assert distance(ours, theirs) < 0.02 * distance(theirs, start)
