"""What a block costs the host beside plain torch: Python calls and microseconds, for each block and micro-batch.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python3 benchmarks/host_cost.py

trains tiny Qwen2 models of 4 and of 12 blocks in fp32 with accumulation 4. Their operations take microseconds, so the
host's own work can be seen. The difference of the two models, divided by 8, is the cost of one block: what a step or a
micro-batch costs once cancels out. Calls are counted exactly. Seconds are the least of some steps, of the time that the
thread has computed: backward runs in the same thread on the CPU, and the engine's own threads do not count.
"""

from __future__ import annotations

import argparse
import collections
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

SIZES = (4, 12)
ACCUMULATION = 4
WARM_STEPS, TIMED_STEPS = 7, 40
RESIDENT = {"gpu_states": "1GiB"}
Calls = collections.Counter[tuple[str, str]]
"""Numbers of calls by file and name of the function."""


@dataclass(frozen=True)
class Case:
    """`slide`: more of the "ds_slide" block. `checkpointing`: whether the script asks for it. `recomputes`: whether
    plain torch, for the comparison, recomputes the blocks."""

    slide: dict[str, Any]
    checkpointing: bool = False
    recomputes: bool = False


CASES = {
    "resident": Case(RESIDENT),
    "resident, checkpointing taken over": Case({**RESIDENT, "gpu_memory": "8GiB"}, checkpointing=True),
    "streamed": Case({"gpu_states": 0, "window": 4}),
    "streamed, recomputed": Case({"gpu_states": 0, "window": 4}, checkpointing=True, recomputes=True),
}


@dataclass
class Cost:
    """Of a micro-batch, or of a block in it. `calls`: of Python functions."""

    calls: float
    forward_us: float
    backward_us: float

    def of_block(self, smaller: Cost) -> Cost:
        pairs = zip(astuple(self), astuple(smaller), strict=True)
        return Cost(*((large - small) / (SIZES[1] - SIZES[0]) for large, small in pairs))


def model_of(layers: int, *, checkpointing: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False}
    config = Qwen2Config(hidden_size=16, intermediate_size=32, num_hidden_layers=layers, vocab_size=64, **heads)
    model = Qwen2ForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class Plain:
    """Plain torch without a step."""

    def __init__(self, case: Case, layers: int) -> None:
        self.model = model_of(layers, checkpointing=case.recomputes)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None: ...


class Slide:
    """DeepSpeed with DS-Slide."""

    def __init__(self, case: Case, layers: int) -> None:
        import deepspeed

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        offload = {section: {"device": "cpu"} for section in ("offload_optimizer", "offload_param")}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, **offload},
            "steps_per_print": 10**9,
            "ds_slide": {"enabled": True, "cpu_threads": 1, "cpu_cores": "none", **case.slide},
        }
        model = model_of(layers, checkpointing=case.checkpointing)
        self.model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()


class Measured:
    """One system with one model, micro-batch by micro-batch."""

    def __init__(self, system: Plain | Slide) -> None:
        self._system = system
        self._tokens = torch.randint(0, 64, (1, 4))
        self.spans: list[tuple[float, float]] = []

    def step(self) -> None:
        """Take a step, and note the seconds of forward and backward of each micro-batch."""
        for _ in range(ACCUMULATION):
            began = time.thread_time()
            loss = self._system.model(input_ids=self._tokens, labels=self._tokens).loss
            middle = time.thread_time()
            self._system.backward(loss)
            ended = time.thread_time()
            self._system.step()
            self.spans.append((middle - began, ended - middle))

    def cost(self) -> tuple[Cost, Calls]:
        """Return the cost of a micro-batch, and the calls of a step."""
        forward, backward = (1e6 * min(each) for each in zip(*self.spans, strict=True))
        calls = counted(self.step)
        return Cost(sum(calls.values()) / ACCUMULATION, forward, backward), calls


def counted(run: Callable[[], None]) -> Calls:
    """Return the calls of Python functions in this thread."""
    calls: Calls = collections.Counter()

    def note(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def costs_of_block(case: Case) -> list[tuple[Cost, Calls]]:
    """Return the cost of a block for plain torch and for DS-Slide, and the differences of the calls of the two models.
    All take their steps in turn: the speed of a shared machine changes from second to second."""
    runs = [[Measured(system(case, layers)) for layers in SIZES] for system in (Plain, Slide)]
    for number in range(WARM_STEPS + TIMED_STEPS):
        for run in (*runs[0], *runs[1]):
            if number == WARM_STEPS:
                run.spans.clear()
            run.step()
    found = []
    for small, large in runs:
        (few_cost, few), (cost, many) = small.cost(), large.cost()
        found.append((cost.of_block(few_cost), many - few))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's work for each block")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--where", type=int, default=0, metavar="N", help="name the N functions with the most calls")
    options = parser.parse_args()
    print("| case | system | calls | forward, us | backward, us |\n|---|---|---|---|---|")
    for case in [options.only] if options.only else CASES:
        (plain, _), (slide, calls) = costs_of_block(CASES[case])
        more = Cost(*(mine - theirs for mine, theirs in zip(astuple(slide), astuple(plain), strict=True)))
        for name, cost in (("plain torch", plain), ("DS-Slide", slide), ("more", more)):
            print(
                f"| {case} | {name} | {cost.calls:.0f} | {cost.forward_us:.0f} | {cost.backward_us:.0f} |", flush=True
            )
        for (file, name), count in calls.most_common(options.where):
            print(f"  {count / ACCUMULATION / (SIZES[1] - SIZES[0]):8.1f} {'/'.join(file.split('/')[-3:])} {name}")


if __name__ == "__main__":
    main()
