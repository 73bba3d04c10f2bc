"""What tools touch of stock's optimizer: the value that stock has, or a sentence that says what to use instead."""

from __future__ import annotations

import pickle
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_modules
from harness import ADAMW, batches, causal_loss, ds_config, engine_for, llama

from ds_slide.errors import SlideAttributeError, SlideError
from ds_slide.integration.optimizer import SlideZeroOptimizer

pytestmark = pytest.mark.usefixtures("one_rank")

# torch's own AdamW: for states on the accelerator DeepSpeed would compile an operator for two minutes.
ON_GPU = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}}}
NAMES = {
    "fp32_partitioned_groups_flat": "use deepspeed.utils.safe_get_full_fp32_param",
    "fp16_partitioned_groups": "use deepspeed.zero.GatheredParameters",
    "averaged_gradients": "use deepspeed.utils.safe_get_full_grad",
    "grad_partitions_flat_buffer": "use deepspeed.utils.safe_get_full_grad",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition": "use deepspeed.utils.safe_get_full_grad",
    "norm_for_param_grads": "use engine.get_global_grad_norm()",
    "what_no_optimizer_has": "or set ds_slide.enabled to false",
}


@pytest.fixture(scope="module")
def engine(one_rank: None) -> Any:  # noqa: ARG001 - it must be there first
    with engine_for(llama(), ds_config({}, **ON_GPU)) as engine:
        yield engine


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_of_stock_is_told_what_to_use(engine: Any, name: str) -> None:
    assert not hasattr(engine.optimizer, name)
    assert getattr(engine.optimizer, name, "absent") == "absent"
    with pytest.raises(SlideAttributeError, match=r"^DS-Slide's optimizer has no attribute '") as raised:
        getattr(engine.optimizer, name)
    assert NAMES[name] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_attribute_of_stock_is_there_or_told(engine: Any) -> None:
    with engine_for(llama(), ds_config(None, **ON_GPU)) as stock:
        assert type(stock.optimizer) is DeepSpeedZeroOptimizer_Stage3
        names = [*vars(stock.optimizer), *dir(DeepSpeedZeroOptimizer_Stage3)]
    assert "fp32_partitioned_groups_flat" in names
    for name in names:
        try:
            getattr(engine.optimizer, name)
        except SlideAttributeError as error:
            assert "DS-Slide" in str(error)


def test_a_method_of_stock_that_needs_private_state_says_so(engine: Any) -> None:
    for call in (engine.optimizer.get_fp32_grad_partitions, engine.optimizer._get_norm_groups):
        with pytest.raises(SlideAttributeError, match="DS-Slide's optimizer has no attribute"):
            call()


def test_the_error_survives_a_process_pool() -> None:
    error = pickle.loads(pickle.dumps(SlideAttributeError("a sentence")))
    assert type(error) is SlideAttributeError and str(error) == "a sentence"


def test_values_that_stock_has() -> None:
    found = []
    for slide in (None, {}):
        model = llama()
        set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
        with engine_for(model, ds_config(slide, **ON_GPU)) as engine:
            names = {parameter: name for name, parameter in model.named_parameters()}
            modules = {module: name for name, module in model.named_modules()}
            leaves = {
                modules[module]: [names[parameter] for parameter in parameters]
                for module, parameters in engine.optimizer.leaf_parameters.items()
            }
            found.append((leaves, engine.optimizer.model_parallel_group, engine.optimizer.model_parallel_rank))
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


def test_what_stays_on_the_gpu_is_called_persistent() -> None:
    """And nothing else, whatever zero.Init has chosen by stage3_param_persistence_threshold."""
    config = ds_config({"window": 2, "gpu_states": 0}, **ON_GPU)
    model = llama()
    deepspeed.zero.Init(model, config_dict_or_path=config)
    for parameter in model.parameters():
        parameter.ds_persist = True
    with engine_for(model, config) as engine:
        engine.backward(causal_loss(engine, batches(1)[0]))
        parameters: dict[str, Any] = dict(model.named_parameters())
        here = {name for name, parameter in parameters.items() if parameter.ds_status == ZeroParamStatus.AVAILABLE}
        assert here == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert {name for name, parameter in parameters.items() if parameter.ds_persist} == here


def test_moving_states_is_refused_in_a_sentence(engine: Any) -> None:
    assert isinstance(engine.optimizer, SlideZeroOptimizer)
    with pytest.raises(SlideError, match=r"^engine.offload_states\(\) is not supported by DS-Slide: .* use ds_slide"):
        engine.offload_states()
    assert engine.reload_states() is None  # as in stock: nothing was offloaded
    assert torch.isfinite(engine(torch.zeros(1, 4, dtype=torch.long)).logits).all()
