"""Load a mixture with all of it in 4 bits: `from_pretrained` packs linear layers, and here fused experts, too.

    model = AutoModelForCausalLM.from_pretrained(
        name, quantization_config=PackedExpertsConfig(), device_map={"": "cpu"}, dtype=torch.bfloat16
    )

Each 3-D parameter of experts is packed by bitsandbytes as soon as it has been read, so no copy of the model in bf16 is
ever in memory. Then follow `prepare_model_for_kbit_training` of PEFT and the adapters. Adapters on the experts
(`target_parameters`) are put there inside of `as_parameters`:

    with as_parameters(model):
        model = get_peft_model(model, config)

Needs transformers 5.24 and bitsandbytes 0.50.2. The script imports nothing of DS-Slide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise
from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

METHOD = "bitsandbytes_with_experts"


@register_quantization_config(METHOD)
class PackedExpertsConfig(BitsAndBytesConfig):
    """nf4 with double quantisation, unless `options` of `BitsAndBytesConfig` say otherwise."""

    def __init__(self, **options: Any) -> None:
        settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | options
        settings |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
        super().__init__(**settings)
        self.quant_method = METHOD


class _Pack(Bnb4bitQuantize):
    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str | None = None,
        model: Any = None,
        missing_keys: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        config, left = self.hf_quantizer.quantization_config, {}
        for name, value in input_dict.items():
            module, attribute = get_module_from_name(model, name)
            if not _is_of_experts(module, attribute):
                left[name] = value
                continue
            weight = value[0] if isinstance(value, list) else value
            kind, double = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
            put_packed(module, attribute, weight, weight.shape, kind, double=double)
            module._is_hf_initialized = True
            missing_keys.discard(name)  # it has other names now, which the checkpoint does not have
        return super().convert(left, full_layer_name, model, **kwargs) if left else {}


def put_packed(
    module: nn.Module, name: str, experts: Iterable[torch.Tensor], shape: torch.Size, kind: str, *, double: bool
) -> None:
    """Replace a 3-D parameter by its packed bytes, in host memory. Reading the attribute widens them then."""
    data, state = _packed(experts, shape, kind, double=double)
    module._parameters[name] = nn.Parameter(data, requires_grad=False)
    replace_parameter_4bit_prequantized(module, name, state.as_dict(packed=True), data.device)


def _packed(
    experts: Iterable[torch.Tensor], shape: torch.Size, kind: str, *, double: bool
) -> tuple[torch.Tensor, QuantState]:
    """Return what `quantize_4bit` makes of the whole parameter. It works in fp32, so it gets one expert at a time, on a
    GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed = [quantize_4bit(expert.to(device), quant_type=kind) for expert in experts]
    state = packed[0][1]
    state.to("cpu")
    absmax = torch.cat([of_expert.absmax.cpu() for _, of_expert in packed])
    state.shape, state.absmax = shape, absmax
    if double:  # over all experts together
        state.offset, state.nested = absmax.mean(), True
        state.absmax, state.state2 = quantize_blockwise(absmax - state.offset, blocksize=256)
    return torch.cat([data for data, _ in packed]).cpu(), state


@register_quantizer(METHOD)
class PackedExperts(Bnb4BitHfQuantizer):
    """bitsandbytes' quantizer, for experts as well."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        of_experts = _is_of_experts(*get_module_from_name(model, param_name))
        return of_experts or super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> _Pack:
        return _Pack(self)


def _is_of_experts(module: nn.Module, name: str) -> bool:
    """Whether it is a 3-D parameter of transformers' fused experts, each of which has whole blocks of 64 numbers."""
    parameter = module._parameters.get(name)
    if parameter is None or parameter.dim() != 3 or not hasattr(module, "num_experts"):
        return False
    return parameter[0].numel() % 64 == 0


@contextmanager
def as_parameters(model: nn.Module) -> Iterator[None]:
    """Show the packed parameters as what they stand for: parameters of the same shape and data type, without memory of
    their own. So `target_parameters` of PEFT finds them, and adapters get the names that they have on a base in bf16.
    """
    packed = [module for module in model.modules() if hasattr(module, "num_experts") and is_parametrized(module)]
    lists = [module._modules.pop("parametrizations") for module in packed]
    for module, of_module in zip(packed, lists, strict=True):
        for name in sorted(of_module, reverse=True):  # gate_up_proj, down_proj: as the module had them
            state = of_module[name][0].quant_state
            shown = torch.empty((), dtype=state.dtype, device=state.absmax.device).expand(state.shape)
            module._parameters[name] = nn.Parameter(shown, requires_grad=False)
    try:
        yield
    finally:
        for module, of_module in zip(packed, lists, strict=True):
            for name in of_module:
                del module._parameters[name]
            module._modules["parametrizations"] = of_module
