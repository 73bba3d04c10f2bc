"""The planned model, built on the meta device, where it takes no memory."""

from __future__ import annotations

import copy
import difflib
import json
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_slide.cli.planning.quantization import pack
from ds_slide.errors import SlideConfigError

PRESETS = Path(__file__).resolve().parents[2].joinpath("configs", "models")


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.json"))


@dataclass(frozen=True)
class ModelShape:
    """A causal language model by its config. `name`: a preset's name, or the directory. `adapter`: PEFT's config of the
    trained part beside frozen weights; None where all weights are trained. `quantization`: how the frozen weights are
    packed (`ds_slide.cli.planning.quantization`)."""

    name: str
    config: Any
    adapter: Any = None
    quantization: str = "none"

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """Return the shape of a preset or a Hugging Face directory. Raises SlideConfigError for neither."""
        from transformers import AutoConfig

        if (Path(name) / "config.json").is_file():
            try:
                return cls(name, AutoConfig.from_pretrained(name, local_files_only=True))
            except (ValueError, OSError) as error:
                first = str(error).splitlines()[0]
                raise SlideConfigError(f"--model {name}: transformers cannot read its config.json ({first})") from error
        if name in preset_names():
            return cls(name, AutoConfig.for_model(**json.loads((PRESETS / f"{name}.json").read_text())))
        near = difflib.get_close_matches(name, preset_names(), n=1)
        raise SlideConfigError(
            f"--model {name} is neither a preset nor a directory with a config.json"
            f"{f' (did you mean {near[0]}?)' if near else ''}; presets are {', '.join(preset_names())}"
        )

    def build(self) -> Any:
        """Build a new model in training mode, in fp32. Raises SlideConfigError where it is no causal language model."""
        from transformers import AutoModelForCausalLM

        self.config.use_cache = False
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.config)
        except (ValueError, ImportError) as error:
            raise SlideConfigError(
                f"--model {self.name} cannot be built as a causal language model ({str(error).splitlines()[0]})"
            ) from error
        if self.quantization != "none":
            pack(model, self.quantization)
        if self.adapter is not None:
            try:
                with torch.device("meta"):
                    model = with_adapter(model, copy.deepcopy(self.adapter))
            except ValueError as error:
                raise SlideConfigError(f"--adapter does not fit the model ({str(error).splitlines()[0]})") from error
        return model.train()

    @cached_property
    def parameters(self) -> int:
        """The parameters of the model as it is trained without adapters and packing."""
        plain = replace(self, adapter=None, quantization="none")
        return sum(parameter.numel() for parameter in plain.build().parameters())

    def family(self) -> list[ModelShape]:
        """Return the presets of the same kind, the largest first."""
        found = [ModelShape.named(name) for name in preset_names()]
        same = [
            replace(shape, adapter=self.adapter, quantization=self.quantization)
            for shape in found
            if shape.config.model_type == self.config.model_type
        ]
        return sorted(same, key=lambda shape: -shape.parameters)


def read_adapter(text: str) -> Any:
    """Return PEFT's config: LoRA on all linear layers where `text` is a rank, otherwise the one in the directory
    `text`.

    Raises SlideConfigError without PEFT, for a rank of 0, and for a directory without an adapter_config.json.
    """
    try:
        import peft
    except ImportError as error:
        raise SlideConfigError("--adapter needs PEFT: pip install peft") from error
    if text.isdigit():
        if int(text) < 1:
            raise SlideConfigError(f"--adapter {text}: a rank is 1 or more")
        return peft.LoraConfig(r=int(text), target_modules="all-linear", task_type="CAUSAL_LM")
    if not (Path(text) / "adapter_config.json").is_file():
        raise SlideConfigError(f"--adapter {text} is neither a rank nor a directory with an adapter_config.json")
    try:
        config = peft.PeftConfig.from_pretrained(text)
    except (KeyError, ValueError, TypeError, OSError) as error:
        first = str(error).splitlines()[0]
        raise SlideConfigError(f"--adapter {text}: PEFT cannot read its adapter_config.json ({first})") from error
    config.inference_mode = False  # a saved adapter says that it is not trained
    return config


def with_adapter(model: Any, adapter: Any) -> Any:
    """Return the model that a script with PEFT prepares for training with gradient checkpointing."""
    import peft

    model = peft.get_peft_model(model, adapter)
    model.enable_input_require_grads()
    return model


def set_checkpointing(model: nn.Module, on: bool) -> None:
    """Make blocks recompute in backward, like Trainer's `gradient_checkpointing`, or keep what they save."""
    either: Any = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that older versions of transformers do not have
        if not on:
            either.gradient_checkpointing_disable()
            return
        # The meta device has no random numbers that have to be kept.
        either.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
