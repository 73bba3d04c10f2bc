"""Adapters on frozen weights that are packed: they stream as bytes, beside what trains.

The window is smaller than the model, and an evaluation between forward and backward gives the blocks other slots: what
a library keeps for backward by itself must not be the content of a slot.

bitsandbytes is not among the packages of `make test`; it has a client environment (`make test-clients`).
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import deepspeed
import pytest
import torch
from harness import (
    Result,
    batches,
    differences,
    ds_config,
    engine_for,
    llama,
    on_ssd,
    plain_training,
    states_of,
    to_bf16,
    train,
)
from packed import BITSANDBYTES, PLAIN, SHAPE, SUBCLASSES, TORCHAO, PackedTensor, forward_between, pack, packed_model

from ds_slide.errors import SlideConfigError, SlideError
from ds_slide.integration.activation import move_all_but_parameters
from ds_slide.runtime.core.calls import in_backward

WINDOW = {"window": 3, "gpu_states": 0}
ON_SSD = {"window": 2, "gpu_states": 0, "host_memory": 0}
STEPS = 2
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
AS_CLIENTS = [pytest.param(kind, WINDOW, marks=[needs_bitsandbytes, pytest.mark.clients]) for kind in BITSANDBYTES]
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
KINDS = [
    *PLAIN,
    *(pytest.param(kind, marks=[needs_bitsandbytes, pytest.mark.clients]) for kind in BITSANDBYTES),
    *(pytest.param(kind, marks=[needs_torchao, pytest.mark.clients]) for kind in TORCHAO),
]

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small, so tensors beside their packed weights are."""
    monkeypatch.setattr("ds_slide.model.carried.LEAST_BYTES", 256)


def trained(kind: str, config: dict[str, Any], **options: Any) -> Result:
    model = packed_model(kind, **options)
    with engine_for(model, config) as engine:
        result = train(engine, batches(STEPS), forward_between)
        result.states = states_of(model)
    return result


@functools.cache
def streamed(kind: str) -> Result:
    return trained(kind, ds_config(WINDOW))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_states_are_plain_torchs(kind: str) -> None:
    model = packed_model(kind)
    if kind == "fp8":  # DeepSpeed converts the fp32 scales, which are parameters of the model, to bf16
        for name, parameter in model.named_parameters():
            if name.endswith("weight_scale_inv"):
                parameter.data = parameter.data.bfloat16()
    plain = plain_training(model, batches(STEPS), 1.0, loss_of=forward_between)
    found = streamed(kind)
    if kind in SUBCLASSES:  # the engine has taken the weights apart
        codes = [
            p.codes if isinstance(p, PackedTensor) else p.qdata
            for p in model.parameters()
            if hasattr(p, "__tensor_flatten__")
        ]
        packed = [states["weight"] for name, states in found.states.items() if name.endswith("original")]
        assert len(packed) == len(codes) == 35 and all(map(torch.equal, packed, codes))
        plain, found = (
            Result(
                each.losses, each.norms, {name: states for name, states in each.states.items() if "master" in states}
            )
            for each in (plain, found)
        )
    assert differences(found, plain) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.slow), False])
def test_checkpointing_changes_no_bit(kind: str, reentrant: bool) -> None:
    found = trained(kind, ds_config(WINDOW), checkpoints={"use_reentrant": reentrant})
    assert differences(found, streamed(kind)) == []


