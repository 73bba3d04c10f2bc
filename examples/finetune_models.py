"""Models for `finetune.py`: published shapes built from a config without a download, or a local directory."""

from __future__ import annotations

import difflib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# A byte is a token; the ids above 255 are specials (256 separates documents). A multiple of 8 keeps GEMM rows aligned.
BYTE_VOCABULARY = 264


def _qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool, eps: float = 1e-6
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        # The small ones share one matrix of 151,936 rows between input and output; from 7B on there are two of 152,064.
        "vocab_size": 151936 if tied else 152064,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2"},  # the defaults of GPT2Config are the published 124M model
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, tied=False),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, tied=False, eps=1e-5),
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}


def is_local_model(name: str) -> bool:
    """True when `name` is a Hugging Face model directory on this machine."""
    return (Path(name) / "config.json").is_file()


def model_config(name: str) -> PretrainedConfig:
    """Config of a preset or of a local Hugging Face directory, for training (no key-value cache).

    Raises ValueError when `name` is neither.
    """
    if is_local_model(name):
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    elif name in PRESETS:
        config = AutoConfig.for_model(**PRESETS[name])
    else:
        nearest = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(
            f"--model {name!r} is neither a preset nor a directory with a config.json: {hint}"
            f"presets are {', '.join(PRESETS)}"
        )
    config.use_cache = False
    return config


def build_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    zero_config: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model in `dtype` on `device`: random weights for a preset, the stored ones for a directory.

    The weights of a preset depend on `seed`, `dtype` and the kind of device only. With `zero_config` (a DeepSpeed JSON
    as a dict) the model is built under `deepspeed.zero.Init`: every module is partitioned as soon as it exists, so
    that no rank ever holds the whole model.
    """
    config = model_config(name)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    keep_alive = None
    if zero_config is not None:
        from transformers.integrations import HfDeepSpeedConfig

        # transformers enters zero.Init (and loads or initialises gathered weights) for as long as this object lives.
        keep_alive = HfDeepSpeedConfig(zero_config)
    # Building in place matters: a 7B model built on the host first costs minutes of initialisation on CPU.
    with nullcontext() if keep_alive is not None else torch.device(device):
        if is_local_model(name):
            model = AutoModelForCausalLM.from_pretrained(name, config=config, local_files_only=True, **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
    del keep_alive
    return model


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, tied ones once, also when ZeRO-3 has partitioned them."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
