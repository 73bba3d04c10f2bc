"""Settings with one value that is right for DS-Slide and others that are not, as tables.

A row is a key of `Values` (where the check finds the setting), the JSON path (where the user finds it), what is
supported, and the two halves of the sentence that refuses the rest.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
"""Settings by the argument names of DeepSpeedZeroOptimizer_Stage3's constructor, plus some of the engine's own."""


@dataclass(frozen=True)
class Refused:
    """One setting of which DS-Slide supports `allowed` only (the first of them stands for an absent one)."""

    name: str
    """Key in `Values`."""
    path: str
    """The JSON path where the user sets it."""
    allowed: tuple[Any, ...]
    why: str
    remedy: str


NO_SUPPORT = "DS-Slide does not support it"
_NO_QUANTIZATION = "DS-Slide does not support ZeRO++"
FP32_STATES = "DS-Slide keeps master weights and moments in fp32"

REFUSED_ENGINE_SETTINGS = (
    Refused("hybrid_engine", "hybrid_engine.enabled", (False,), NO_SUPPORT, "set it to false"),
    Refused(
        "deepcompile",
        "compile.deepcompile",
        (False,),
        "its passes move the parameters that DS-Slide moves",
        "set it to false",
    ),
    Refused("autotp_size", "tensor_parallel.autotp_size", (0, 1), "DS-Slide has no tensor parallelism", "set it to 0"),
    Refused(
        "expert_parallel", "expert_parallel.enabled", (False,), "DS-Slide has no expert parallelism", "set it to false"
    ),
    Refused(
        "sequence_parallel_size",
        "sequence_parallel_size",
        (1,),
        "DS-Slide has no sequence parallelism",
        "set it to 1",
    ),
    Refused(
        "pipeline_loading_checkpoint",
        "zero_optimization.pipeline_loading_checkpoint",
        (False,),
        NO_SUPPORT,
        "set it to false",
    ),
)

REFUSED_ZERO_SETTINGS = (
    Refused("zero_hpz_partition_size", "zero_optimization.zero_hpz_partition_size", (1, 0), _NO_QUANTIZATION, "use 1"),
    *(
        Refused(name, f"zero_optimization.{name}", (False,), _NO_QUANTIZATION, "set it to false")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    Refused("mics_shard_size", "zero_optimization.mics_shard_size", (-1, 0), NO_SUPPORT, "remove it"),
    Refused(
        "elastic_checkpoint",
        "zero_optimization.elastic_checkpoint",
        (False,),
        "ZeRO-3 has no elastic checkpoints",
        "set it to false and use universal checkpoints",
    ),
    Refused("prescale_gradients", "prescale_gradients", (False,), NO_SUPPORT, "set it to false"),
    Refused(
        "gradient_predivide_factor",
        "gradient_predivide_factor",
        (1.0,),
        "DS-Slide divides gradients by the world size only",
        "set it to 1.0",
    ),
    Refused(
        "fp16_master_weights_and_gradients",
        "fp16.fp16_master_weights_and_grads",
        (False,),
        FP32_STATES,
        "set it to false",
    ),
    Refused(
        "bf16_master_weights_and_gradients",
        "bf16.bf16_master_weights_and_grads",
        (False,),
        FP32_STATES,
        "set it to false",
    ),
    Refused("bf16_optimizer_states", "bf16.bf16_optimizer_states", (False,), FP32_STATES, "set it to false"),
)


def setting_problems(values: Values, refused: Iterable[Refused]) -> Iterator[str]:
    """Settings with one value that is right and others that are not."""
    for setting in refused:
        value = values.get(setting.name, setting.allowed[0])
        if value not in setting.allowed:
            yield f"{setting.path} is {json.dumps(value, default=repr)}, but {setting.why}; {setting.remedy}"
