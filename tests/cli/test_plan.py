"""`ds-slide plan`: its answer, and that what it advises holds."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ds_slide as package
from ds_slide.cli.planning import command
from ds_slide.cli.planning.output import as_text
from ds_slide.config import format_bytes, parse_bytes
from ds_slide.plan.ceilings import read_ceilings
from ds_slide.plan.forecast import ON_HOST, WITH_CUDA

CEILINGS = Path(package.__file__).parent / "configs" / "ceilings"
SMALL = ("--model", "tiny", "--seq", "512")
# A plan for it takes a quarter of the time that one for the smallest preset takes.
TWO_BLOCKS = ("--model", Path(__file__).parent / "two_blocks", "--seq", "512")
ROOM = ("--gpu-memory", "3GiB", "--host-memory", "4GiB")
H200 = ("--ceilings", "h200-16-cores")
PLANNED = (*TWO_BLOCKS, *H200)
LINK = ("h2d_gb_s", "d2h_gb_s", "both_ways_gb_s")


@pytest.fixture
def no_larger_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search for the largest preset, which takes more than half of a command's time."""
    monkeypatch.setattr(command, "largest_model", lambda *_: None)


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for the largest batch, which is not asked for."""
    monkeypatch.setattr(command, "largest_model", lambda *_: None)
    monkeypatch.setattr(command, "largest_batch", lambda *_: 1)


def test_the_answer_as_json(ds_slide: Callable[..., Any], config: Callable[..., Path]) -> None:
    ran = ds_slide("plan", "--deepspeed_config", config(), *SMALL, *ROOM, *H200, "--json")
    answer = ran.answer
    assert (ran.code, answer["schema"], answer["fits"], answer["model"]) == (0, 1, True, "tiny")
    assert (answer["batch"], answer["seq"], answer["micro_batches"], answer["ranks"]) == (2, 512, 1, 1)
    for tier in ("gpu", "host"):
        found = answer["tiers"][tier]
        assert found["needed"] == sum(found["entries"].values()) <= found["available"]
    host = answer["tiers"]["host"]["entries"]
    assert host["placed by the plan"] + host["undo logs"] + host["spare states"] == answer["memory"]["host_bytes"]
    assert answer["step_s"] >= answer["bound_s"] == max(answer["lanes"].values())
    assert answer["tokens_per_s"] == pytest.approx(1024 / answer["step_s"])
    assert set(answer["schedules"]) == {"under backward", "deferred", "two passes", "speculative"}
    assert answer["schedule"] in answer["schedules"] and answer["largest_model"] == "tiny"
    assert {"ceilings", "notes", "largest_batch", "ssd_written_bytes_a_day", "gpu_peak_allocated_bytes"} <= set(answer)


@pytest.mark.slow
def test_what_is_decided_after_the_first_steps(ds_slide: Callable[..., Any], config: Callable[..., Path]) -> None:
    @functools.cache
    def plan(*options: object, **settings: Any) -> Any:
        path = config(ds_slide={"enabled": True, **settings})
        return ds_slide("plan", "--deepspeed_config", path, *SMALL, *H200, "--batch", 64, "--json", *options)

    def decided(*options: object, **settings: Any) -> tuple[int, int]:
        found = plan(*options, **settings).answer["decided"]
        assert found["kept"] + found["mixed"] + found["recomputed"] == found["checkpointed"]
        return found["promoted_units"], found["kept"]

    small, large = ("--gpu-memory", "2GiB"), ("--gpu-memory", "24GiB")
    blocks = plan(*large).answer["decided"]["blocks"]
    assert decided(*large)[1] == blocks and 0 < decided(*small)[1] < blocks
    assert decided(*large, activations="as_written") == (decided(*large)[0], 0)
    assert decided(*large, gpu_states=0) == (0, blocks)
    assert decided(*large, "--no-checkpointing") == decided(*large)
    assert decided(*large, "--no-checkpointing", activations="as_written")[1] == 0
    assert decided(*large, gpu_states=0, gpu_memory="200MiB")[1] < blocks
    answer = plan(*large, gpu_states=0).answer
    assert answer["step_s"] < answer["first_steps"]["step_s"]
    assert answer["gpu_peak_allocated_bytes"] > answer["first_steps"]["gpu_peak_allocated_bytes"]
    assert answer["schedule_why"] and answer["below_limit"]["step_s"] <= answer["step_s"]


@pytest.mark.usefixtures("no_larger_models")
def test_the_largest_batch_fits_and_a_larger_one_does_not(
    ds_slide: Callable[..., Any], config: Callable[..., Path]
) -> None:
    def plan(batch: int) -> Any:
        return ds_slide("plan", "--deepspeed_config", config(), *TWO_BLOCKS, *ROOM, *H200, "--json", "--batch", batch)

    largest = plan(1).answer["largest_batch"]
    assert largest > 8
    assert plan(largest).code == 0
    assert plan(largest + largest // 8).code == 1


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize(
    ("tier", "batch", "memory", "change"),
    [
        ("gpu", 4096, ("--gpu-memory", "2GiB", "--host-memory", "8GiB"), "use a micro-batch of"),
        ("gpu", 1, ("--gpu-memory", "950MiB", "--host-memory", "8GiB"), "it takes a machine with"),
        ("host", 1, ("--gpu-memory", "8GiB", "--host-memory", "5000MiB"), "nvme"),
        ("ssd", 1, ("--gpu-memory", "8GiB", "--host-memory", "8GiB", "--nvme-memory", "1MiB"), "it takes"),
    ],
)
def test_a_plan_that_cannot_fit(
    ds_slide: Callable[..., Any],
    config: Callable[..., Path],
    tmp_path: Path,
    tier: str,
    batch: int,
    memory: tuple[str, ...],
    change: str,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "llama", "vocab_size": 264, "hidden_size": 1024, "intermediate_size": 2816}
    layers = 24 if tier == "host" else 4  # of a smaller one the buffers of the SSD take more than its states
    heads = {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8}
    (model / "config.json").write_text(json.dumps(shape | heads))
    settings: dict[str, Any] = {"ds_slide": {"enabled": True, "gpu_states": 0}}
    if tier == "ssd":
        settings["ds_slide"]["host_memory"] = 0
        on_disk = {"device": "nvme", "nvme_path": str(tmp_path)}
        settings["zero_optimization"] = {"stage": 3, "offload_optimizer": on_disk}
    options = ("--deepspeed_config", config(**settings), "--model", model, "--seq", "512", "--batch", batch)
    said = ds_slide("plan", *options, *memory, *H200)
    ran = ds_slide("plan", *options, *memory, *H200, "--json")
    answer = ran.answer
    assert (ran.code, answer["fits"], answer["tier"]) == (1, False, tier)
    assert answer["short"] == answer["needed"] - answer["available"] > 0
    assert change in answer["change"] and said.code == 1
    assert f"{format_bytes(answer['short'])} short; {answer['change']}" in said.out and said.out.count("\n") == 1
    if "micro-batch of" in answer["change"]:
        smaller = answer["change"].split("micro-batch of ")[1].split()[0]
        assert ds_slide("plan", *options, *memory, *H200, "--batch", smaller).code == 0
    if "it takes a machine with" in answer["change"]:
        size, option = answer["change"].split("with ")[1].split(" (")
        more = dict(zip(memory[::2], memory[1::2], strict=True)) | {option.rstrip(")"): size.replace(" ", "")}
        assert parse_bytes(more[option.rstrip(")")]) > answer["available"]
        assert ds_slide("plan", *options, *[word for pair in more.items() for word in pair], *H200).code == 0


@pytest.mark.usefixtures("no_larger_models")
def test_fit_answers_first(ds_slide: Callable[..., Any], config: Callable[..., Path]) -> None:
    ran = ds_slide("plan", config(), *TWO_BLOCKS, *ROOM, *H200, "--fit", "--ranks", 2)
    assert ran.code == 0 and ran.out.startswith("It fits. Use a micro-batch of ")
    assert "collectives between ranks are not timed" in ran.out and "largest preset" not in ran.out
    best = int(ran.out.split("micro-batch of ")[1].split(":")[0])
    assert (
        ds_slide("plan", "--deepspeed_config", config(), *TWO_BLOCKS, *ROOM, *H200, "--ranks", 2, "--batch", best).code
        == 0
    )
    small = ("--gpu-memory", "901MiB", "--host-memory", "4GiB")
    ran = ds_slide("plan", "--deepspeed_config", config(), *TWO_BLOCKS, *small, *H200, "--fit")
    assert ran.code == 1 and ran.out.startswith("It does not fit. GPU tier")


@pytest.mark.slow
def test_values_of_trainer_and_several_ranks(ds_slide: Callable[..., Any], config: Callable[..., Path]) -> None:
    path = config(
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        train_batch_size="auto",
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
        fp16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        ds_slide={"enabled": True, "gpu_states": 0, "window": "auto"},
    )
    options = ("--deepspeed_config", path, *SMALL, *ROOM, *H200, "--json")
    one = ds_slide("plan", *options, "--batch", 4).answer
    assert any("gradient_clipping" in note for note in one["notes"]) and one["schedule"] != "under backward"
    assert 'bf16.enabled is "auto" and taken for true; TrainingArguments say it' in one["notes"]
    fp16 = json.loads(path.read_text()) | {"fp16": {"enabled": True}}
    path.write_text(json.dumps(fp16))
    assert (
        'bf16.enabled is "auto" and taken for false; TrainingArguments say it'
        in ds_slide("plan", *options, "--batch", 4).answer["notes"]
    )
    two = ds_slide("plan", *options, "--batch", 4, "--ranks", 2).answer
    assert two["memory"]["host_state_bytes"] < one["memory"]["host_state_bytes"]
    assert any("NCCL" in note for note in two["notes"])
    without = ds_slide("plan", *options)
    assert without.code == 1 and "--batch" in without.error


@pytest.mark.usefixtures("no_search")
def test_the_batch_of_a_json_that_names_the_whole_one(
    ds_slide: Callable[..., Any], config: Callable[..., Path]
) -> None:
    path = config(train_batch_size=24, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps=3)
    answer = ds_slide("plan", "--deepspeed_config", path, *TWO_BLOCKS, *ROOM, *H200, "--json", "--ranks", 2).answer
    assert (answer["batch"], answer["micro_batches"]) == (4, 3)


def test_a_model_that_has_no_fused_attention_and_few_positions(
    ds_slide: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    shape = {"model_type": "gemma2", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 256}))
    ran = ds_slide("plan", "--deepspeed_config", config(), "--model", tmp_path, "--seq", 512, *ROOM, *H200)
    assert ran.code == 0 and "config.json has 256 positions" in ran.out
    assert "largest preset of its kind that fits with batch 2: none" in ran.out


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ("--model", "qwen2.5-3", "--seq", "64", *H200), "did you mean qwen2.5-"),
        ({"ds_slide": {"enabled": True, "windw": 3}}, PLANNED, "did you mean ds_slide.window?"),
        ({"zero_optimization": {"stage": 2}}, PLANNED, "zero_optimization.stage is 2"),
        ({"ds_slide": {"enabled": False}}, PLANNED, "does not switch DS-Slide on"),
        ({}, (*TWO_BLOCKS, "--ceilings", "no-such-machine"), "no preset (h200-16-cores)"),
        ({}, (*PLANNED, "--gpu-memory", "24G"), "--gpu-memory"),
        ({}, (*PLANNED, "--gpu-memory", "0"), "--gpu-memory is 0, which is 0 bytes"),
        ({"gradient_clipping": "x"}, PLANNED, 'gradient_clipping is "x"; expected a number'),
        ({"train_micro_batch_size_per_gpu": "8"}, PLANNED, 'train_micro_batch_size_per_gpu is "8"; expected a whole'),
        ({"train_batch_size": 7}, PLANNED, "train_batch_size is 7, which is not"),
    ],
)
def test_what_is_refused_in_a_sentence(
    ds_slide: Callable[..., Any],
    config: Callable[..., Path],
    changes: dict[str, Any],
    options: tuple[str, ...],
    message: str,
) -> None:
    ran = ds_slide("plan", "--deepspeed_config", config(**changes), *options)
    assert ran.code == 1 and message in ran.error and "Traceback" not in ran.error


@pytest.mark.slow
def test_the_process_is_as_large_as_the_ceilings_say(
    ds_slide: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    preset = json.loads((CEILINGS / "h200-16-cores.json").read_text())
    here = {**preset, "gpu": None, "cpu": preset["cpu"] | {"product_tflop_s": 0.2}}
    file = tmp_path / "ceilings.json"

    def processes(ceilings: dict[str, Any], *room: str) -> int:
        file.write_text(json.dumps(ceilings))
        path = config()
        ran = ds_slide("plan", "--deepspeed_config", path, *SMALL, *room, "--ceilings", file, "--json")
        return ran.answer["tiers"]["host"]["entries"]["processes"]

    measured = {"process_bytes": 700_000_000}
    assert processes(preset, *ROOM) == WITH_CUDA.before + WITH_CUDA.engine
    assert processes(preset | measured, *ROOM) == 700_000_000 + WITH_CUDA.engine
    assert processes(preset | measured, *ROOM, "--ranks", "2") == 2 * (700_000_000 + WITH_CUDA.engine)
    host = ("--host-memory", "4GiB")
    assert processes(here, *host) == ON_HOST.before + ON_HOST.engine
    assert processes(here | measured, *host) == 700_000_000 + ON_HOST.engine


def test_a_process_without_a_gpu_is_none_with_one() -> None:
    preset = read_ceilings("h200-16-cores")
    for gpu in (preset.gpu, None):
        ceilings = preset.model_copy(update={"gpu": gpu, "process_bytes": 5})
        assert [ceilings.process_of(on_gpu=on_gpu) for on_gpu in (gpu is not None, gpu is None)] == [5, None]


def test_a_plot(ds_slide: Callable[..., Any], config: Callable[..., Path], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    ran = ds_slide("plan", "--deepspeed_config", config(), *TWO_BLOCKS, *ROOM, *H200, "--plot", picture)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert ran.code == 1 and 'pip install "ds-slide[plot]"' in ran.error and not picture.exists()
    else:
        assert ran.code == 0 and picture.read_text().startswith("<?xml")


@pytest.mark.slow
def test_masters_of_compressed_matrices_are_exact_where_that_fits(
    ds_slide: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    shape = {"model_type": "llama", "vocab_size": 264, "hidden_size": 1024, "intermediate_size": 2816}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(shape | heads))

    def plan(master_dtype: str, gpu: int) -> Any:
        compression = {"type": "lsp", "d": 64, "master_dtype": master_dtype}
        block = {"enabled": True, "gpu_states": 0, "window": 3, "activations": "as_written", "compression": compression}
        path = config(ds_slide=block)
        room = ("--gpu-memory", str(gpu), "--host-memory", "8GiB")
        options = ("--model", tmp_path, "--seq", 512, "--batch", 1, *room, *H200, "--json")
        return ds_slide("plan", "--deepspeed_config", path, *options).answer

    plans = [plan(master_dtype, 8 << 30) for master_dtype in ("fp32", "auto", "bf16")]
    memory = [each["memory"] for each in plans]
    rounded = memory[2]["rounded_masters"]
    assert [each["rounded_masters"] for each in memory] == [0, 0, rounded] and rounded > 0
    assert memory[0]["gpu_bytes"] == memory[1]["gpu_bytes"] == memory[2]["gpu_bytes"] + 2 * rounded
    between = (plans[0]["tiers"]["gpu"]["needed"] + plans[2]["tiers"]["gpu"]["needed"]) // 2
    # With "auto", too: the engine knows nothing of activations, which are what has no place then.
    for master_dtype in ("fp32", "auto"):
        assert plan(master_dtype, between)["change"] == 'set "ds_slide": {"compression": {"master_dtype": "bf16"}}'
    assert plan("bf16", between)["memory"]["rounded_masters"] == rounded
    assert f"masters   of {rounded:,} parameters in bf16" in "\n".join(as_text(plan("bf16", between), "of any name"))


@pytest.mark.usefixtures("no_search")
def test_ranks_that_an_engine_would_refuse_are_not_planned(
    ds_slide: Callable[..., Any], config: Callable[..., Path]
) -> None:
    block = {"enabled": True, "share_weights": False, "compression": {"type": "lsp", "d": 64}}
    options = ("--deepspeed_config", config(ds_slide=block), *TWO_BLOCKS, *ROOM, *H200)
    assert ds_slide("plan", *options).code == 0
    ran = ds_slide("plan", *options, "--ranks", 2)
    assert ran.code == 1 and "ds_slide.share_weights is false and there are 2 ranks" in ran.out + ran.error


@pytest.mark.slow
def test_the_subspace_is_the_largest_that_hides(
    ds_slide: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    fast = json.loads((CEILINGS / "h200-16-cores.json").read_text())
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(fast | {"gpu": fast["gpu"] | dict.fromkeys(LINK, 0.02)}))

    def plan(ceilings: Path | str, d: int | str) -> Any:
        block = {"enabled": True, "gpu_states": 0, "compression": {"type": "lsp", "d": d}}
        options = ("--deepspeed_config", config(ds_slide=block), *SMALL, *ROOM, "--ceilings", ceilings, "--json")
        return ds_slide("plan", *options).answer

    def picked(ceilings: Path | str) -> int:
        (said,) = [note for note in plan(ceilings, "auto")["notes"] if "compression.d" in note]
        return int(said.split("taken for ")[1].split(",")[0])

    at_most = picked("h200-16-cores")
    assert 64 <= picked(slow) < at_most
    # Of what the compressed matrices send, and nothing else, there is less at a smaller d.
    lanes, less = plan(slow, at_most)["lanes"], plan(slow, 64)["lanes"]
    assert less["d2h"] < lanes["d2h"] and less["h2d"] < lanes["h2d"] and less["update"] < lanes["update"]


@pytest.mark.usefixtures("no_search")
def test_an_adapter_needs_states_for_what_it_trains(
    ds_slide: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    import peft

    peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM").save_pretrained(str(tmp_path))

    path = config(ds_slide={"enabled": True, "gpu_states": 0})

    def host_bytes(*adapter: object) -> int:
        ran = ds_slide("plan", "--deepspeed_config", path, *TWO_BLOCKS, *ROOM, *H200, *adapter, "--json")
        entries: dict[str, int] = ran.answer["tiers"]["host"]["entries"]
        return entries["placed by the plan"]

    assert 2 * host_bytes("--adapter", tmp_path) < host_bytes()


@pytest.mark.usefixtures("no_search")
def test_a_packed_base_needs_less_memory_and_more_time(
    ds_slide: Callable[..., Any], config: Callable[..., Path]
) -> None:
    path = config(ds_slide={"enabled": True, "gpu_states": 0})

    def plan(*options: object) -> Any:
        return ds_slide("plan", "--deepspeed_config", path, *TWO_BLOCKS, *ROOM, *H200, *options, "--json")

    answers = {kind: plan("--lora", 4, "--quantization", kind).answer for kind in ("none", "nf4", "int8")}
    host = {kind: answer["tiers"]["host"]["entries"]["placed by the plan"] for kind, answer in answers.items()}
    assert host["nf4"] < host["int8"] < host["none"]
    assert answers["nf4"]["lanes"]["compute"] > answers["none"]["lanes"]["compute"]
    refused = plan("--quantization", "nf4")
    assert refused.code == 1 and "name with --lora what trains beside them" in refused.error


def test_fused_experts_are_packed_where_they_are_asked_for() -> None:
    from transformers import Qwen3MoeConfig

    from ds_slide.cli.planning.model import ModelShape

    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 64}
    config = Qwen3MoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=32)

    def experts(kind: str) -> int:
        model = ModelShape("small", config, None, kind).build()
        return sum(each.numel() for name, each in model.named_parameters() if "experts" in name)

    assert experts("nf4-experts") * 2 == experts("nf4-double") == 3 * 4 * 64 * 64


def test_what_is_no_adapter(ds_slide: Callable[..., Any], config: Callable[..., Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "adapter_config.json").write_text('{"peft_type": "NONE_SUCH"}')
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["none_such"]}')
    for adapter, message in (
        ("0", "--adapter 0: a rank is 1 or more"),
        (tmp_path, "is neither a rank nor a directory with an adapter_config.json"),
        (wrong, "PEFT cannot read its adapter_config.json"),
        (other, "--adapter does not fit the model"),
    ):
        ran = ds_slide("plan", "--deepspeed_config", config(), *TWO_BLOCKS, *ROOM, *H200, "--adapter", adapter)
        assert ran.code == 1 and message in ran.error + ran.out
