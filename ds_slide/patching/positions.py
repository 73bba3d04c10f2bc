"""Positions that a decoder of transformers makes itself, without a question to the GPU.

A decoder that gets neither positions nor a mask numbers its tokens, and `find_packed_sequence_indices` asks the GPU
whether the numbers follow each other. So each forward waits until the backward before it has ended, and the GPU waits
for the host after that: 10 of 88 ms a micro-batch with 3 B and 1 x 2048 tokens on an H200, all on the GPU.

A decoder whose forward has the known lines gets these numbers from here, and the search knows the tensor.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ds_slide.patching.kinds import Forward, ForwardPatch, own_forward, replace_forward

_CACHES = ("cache", "past_key_values")
_LINES = re.compile(
    r"if position_ids is None: "
    r"past_seen_tokens = (?P<cache>\w+)\.get_seq_length\(\) if (?P=cache) is not None else 0 "
    r"position_ids = torch\.arange\(inputs_embeds\.shape\[1\], device=inputs_embeds\.device\) \+ past_seen_tokens "
    r"position_ids = position_ids\.unsqueeze\(0\)"
)
_SEARCH = "find_packed_sequence_indices"
MOST = 64
"""Lengths whose positions are kept, the latest ones: 8 bytes a token each."""
_known: OrderedDict[tuple[int, torch.device], torch.Tensor] = OrderedDict()


def patch_positions(model: nn.Module) -> Iterator[ForwardPatch]:
    """Patch the decoders in `model` whose forward numbers its tokens in the known lines. The search in transformers is
    exchanged for one that asks for our positions first, for good."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, _SEARCH):
        return
    for module in model.modules():
        kind: Any = type(module)
        if own_forward(module) is not None and numbers_tokens(kind):
            exchange_search(masking)
            yield replace_forward(module, "positions", with_positions)


@functools.cache
def numbers_tokens(kind: Any) -> bool:
    """Whether the forward of a class numbers its tokens in the known lines, and does nothing else with positions that
    are None."""
    if not kind.__module__.startswith("transformers."):
        return False
    try:
        source = " ".join(inspect.getsource(inspect.unwrap(kind.forward)).split())
    except (OSError, TypeError):
        return False
    found = _LINES.search(source)
    return found is not None and found["cache"] in _CACHES and source.count("position_ids is") == 1


def with_positions(original: Forward) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(("input_ids",), args, strict=False)) | kwargs
        given = named.get("input_ids") if named.get("inputs_embeds") is None else named["inputs_embeds"]
        is_first = all(named.get(name) is None for name in ("attention_mask", "position_ids", *_CACHES))
        if is_first and len(args) < 2 and isinstance(given, torch.Tensor) and not _is_traced():
            kwargs["position_ids"] = positions(given.shape[1], given.device)
        return original(self, *args, **kwargs)

    return forward


def positions(length: int, device: torch.device) -> torch.Tensor:
    """Return 0 to `length` - 1, [1, length], on the device. Whoever writes to it gets a new one next time."""
    known = _known.pop((length, device), None)
    if known is None or known._version:
        with torch.inference_mode(False):
            known = torch.arange(length, device=device)[None].clone()
    _known[length, device] = known
    if len(_known) > MOST:
        _known.popitem(last=False)
    return known


def exchange_search(masking: Any) -> None:
    """Let the search for packed sequences know our positions."""
    original = getattr(masking, _SEARCH)
    if hasattr(original, "knows_positions"):
        return

    @functools.wraps(original)
    def search(position_ids: torch.Tensor) -> torch.Tensor | None:
        if not _is_traced() and isinstance(position_ids, torch.Tensor) and position_ids.dim() == 2:
            known = _known.get((position_ids.shape[1], position_ids.device))
            # For several sequences it is a view of ours.
            if known is not None and not known._version and (position_ids is known or position_ids._base is known):
                return None
        found: torch.Tensor | None = original(position_ids)
        return found

    search.knows_positions = True  # type: ignore[attr-defined]
    setattr(masking, _SEARCH, search)


def _is_traced() -> bool:
    """Whether a compiler or a recording sees the calls, for which transformers does not ask either."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
