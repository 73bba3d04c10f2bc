"""Runs training scenarios one after the other in this process and writes what each recorded.

python worker.py SCENARIOS.json RESULTS.json; the results are rewritten after every scenario. Not a test module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import hashlib
import json
import os
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plain import RATES, PlainEngine, client_optimizer
from probes import AllocationProbe, SyncProbe, memory_now, pools_now
from torch import Tensor

# The first engine of a machine also compiles DeepSpeed's CPU Adam, which takes 100 s on two cores.
SCENARIO_SECONDS = 150
VOCABULARY = 512
BATCH, SEQUENCE = 4, 64
DISTINCT_BATCHES = 4
LEARNING_RATE = 5e-4
# Of a head that is streamed: six chunks, the last one short.
HEAD_CHUNK_ROWS = 100
# Of each parameter, spread over it.
SAMPLES = 200


@dataclass(frozen=True)
class Scenario:
    """One engine from construction to destruction."""

    name: str
    system: str = "slide"
    """`slide`, `stock` for the same DeepSpeed JSON without the key, or `plain` (`plain.PlainEngine`)."""
    model: str = "llama"
    """`llama` (tied, 8 blocks), `untied` (the same with a head of its own) or `gpt2` (tied, 6 blocks, biases)."""
    precision: str = "bf16"
    """`bf16`; `fp16`, which scales the loss dynamically; or `autocast`, a model in fp32 under `torch_autocast`."""
    optimizer: str = "AdamW"
    """`AdamW` or `Muon` of the JSON, or an object (`plain.client_optimizer`)."""
    steps: int = 10
    clip: float = 0.0
    grad_accum: int = 1
    lengths: tuple[int, ...] = (SEQUENCE,)
    """Tokens of a sequence in batches, in turn."""
    exact: bool = False
    """Deterministic kernels only, so that bits can be compared between engines."""
    overflow_at: int | None = None
    """Step whose loss is multiplied by 1e30, so that its fp16 gradients overflow."""
    ssd: bool = False
    """Whether states may go to SSD: into a folder that is gone afterwards."""
    on_host: bool = False
    """Whether the model is in host memory when the engine gets it."""
    kept: float | None = None
    """The part of what the blocks could keep for which there is room in every step; less than 0: their inputs have to
    move; None: what there is decides."""
    mixed: bool = False
    """Whether all blocks keep what products and attention have made, and nothing else."""
    moves: bool = False
    """Whether other units have their states on the GPU in every step."""
    sums: bool = False
    """Whether other units have their gradients added up on the GPU in every step."""
    slide: dict[str, Any] = field(default_factory=dict)
    """Additions to the "ds_slide" block. Without "kernels" the model's own modules are replaced on a GPU."""
    record: tuple[str, ...] = ()
    """What to record besides losses, norms and the kernels in the model: gradients, states, syncs, allocations,
    memory, placement, masters, samples, pools, recorded_updates."""


