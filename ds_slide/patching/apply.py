"""Puts the kernels into a model: each module that a patcher recognises is changed, but not its class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from ds_slide.patching.gated_mlp import patch_gated_mlp
from ds_slide.patching.head import patch_loss
from ds_slide.patching.kinds import Which, replaced_kind, resolve_kinds
from ds_slide.patching.lora import patch_lora
from ds_slide.patching.norms import patch_norm
from ds_slide.patching.rotary import patch_rotary


class Patch(Protocol):
    def undo(self) -> None: ...


# Each returns the patch of a module, the reason why a candidate stays unchanged, or None for a module of another kind.
# It remembers in a dictionary what it has found for modules that are alike.
PATCHERS: dict[str, Callable[[nn.Module, dict[Any, Any]], Patch | str | None]] = {
    "norm": patch_norm,
    "rope": patch_rotary,
    "mlp": patch_gated_mlp,
    "lora": patch_lora,
}
ABSENT = {
    "norm": "the model has no norm",
    "rope": "no forward in the model calls apply_rotary_pos_emb",
    "mlp": "the model has no gated feed-forward",
    "lora": "the model has no adapters of PEFT on linear layers",
}


@dataclass(frozen=True)
class Replaced:
    """The kernels that were put into a model."""

    counts: Mapping[str, int]
    """Numbers of replaced modules, for each kind that was asked for and found."""
    reasons: Mapping[str, str]
    """One reason for each kind why a module (or all) stayed unchanged; no entry where all were replaced."""
    patches: list[Patch] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the modules their old forwards back. Harmless when called twice."""
        while self.patches:
            self.patches.pop().undo()

    def as_dict(self) -> dict[str, dict[str, int] | dict[str, str]]:
        """Return the form of the statistics: {"replaced": counts, "not_replaced": reasons}."""
        return {"replaced": dict(self.counts), "not_replaced": dict(self.reasons)}

    def __str__(self) -> str:
        counts = ", ".join(f"{kind} {count}" for kind, count in self.counts.items()) or "none"
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in self.reasons.items())
        return f"{counts}; not replaced: {reasons}" if reasons else counts


def apply_kernels(model: nn.Module, which: Which = "auto", device_type: str | None = None) -> Replaced:
    """Put the kernels of the kinds `which` into `model` and say what was replaced.

    `which`: "auto" (all kinds on a GPU, none elsewhere), "off", or a list out of "loss", "norm", "rope", "mlp" and
    "lora".
    `device_type`: where the model will run, "cuda" or "cpu"; None: "cuda" if torch sees one.

    A module is replaced when its class computes, on random numbers, what the kernel computes; the model's parameters
    are neither read nor needed. Nothing outside of `model` changes. A second call replaces nothing. Raises
    SlideConfigError like `resolve_kinds`.
    """
    kinds = resolve_kinds(which, device_type)
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    patches: list[Patch] = []
    modules = list(model.modules())
    for kind in kinds:
        if kind == "loss":
            _note(kind, patch_loss(model), counts, reasons, patches)
            continue
        known: dict[Any, Any] = {}
        ours = False
        for module in modules:
            before = replaced_kind(module)
            ours = ours or before == kind
            if before is None:
                _note(kind, PATCHERS[kind](module, known), counts, reasons, patches)
        is_usual = kind != "lora" or which != "auto"  # most models have no adapters, which is no news
        if not counts[kind] and kind not in reasons and is_usual:
            reasons[kind] = "it was replaced before" if ours else ABSENT[kind]
    counted: dict[str, int] = {kind: counts[kind] for kind in kinds if counts[kind]}
    return Replaced(MappingProxyType(counted), MappingProxyType(reasons), patches)


def _note(
    kind: str, result: Patch | str | None, counts: Counter[str], reasons: dict[str, str], patches: list[Patch]
) -> None:
    if isinstance(result, str):
        reasons.setdefault(kind, result)
    elif result is not None:
        counts[kind] += 1
        patches.append(result)
