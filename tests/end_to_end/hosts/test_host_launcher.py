"""DeepSpeed's own launcher on two emulated hosts, started on each without SSH, as users do who have none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
import warm

ROOT = Path(__file__).parents[3]
SETTINGS = ("--model", "tiny", "--batch", "2", "--seq", "32", "--steps", "3")


@pytest.mark.slow
def test_the_stock_launcher_without_ssh(tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "finetune.py"), "--deepspeed_config", str(ROOT / "configs" / "slide_cpu.json")]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    environment = {name: value for name, value in os.environ.items() if name not in warm.OF_A_RANK} | warm.ON_CPU
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")])

    def losses(name: str) -> list[float]:
        lines = (tmp_path / name).read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]

    with hosts.described(2, tmp_path) as joined:
        (tmp_path / "hosts.txt").write_text("".join(f"{host.address} slots=1\n" for host in joined))
        started = []
        for number, host in enumerate(joined):
            options = ["--hostfile", str(tmp_path / "hosts.txt"), "--no_ssh", "--node_rank", str(number)]
            options += ["--master_addr", joined[0].address, "--master_port", "29500"]
            command = [launcher, *options, *script, *SETTINGS, "--log", str(tmp_path / "apart.jsonl")]
            output = open(tmp_path / f"output-{number}", "wb")
            started.append(
                subprocess.Popen(
                    host.whole_command(tmp_path, *command), env=environment, stdout=output, stderr=subprocess.STDOUT
                )
            )
        for number, process in enumerate(started):
            assert process.wait(300) == 0, (tmp_path / f"output-{number}").read_text()[-4000:]
    together = [launcher, "--num_accelerators", "2", "--master_port", "29511"]
    command = [*together, *script, *SETTINGS, "--log", str(tmp_path / "together.jsonl")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert losses("apart.jsonl") == losses("together.jsonl") and len(losses("apart.jsonl")) == 3
