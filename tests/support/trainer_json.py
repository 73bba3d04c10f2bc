"""The DeepSpeed JSON that users of Hugging Face's Trainer write."""

from __future__ import annotations

from typing import Any


def trainer_json(slide: dict[str, Any] | None) -> dict[str, Any]:
    """ "auto" wherever the Trainer has the value. `slide`: more of the "ds_slide" block; None is stock ZeRO-3."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
    }
    return config if slide is None else {**config, "ds_slide": {"enabled": True, **slide}}