CARRIED = {
    "nf4": {"weight.absmax"},
    "fp4": {"weight.absmax"},
    "nf4_double": {"weight.absmax", "weight.nested_code"},
    "int8": {"weight.SCB", "weight.CB"},
    "buffers": {"qweight", "scales", "qzeros"},
    "fp8": set(),
    "torchao-int8": {
        "parametrizations.weight.original.packed_scale",
        "parametrizations.weight.original.packed_zero_point",
    },
    "torchao-float8": {"parametrizations.weight.original.packed_scale"},
    "subclass": {"parametrizations.weight.original.packed_scales"},
    "mixed": set(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_beside_packed_weights_moves_with_the_block(kind: str) -> None:
    """On the GPU there is no more than the outer modules, the slots, and adapters and norms."""
    layer = "model.layers.2.mlp.up_proj."
    with engine_for(packed_model(kind), ds_config(WINDOW)) as engine:
        (block,) = [unit for unit in engine.optimizer.runtime.blocks if unit.name == "model.layers.2"]
        names = {each.name for each in block.spec.carried if each.name.startswith(layer)}
        assert {name.removeprefix(layer) for name in names} == CARRIED[kind]
        frozen = [entry for entry in block.layout.entries if not entry.trainable]
        assert sum(entry.numel for entry in frozen) > 1000 or kind == "buffers"
        assert block.dtype == (torch.bfloat16 if kind == "mixed" else torch.uint8)


@pytest.mark.parametrize(("kind", "slide"), [*((kind, WINDOW) for kind in PLAIN), ("buffers", ON_SSD), *AS_CLIENTS])
def test_a_resumed_run_continues_to_the_bit(kind: str, slide: dict[str, int], disk: Path, tmp_path: Path) -> None:
    """And the checkpoint holds the packed weights once: tensors in a block are views of a state buffer."""
    config = on_ssd(ds_config(slide), disk) if slide is ON_SSD else ds_config(slide)
    with engine_for(packed_model(kind), config) as engine:
        first = train(engine, batches(STEPS)[:1], forward_between)
        engine.save_checkpoint(tmp_path)
    model = packed_model(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "norm" in name:
                parameter.zero_()
    with engine_for(model, config) as engine:
        # bitsandbytes' layers save the states of their weights, but load none. Trainer loads like this, too.
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        result = train(engine, batches(STEPS)[1:], forward_between)
        result.states = states_of(model)
    result.losses = first.losses + result.losses
    assert differences(result, streamed(kind)) == []
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.pt"))
    tensors = {id(tensor): tensor for tensor in (*packed_model(kind).state_dict().values(),)}
    assert written < 1.1 * sum(tensor.nbytes for tensor in tensors.values()) + 1_000_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", ["ssd", "gpu", pytest.param("two passes", marks=pytest.mark.slow)])
def test_places_change_no_bit(kind: str, way: str, disk: Path) -> None:
    config = {
        "ssd": lambda: on_ssd(ds_config(ON_SSD), disk),
        "gpu": lambda: ds_config({"gpu_states": 2_000_000}),
        "two passes": lambda: ds_config({"window": 2, "gpu_states": 0, "update_passes": 2}),
    }[way]()
    model = packed_model(kind)
    with engine_for(model, config) as engine:
        assert (engine.optimizer.runtime.blocks[2].state.weights.buffer.tier == "ssd") == (way == "ssd")
        result = train(engine, batches(STEPS), forward_between)
        result.states = states_of(model)
    assert differences(result, streamed(kind)) == []


def test_buffers_are_whole_between_forwards_and_after_the_engine() -> None:
    model = packed_model("buffers")
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def as_expected(found: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(found[name], buffer) for name, buffer in expected.items() if name in found)

    with engine_for(model, ds_config(WINDOW)) as engine:
        unit = engine.optimizer.runtime.blocks[2]
        assert len(unit.carried) >= 7
        train(engine, batches(1))
        assert as_expected(dict(model.named_buffers())) and as_expected(model.state_dict())
    assert as_expected(dict(model.named_buffers())) and as_expected(model.state_dict())
    with engine_for(model, ds_config(WINDOW)) as engine:
        train(engine, batches(1))
        assert as_expected(dict(model.named_buffers()))


def test_buffers_on_ssd_are_read_and_written_by_state_dicts(disk: Path) -> None:
    """Between forwards they are as empty as parameters. A checkpoint that is loaded brings other values."""
    model, other = packed_model("buffers"), packed_model("buffers")
    for layer in other.model.layers:
        layer.mlp.gate_proj.scales.mul_(2.0)
    saved, new = ({name: each.clone() for name, each in some.state_dict().items()} for some in (model, other))
    with engine_for(other, ds_config(WINDOW)) as engine:
        expected = train(engine, batches(1)).losses
    with engine_for(model, on_ssd(ds_config(ON_SSD), disk)) as engine:
        unit, buffer = engine.optimizer.runtime.blocks[2], model.model.layers[1].mlp.gate_proj.scales
        assert unit.state.weights.buffer.tier == "ssd" and len(unit.carried) >= 7
        engine(**batches(1)[0])
        found = {name: each for name, each in model.state_dict().items() if each.numel()}
        assert {name.rpartition(".")[2] for name in found} >= {"qweight", "scales", "qzeros"}
        assert all(torch.equal(each, saved[name]) for name, each in found.items())
        assert not buffer.numel()
        model.load_state_dict({name: new[name] for name in found if "scales" in name}, strict=False)
        assert not buffer.numel() and torch.equal(
            model.state_dict()["model.layers.1.mlp.gate_proj.scales"],
            2.0 * found["model.layers.1.mlp.gate_proj.scales"],
        )
        assert train(engine, batches(1)).losses == expected
        buffer.mul_(2.0)
        with pytest.raises(SlideError, match=r"scales was written between forwards, but it is on SSD"):
            engine(**batches(1)[0])


def test_packed_weights_in_buffers_wait_for_the_engine() -> None:
    """DeepSpeed moves buffers to the accelerator at first, where such a model may have no room."""
    model = packed_model("buffers")
    layer = model.model.layers[0].mlp.gate_proj
    layer.register_buffer("small", torch.zeros(2))
    move_all_but_parameters(model, torch.device("meta"))
    devices = {name: buffer.device.type for name, buffer in layer.named_buffers()}
    assert devices == {"qweight": "cpu", "scales": "cpu", "qzeros": "cpu", "small": "meta"}
    assert model.model.embed_tokens.weight.device.type == "cpu"
    assert {buffer.device.type for buffer in model.model.rotary_emb.buffers()} == {"meta"}


def test_a_buffer_that_a_script_writes_is_used_from_then_on() -> None:
    seen = []
    for written in (False, True):
        model = packed_model("buffers")
        if not written:
            model.model.layers[1].mlp.gate_proj.scales.mul_(2.0)
        with engine_for(model, ds_config({"window": 5, "gpu_states": 0})) as engine:
            engine(**batches(1)[0])
            if written:
                model.model.layers[1].mlp.gate_proj.scales.mul_(2.0)
            seen.append(train(engine, batches(1)).losses)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ("fp8", "mixed") else kind for kind in KINDS]
)
def test_replayed_blocks_have_the_same_bits(kind: str) -> None:
    """With all on the GPU. Blocks without an input that needs a gradient run as they are written."""
    found, replayed = [], []
    for wanted in (False, True):
        slide = {"gpu_memory": "1GiB", "gpu_states": "1GiB", "captured_blocks": wanted}
        model = packed_model(kind)
        with engine_for(model, ds_config(slide)) as engine:
            result = train(engine, batches(12))
            result.states = states_of(model)
            found.append(result)
            replayed.append(engine.optimizer.slide_stats()["activations"]["replayed"])
    assert differences(*found) == []
    assert replayed == [0, 0 if kind == "int8" else 4]  # bitsandbytes' int8 layers have state of their own


@pytest.mark.parametrize("kind", ["buffers", "subclass"])
def test_a_recomputation_that_nobody_asks_for_reads_the_slot(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forwards these tensors are in host memory. A recomputation that computed with a copy of them from there
    failed on a GPU."""
    model, noted = packed_model(kind), SimpleQueue[tuple[bool, int]]()  # a list would be state of the block
    layer = model.model.layers[1].mlp.gate_proj
    original = type(layer).forward

    def noting(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self is layer:
            packed = (self.weight.codes, self.weight.scales) if kind == "subclass" else self.buffers()
            noted.put((in_backward(), len({each.untyped_storage().data_ptr() for each in packed})))
        return original(self, x)

    monkeypatch.setattr(type(layer), "forward", noting)
    with engine_for(model, ds_config(WINDOW | {"gpu_memory": "1GiB"})) as engine:
        train(engine, batches(2))
    assert [noted.get() for _ in range(noted.qsize())] == [(False, 1), (True, 1)] * 2


def test_a_buffer_that_a_forward_writes_is_refused() -> None:
    model = packed_model("buffers")
    layer = model.model.layers[1].mlp.gate_proj
    layer.register_forward_pre_hook(lambda module, _: [module.scales.mul_(1.0)] and None)
    with (
        engine_for(model, ds_config(WINDOW)) as engine,
        pytest.raises(SlideError, match=r"mlp\.gate_proj\.scales was written by a forward of model\.layers\.1, but"),
    ):
        engine(**batches(1)[0])


def test_a_trained_parameter_of_such_a_data_type_is_refused() -> None:
    model = packed_model("fp8")
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(True)
    with (
        pytest.raises(
            SlideConfigError,
            match=r"mlp\.gate_proj\.weight is torch\.float8_e4m3fn and requires a gradient, but DS-Slide trains .*"
            r"freeze it with requires_grad_\(False\), which any data type allows",
        ),
        engine_for(model, ds_config(WINDOW)),
    ):
        pass


def test_a_subclass_that_trains_is_refused() -> None:
    model = packed_model("subclass")
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    with (
        pytest.raises(
            SlideConfigError,
            match=r"parameter model.layers.1.mlp.up_proj.weight is a PackedTensor, but DS-Slide trains and divides "
            r"plain tensors; freeze it with requires_grad_\(False\)",
        ),
        engine_for(model, ds_config(WINDOW)),
    ):
        pass


def test_adapters_on_a_subclass_are_not_merged() -> None:
    """In plain torch it depends on the subclass. PEFT would look for a weight that is there no more."""
    peft = pytest.importorskip("peft")
    model = pack(to_bf16(llama(0, **SHAPE)), "subclass")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    message = r"the adapter on .*layers\.0\.self_attn\.q_proj cannot be merged, .* load them on a fresh base"
    with engine_for(model, ds_config(WINDOW)) as engine:
        train(engine, batches(1))
        with deepspeed.zero.GatheredParameters(list(model.parameters())), pytest.raises(SlideError, match=message):
            model.merge_and_unload()
    with pytest.raises(SlideError, match=message):
        model.merge_and_unload()
