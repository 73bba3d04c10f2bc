"""Models for `finetune.py`: published shapes built from a config without a download, or a local directory."""

from __future__ import annotations

import difflib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

MODELS = Path(__file__).resolve().parent.parent / "configs" / "models"
PRESETS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))}
"""Published shapes as transformers' configs. "tiny" has a token for each byte, and 256 separates documents: with it and
a few unused ones the vocabulary is a multiple of 8, which keeps the rows of GEMMs aligned."""


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