def device() -> torch.device:
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def build_model(scenario: Scenario) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # Eager attention is matrix products and a softmax; the fused ones add up with atomics in backward.
    attention = "eager" if scenario.exact else "sdpa"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[scenario.precision]
    with torch.device(device()):
        if scenario.model == "gpt2":
            no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config = GPT2Config(
                n_embd=256, n_layer=6, n_head=8, vocab_size=VOCABULARY, n_positions=SEQUENCE, **no_dropout
            )
            model: Any = GPT2LMHeadModel._from_config(config, attn_implementation=attention, dtype=dtype)
        else:
            config = LlamaConfig(
                hidden_size=256,
                intermediate_size=704,
                num_hidden_layers=8,
                num_attention_heads=8,
                num_key_value_heads=4,
                vocab_size=VOCABULARY,
                max_position_embeddings=SEQUENCE,
                tie_word_embeddings=scenario.model != "untied",
            )
            model = LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def engine_config(scenario: Scenario) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if scenario.ssd:
        offload = {"device": "nvme", "nvme_path": tempfile.mkdtemp(dir=os.environ.get("SSD_DIR")), "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": scenario.grad_accum,
        "gradient_clipping": scenario.clip,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "steps_per_print": 1_000_000,
    }
    if scenario.precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif scenario.precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    else:
        # hysteresis 1: the first overflow already lowers the scale; window 8: it rises again within the run.
        config["fp16"] = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1, "loss_scale_window": 8}
    if scenario.optimizer == "Muon":
        config["optimizer"] = {"type": "Muon", "params": RATES}
        config["zero_optimization"]["reduce_scatter"] = False
    elif scenario.optimizer != "AdamW":
        del config["optimizer"]
        config.update(zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    if scenario.system == "slide":
        config["ds_slide"] = {"enabled": True, **scenario.slide}
    return config


def batches() -> list[Tensor]:
    """Random tokens, few enough to be learnt by heart: the loss falls, so a missing update shows."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (DISTINCT_BATCHES, BATCH, SEQUENCE), generator=generator)
    return list(tokens.to(device()).unbind())


def digest(tensors: list[Tensor | None]) -> str:
    """SHA-256 of the bits."""
    total = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        total.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def state_digests(engine: Any) -> dict[str, str]:
    """Digests of fp32 master weights, optimizer states, and the 16-bit weights that forward reads."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    parameters = list(engine.module.parameters())
    digests = {"weight": digest([safe_get_full_fp32_param(parameter) for parameter in parameters])}
    marked = [parameter for parameter in parameters if getattr(parameter, "use_muon", False)]
    others = [parameter for parameter in parameters if not getattr(parameter, "use_muon", False)]
    for name, its in {"momentum_buffer": marked, "exp_avg": others, "exp_avg_sq": others}.items():
        if its:
            digests[name] = digest([safe_get_full_optimizer_state(parameter, name) for parameter in its])
    with deepspeed.zero.GatheredParameters(parameters):
        digests["low_precision_weight"] = digest([parameter.data for parameter in parameters])
    return digests


def master_digests(engine: Any) -> dict[str, str]:
    """Digests of the fp32 master weights."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: digest([safe_get_full_fp32_param(each)]) for name, each in engine.module.named_parameters()}


def master_samples(engine: Any) -> dict[str, list[float]]:
    """Some elements of each fp32 master."""
    from deepspeed.utils import safe_get_full_fp32_param

    plain = engine.masters if isinstance(engine, PlainEngine) else None
    found = {}
    for name, each in engine.module.named_parameters():
        flat = (safe_get_full_fp32_param(each) if plain is None else plain[name]).detach().flatten()
        found[name] = flat[:: max(1, flat.numel() // SAMPLES)].tolist()
    return found


def gradient_digests(engine: Any) -> dict[str, str]:
    from deepspeed.utils import safe_get_full_grad

    return {name: digest([safe_get_full_grad(parameter)]) for name, parameter in engine.module.named_parameters()}


def placement(engine: Any) -> dict[str, Any]:
    """Bytes of the weights, what the plan has on the GPU, and where the model's tensors say that they are."""
    module = engine.module
    tensors = [*module.parameters(), *module.buffers()]
    return {
        "weight_bytes": 2 * engine.optimizer.slide_stats()["memory"]["parameters"],
        "gpu_bytes": engine.optimizer.slide_stats()["memory"]["gpu_bytes"],
        "devices": sorted({tensor.device.type for tensor in tensors}),
    }


class Recorder:
    """Takes what a scenario asked for at the right moments of its steps."""

    def __init__(self, scenario: Scenario, engine: Any) -> None:
        self._scenario = scenario
        self._engine = engine
        wanted = set(scenario.record)
        # The first steps still allocate pools, create streams and load kernels.
        self._warm = scenario.steps // 2
        self._syncs = SyncProbe() if "syncs" in wanted else None
        self._allocations = AllocationProbe() if "allocations" in wanted else None
        self.result: dict[str, Any] = {"losses": [], "grad_norms": [], "loss_scales": [], "skipped": []}
        if "memory" in wanted:
            self.result["memory"] = []
        if "samples" in wanted:
            self.result["samples_before"] = master_samples(engine)

    def before_forward(self, step: int) -> None:
        if step == self._warm and self._allocations:
            self._allocations.start()
        if step >= self._warm and self._syncs:
            self._syncs.start()

    def after_backward(self, step: int) -> None:
        if step >= self._warm and self._syncs:
            self._syncs.stop()
        if step == 0 and "gradients" in self._scenario.record:
            self.result["gradients"] = gradient_digests(self._engine)

    def after_step(self, step: int, loss: float) -> None:
        optimizer = self._engine.optimizer
        norm = self._engine.get_global_grad_norm()
        self.result["losses"].append(loss)
        self.result["grad_norms"].append(None if norm is None else float(norm))
        self.result["loss_scales"].append(float(optimizer.loss_scale))
        self.result["skipped"].append(self._engine.skipped_steps)
        if "memory" in self.result:
            self.result["memory"].append(memory_now(self._engine))
        if step == self._scenario.steps - 1:
            self._finish()

    def _finish(self) -> None:
        # Statistics of a step are there when the next one has begun: none after a single step.
        if self._scenario.system == "slide" and (statistics := self._engine.optimizer.slide_stats()):
            self.result["kernels"] = statistics["kernels"]["replaced"]
            self.result["activations"] = statistics["activations"]
        if self._allocations:
            self.result["allocations"] = self._allocations.stop()
        if self._syncs:
            self.result["syncs"] = self._syncs.found
            scalar = torch.ones((), device=device())
            self.result["sees_item"] = self._syncs.sees(scalar.item)
            self.result["sees_synchronize"] = self._syncs.sees(lambda: torch.cuda.synchronize())
        if "placement" in self._scenario.record:
            self.result["placement"] = placement(self._engine)
        if "pools" in self._scenario.record:
            self.result["pools"] = pools_now(self._engine)
        if "masters" in self._scenario.record:
            self.result["masters"] = master_digests(self._engine)
        if "samples" in self._scenario.record:
            self.result["samples"] = master_samples(self._engine)
        if "recorded_updates" in self._scenario.record:
            host = self._engine.optimizer.runtime.parts.updating.host
            batches = [] if host.iterations is None else host.iterations.batches
            counts = {name: len(runs or ()) for name, runs in (("alone", host.alone), ("streamed", host.streamed))}
            self.result["recorded_updates"] = counts | {"together": sum(each.is_recorded for each in batches)}
        if "states" in self._scenario.record:
            self.result["states"] = state_digests(self._engine)


def move_states(engine: Any, step: int) -> None:
    """Promote other units than in the last step, all that can move and none of them among others."""
    from ds_slide.plan.movable import why_fixed
    from ds_slide.runtime.memory.tier_moves import move

    plan = engine.optimizer.runtime.parts.plan
    orders = [order for order in range(len(plan.units)) if why_fixed(plan, order) is None]
    chosen = (orders[::2], orders[1::2], orders, orders[:0])[step % 4]
    moved = move(engine.optimizer.runtime, frozenset(chosen))
    assert moved is not None and moved.no_room == ()


def move_sums(engine: Any, step: int) -> None:
    """Add up the gradients of all units on the GPU, then of some and of no others."""
    from ds_slide.plan.movable import may_sum
    from ds_slide.runtime.memory.tier_moves import move

    parts = engine.optimizer.runtime.parts
    orders = [order for order in range(len(parts.plan.units)) if may_sum(parts.plan, order)]
    chosen = frozenset((orders, orders[::2], orders[1::2], orders[:0])[step % 4])
    assert move(engine.optimizer.runtime, parts.plan.placement.on_gpu, summed=chosen) is not None
    assert parts.plan.placement.summed == chosen


def room_for(activations: Any, part: float, shape: Any, **_: bool) -> float:
    """Bytes; whatever there is, it is not enough where `part` is less than 0."""
    return -1e12 if part < 0 else part * sum(each.nbytes for each in activations.costs.keepable(shape))


def gpu_bytes_in_use(*, restart: bool = False) -> int:
    """The most of torch's allocator since the last restart; with `restart` what is in use now."""
    if device().type != "cuda":
        return 0
    if restart:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def run(scenario: Scenario) -> dict[str, Any]:
    import deepspeed

    # Also fills fresh memory with NaN, so that whatever is read before it was written shows.
    torch.use_deterministic_algorithms(scenario.exact, warn_only=True)
    model = build_model(scenario)
    if scenario.on_host:
        model = model.to("cpu")
    if scenario.slide.get("stream_head"):
        from ds_slide.runtime.weights import rows

        rows.CHUNK_NUMEL = HEAD_CHUNK_ROWS * model.lm_head.in_features
    before = gpu_bytes_in_use(restart=True)
    engine: Any
    if scenario.system == "plain":
        engine = PlainEngine(model, scenario.optimizer, scenario.clip)
    else:
        in_json = scenario.optimizer in ("AdamW", "Muon")
        optimizer = None if in_json else client_optimizer(scenario.optimizer, model.parameters())
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=model.parameters(), config=engine_config(scenario)
        )
    is_slide = hasattr(engine.optimizer, "slide_stats")
    assert is_slide == (scenario.system == "slide"), f"{scenario.system} runs {type(engine.optimizer).__name__}"
    peak = gpu_bytes_in_use() - before
    if scenario.kept is not None:
        spare = engine.optimizer.runtime.parts.spare
        spare.room.of = functools.partial(room_for, spare.activations, scenario.kept)
        if scenario.kept < 0:
            spare.room.inputs_missing = lambda _shape: 1e12
    data = batches()
    recorder = Recorder(scenario, engine)
    try:
        for step in range(scenario.steps):
            recorder.before_forward(step)
            if scenario.moves:
                move_states(engine, step)
            if scenario.sums:
                move_sums(engine, step)
            losses = []
            for micro in range(scenario.grad_accum):
                number = step * scenario.grad_accum + micro
                tokens = data[number % len(data)][:, : scenario.lengths[number % len(scenario.lengths)]]
                loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
                losses.append(loss.detach())
                engine.backward(loss * 1e30 if step == scenario.overflow_at else loss)
                if micro < scenario.grad_accum - 1:
                    engine.step()
            recorder.after_backward(step)
            engine.step()
            mean_loss = float(torch.stack(losses).mean())
            del loss, losses
            recorder.after_step(step, mean_loss)
        return {**recorder.result, "gpu_peak_of_start": peak}
    finally:
        engine.destroy()


def main(source: Path, target: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(launcher)
    import ds_slide  # noqa: F401  (for a source tree on the path; an installed package is found by itself)

    sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))
    from all_mixed import all_mixed

    results: dict[str, dict[str, Any]] = {}
    for fields in json.loads(source.read_text()):
        tuples = {name: tuple(fields[name]) for name in ("record", "lengths") if name in fields}
        scenario = Scenario(**{**fields, **tuples})
        print(f"==== {dataclasses.asdict(scenario)}", flush=True)
        # A deadlock must say where every thread stands, and must not use up the time of the other tests.
        faulthandler.dump_traceback_later(SCENARIO_SECONDS, exit=True)
        try:
            # DeepSpeed compiles Muon's functions, for every shape anew.
            eager = torch.compiler.set_stance("force_eager" if scenario.optimizer == "Muon" else "default")
            with eager, all_mixed() if scenario.mixed else contextlib.nullcontext():
                results[scenario.name] = run(scenario)
        except Exception:
            results[scenario.name] = {"error": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        target.write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
