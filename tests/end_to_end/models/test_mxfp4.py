"""gpt-oss in MXFP4 beside plain torch: widened by transformers, and packed as raw tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fused_experts import LAYERS
from harness import Result, batches, differences, ds_config, engine_for, plain_training, states_of, to_bf16, train
from mxfp4 import CASES, EXPERTS, INNER, config, loaded, made, packed, write_checkpoint
from packed import forward_between

from ds_slide.errors import SlideConfigError

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_rank")
SLIDE: dict[str, Any] = {"window": 2, "gpu_states": 0}
# In plain torch PEFT fails on packed experts. It adapts the widened ones, which are the same numbers.
IN_PLAIN_TORCH = {"packed, adapted": "widened, one adapted"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mxfp4"))


def only_trained(result: Result) -> Result:
    return Result(result.losses, result.norms, {name: each for name, each in result.states.items() if "master" in each})


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_adapters_have_the_bits_of_plain_torch(case: str, checkpointed: bool, folder: Path) -> None:
    reference = made(folder, IN_PLAIN_TORCH.get(case, case), checkpointed=checkpointed)
    plain = plain_training(reference, batches(2), 1.0, loss_of=forward_between)
    model = made(folder, case, checkpointed=checkpointed)
    with engine_for(model, ds_config(SLIDE)) as engine:
        blocks = engine.optimizer.runtime.blocks
        raw = [entry.numel for entry in blocks[1].layout.entries if ".original" in entry.name]
        assert sum(raw) == (EXPERTS * 3 * INNER * INNER * 17 // 32 if "packed" in case else 0)
        found = train(engine, batches(2), forward_between)
        found.states = states_of(model)
    integers = [states for states in found.states.values() if states["weight"].dtype == torch.uint8]
    assert len(integers) == (4 * LAYERS if "packed" in case else 0)
    if case in IN_PLAIN_TORCH:
        plain, found = (only_trained(each) for each in (plain, found))
    assert len(blocks) == LAYERS and differences(found, plain) == []


@pytest.mark.parametrize("case", ["widened", "packed, adapted"])
def test_a_resumed_run_continues_to_the_bit(case: str, folder: Path, tmp_path: Path) -> None:
    """On a model whose packed experts and adapters were others before."""
    model = made(folder, case)
    with engine_for(model, ds_config(SLIDE)) as engine:
        train(engine, batches(1))
        engine.save_checkpoint(tmp_path)
        expected = train(engine, batches(3)[1:])
        expected.states = states_of(model)
    model = made(folder, case)
    for parameter in model.parameters():
        parameter.data.zero_()
    with engine_for(model, ds_config(SLIDE)) as engine:
        engine.load_checkpoint(tmp_path)
        found = train(engine, batches(3)[1:])
        found.states = states_of(model)
    assert differences(found, expected) == []


def test_packed_experts_are_those_that_transformers_widens(folder: Path) -> None:
    ids = batches(1)[0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(packed(folder)(input_ids=ids).logits, loaded(folder)(input_ids=ids).logits)


def test_weights_in_the_layout_of_kernels_are_refused() -> None:
    """They are on the GPU in objects that are no tensors, and their kernels have no backward."""
    from transformers import GptOssForCausalLM
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    model = to_bf16(GptOssForCausalLM(config())).requires_grad_(False)
    model.model.layers[1].mlp.experts = Mxfp4GptOssExperts(config())
    model.lm_head.requires_grad_(True)
    message = (
        r"the MXFP4 experts of model.layers.1.mlp.experts have no backward.*; load the model with "
        r"quantization_config=Mxfp4Config\(dequantize=True\)"
    )
    with pytest.raises(SlideConfigError, match=message), engine_for(model, ds_config(SLIDE)):
        pass
